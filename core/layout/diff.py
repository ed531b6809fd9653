"""The difference of two layouts: which rank copies which block to which rank.

Pure; trainers send what it names (weights, optimizer state or both), the controller prices it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.core.layout.layout import Block, Layout


class StatePart(StrEnum):
    """The part of a block that is copied."""

    ALL = "all"  # weights and optimizer state
    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Copy of one block. `source` None: no rank that has it is alive, a checkpoint has it."""

    block: Block
    source: int | None
    destination: int
    part: StatePart = StatePart.ALL


def diff_layouts(
    old: Layout, new: Layout, *, living: Iterable[int] | None = None
) -> tuple[Transfer, ...]:
    """The copies that turn `old` into `new`, in the order of `blocks()`.

    A rank that needs both parts of a block gets both in one copy, from a rank that has both.

    Args:
        old: the layout in use.
        new: the next layout, of the same model.
        living: the ranks that may send; default: all ranks of `old`.

    Returns:
        For each block a transfer to each rank that lacks what it is to have. The source is the
        living rank that has it and has the fewest copies to send so far, lowest rank first, or None
        if there is none.

    Raises:
        ValueError: the layouts are of different models.
    """
    if old.model != new.model:
        raise ValueError("the layouts are of two different models")
    alive = set(old.ranks if living is None else living)
    sends: dict[int, int] = {}
    result: list[Transfer] = []

    def send(block: Block, had: Collection[int], to: Iterable[int], part: StatePart) -> None:
        sources = alive.intersection(had)
        for destination in to:
            source = min(sources, key=lambda r: (sends.get(r, 0), r)) if sources else None
            if source is not None:
                sends[source] = sends.get(source, 0) + 1
            result.append(Transfer(block, source, destination, part))

    owned = set(new.owned_blocks() if old.state_owners or new.state_owners else ())
    for block in new.blocks():
        had, wants = old.holders(block), new.holders(block)
        fresh = [] if wants == had else sorted(set(wants).difference(had))
        if block not in owned:  # who has the block has all of it
            if fresh:
                send(block, had, fresh, StatePart.ALL)
            continue
        had_state = old.state_holders(block)
        lacking = set(new.state_holders(block)).difference(had_state)
        both = lacking.intersection(fresh)
        if alive.isdisjoint(had_state) and not alive.isdisjoint(had):
            both = set()  # from two sources
        send(block, had_state, sorted(both), StatePart.ALL)
        send(block, had, [rank for rank in fresh if rank not in both], StatePart.WEIGHTS)
        send(block, had_state, sorted(lacking - both), StatePart.OPTIMIZER)
    return tuple(result)


def lost_blocks(layout: Layout, living: Collection[int]) -> tuple[Block, ...]:
    """The blocks of which no living rank has the weights, or none the optimizer state, in order."""
    alive = set(living)
    return tuple(
        block
        for block in layout.blocks()
        if alive.isdisjoint(layout.holders(block)) or alive.isdisjoint(layout.state_holders(block))
    )


def moves_layers(old: Layout, new: Layout) -> bool:
    """Whether a rank runs a layer in `new` that it does not run in `old`."""
    return any(
        not set(new.ranks_of_layer(layer)) <= set(old.ranks_of_layer(layer))
        for layer in range(new.num_layers)
    )


def added_replicas(old: Layout, new: Layout) -> tuple[int, ...]:
    """The rank of each replica that `new` has and `old` lacks."""
    fresh: list[int] = []
    for then, now in zip(old.experts, new.experts, strict=True):
        for had, has in zip(then, now, strict=True):
            held = {replica.rank for replica in had}
            fresh += [replica.rank for replica in has if replica.rank not in held]
    return tuple(fresh)
