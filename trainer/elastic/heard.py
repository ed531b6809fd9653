"""What others wrote into a store, as this side understands it; garble ends in words. Pure.

Whoever reaches a job's network can write there (docs/security.md), and another version may: a
launcher or a rank that hears what it can not understand says so, and whose word it was.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pacekeeper.core.errors import ConfigError, VersionError
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS

T = TypeVar("T")
MOST_SHOWN = 200  # characters of an error, which may quote what came
_GARBLE = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError,
    ConfigError,
)  # fmt: skip


def understood(what: str, text: str, read: Callable[[Any], T]) -> T:
    """`read` of the JSON in `text`. Raises VersionError where either does not go."""
    try:
        return read(json.loads(text))
    except _GARBLE as error:
        raise VersionError(
            f"{what} say what this one does not understand: {_short(error)}",
            remedy="install the same pacekeeper on all nodes of the job; who else reaches them?",
        ) from None


def whole(value: Any, least: int = 0, most: int = 2**62) -> int:
    """An integer in this range. Raises TypeError, ValueError."""
    if type(value) is not int:
        raise TypeError(f"expected a whole number, got {_short(value)}")
    if not least <= value <= most:
        raise ValueError(f"expected {least} to {most}, got {_short(value)}")
    return value


def rank_of(value: Any) -> int:
    """A rank, or a node: a job has no more of them. Raises TypeError, ValueError."""
    return whole(value, 0, MAX_RANKS - 1)


def text_of(value: Any) -> str:
    """Text. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {_short(value)}")
    return value


def flag_of(value: Any) -> bool:
    """True or False. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, got {_short(value)}")
    return value


def list_of(read: Callable[[Any], T], values: Any) -> tuple[T, ...]:
    """Each of a list. Raises TypeError, and as `read`."""
    if not isinstance(values, list):
        raise TypeError(f"expected a list, got {_short(values)}")
    return tuple(read(value) for value in values)


def number_in(text: str) -> int | None:
    """A rank's or node's number in words of ours; None for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_RANKS))):
        return None
    number = int(text)
    return number if number < MAX_RANKS else None


def _short(value: object) -> str:
    try:
        return repr(value)[:MOST_SHOWN]
    except (ValueError, RecursionError):  # an integer of more digits than are written
        return f"a {type(value).__name__} that can not be shown"
