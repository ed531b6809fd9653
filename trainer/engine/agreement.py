"""Checks that all ranks start the same job; else all stop, with one reason."""

import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.trainer.groups.group import Group

T = TypeVar("T")


class OtherRanksError(ConfigError):
    """Other ranks have a problem; their own errors say which."""


def require_agreement(facts: Mapping[str, object], group: Group) -> None:
    """Compare what each rank was given; all ranks call it together.

    Args:
        facts: By name, what must be equal on all ranks; equal names on all ranks.
        group: All ranks, with tensors in host memory.

    Raises:
        ConfigError: On all ranks, with the first fact in which some differ from the lowest rank.
    """
    own = torch.tensor([zlib.crc32(repr(value).encode()) for value in facts.values()])
    told = group.all_gather(own)
    for place, (name, value) in enumerate(facts.items()):
        others = [
            rank
            for rank, crc in zip(group.ranks, told[:, place].tolist(), strict=True)
            if crc != told[0, place].item()
        ]
        if others:
            raise ConfigError(
                f"ranks {format_ranks(others)} have another {name} than rank {group.ranks[0]}; "
                f"rank {group.rank} has {str(value)[:100]}",
                remedy="start all ranks with the same installation, model and settings",
            )


def on_all_ranks(make: Callable[[], T], group: Group) -> T:
    """Call `make` on all ranks, which call this together; if it fails on one, all raise.

    Args:
        make: Communicates with no other rank.
        group: All ranks, with tensors in host memory.

    Raises:
        Exception: That of `make`; where it failed elsewhere only, OtherRanksError.
    """
    made: T | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:  # out of memory, say: the others must not wait
        failure = error
    told = group.all_gather(torch.tensor([failure is not None])).flatten().tolist()
    if failure is not None:
        raise failure
    if bad := [rank for rank, is_bad in zip(group.ranks, told, strict=True) if is_bad]:
        raise OtherRanksError(
            f"{format_ranks(bad)} cannot go on", remedy="their own messages say why"
        )
    return made  # type: ignore[return-value]


def require_all(problem: str, group: Group) -> None:
    """Raise on all ranks if one of them has a problem; all ranks call it together.

    Args:
        problem: What is wrong on this rank and what to do; "": nothing.
        group: All ranks, with tensors in host memory.

    Raises:
        ConfigError: On all ranks, if one has a problem.
    """

    def check() -> None:
        if problem:
            raise ConfigError(problem)

    on_all_ranks(check, group)
