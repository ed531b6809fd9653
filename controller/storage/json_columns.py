"""Columns of the store that are JSON: exactly what was written, or a ValueError. Pure."""

import json
from typing import Any

SMALL = 1 << 32  # steps, ranks and generations are less: so they are told
LARGE = 1 << 62  # numbers that are counted on, and bytes: SQLite holds twice that


def whole(value: Any, below: int = SMALL) -> int:
    """A count. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r:.40} is no whole number below {below}")
    return value


def real(value: Any) -> float:
    """A number. Raises ValueError for anything else."""
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{value!r:.40} is too large a number") from None


def text(value: Any) -> str:
    """A text that can be told. Raises ValueError for anything else."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is no text")
    value.encode()
    return value


def items(column: str) -> list[Any]:
    """Those of a list. Raises ValueError for anything else."""
    try:
        found = json.loads(column)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(found) is not list:
        raise ValueError(f"{column:.40} is no list")
    return found


def pairs(column: str) -> list[tuple[Any, Any]]:
    """Those of a list. Raises ValueError for anything else."""
    found = items(column)
    if not all(type(one) is list and len(one) == 2 for one in found):
        raise ValueError(f"{column:.40} is no list of pairs")
    return [(one, other) for one, other in found]
