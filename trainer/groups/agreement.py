"""Checks that all ranks start the same job; else all stop, with one reason."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

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
    values = group.all_gather(own)
    for place, (name, value) in enumerate(facts.items()):
        others = [
            rank
            for rank, crc in zip(group.ranks, values[:, place].tolist(), strict=True)
            if crc != values[0, place].item()
        ]
        if others:
            raise ConfigError(
                f"ranks {format_ranks(others)} have another {name} than rank {group.ranks[0]}; "
                f"rank {group.rank} has {str(value)[:100]}",
                remedy="start all ranks with the same installation, model and settings",
            )


def exchange_on_all_ranks(
    make: Callable[[], tuple[T, Sequence[int]]], num_values: int, group: Group
) -> tuple[T, Tensor]:
    """Call `make` on all ranks and exchange integers of each; if it fails on one, all raise.

    Args:
        make: Returns anything, and `num_values` integers for all ranks; it communicates with no
            other rank.
        num_values: The same on all ranks.
        group: All ranks, with tensors in host memory.

    Returns:
        What `make` returned here, and the integers of all ranks [ranks, num_values].

    Raises:
        Exception: That of `make`; where it failed elsewhere only, OtherRanksError.
    """
    made: T | None = None
    values: Sequence[int] = [0] * num_values
    failure: Exception | None = None
    try:
        made, values = make()
    except Exception as error:  # out of memory, say: the others must not wait
        failure = error
    rows = group.all_gather(torch.tensor([failure is not None, *values], dtype=torch.int64))
    if failure is not None:
        raise failure
    is_bad = rows[:, 0].tolist()
    if bad := [rank for rank, one in zip(group.ranks, is_bad, strict=True) if one]:
        raise OtherRanksError(
            f"ranks {format_ranks(bad)} cannot go on", remedy="their own messages say why"
        )
    return made, rows[:, 1:]  # type: ignore[return-value]


def on_all_ranks(make: Callable[[], T], group: Group) -> T:
    """Call `make` on all ranks, which call this together; if it fails on one, all raise.

    Args:
        make: Communicates with no other rank.
        group: All ranks, with tensors in host memory.

    Raises:
        Exception: That of `make`; where it failed elsewhere only, OtherRanksError.
    """
    made, _ = exchange_on_all_ranks(lambda: (make(), ()), 0, group)
    return made
