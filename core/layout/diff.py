"""The difference of two layouts: which rank copies which block to which rank."""

from collections.abc import Iterable
from dataclasses import dataclass

from pacekeeper.core.layout.layout import Block, Layout


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Copy of one block. `source` None: no holder is alive, a checkpoint has it."""

    block: Block
    source: int | None
    destination: int


def diff_layouts(
    old: Layout, new: Layout, *, living: Iterable[int] | None = None
) -> tuple[Transfer, ...]:
    """The copies that turn `old` into `new`, in the order of `blocks()`.

    Args:
        old: the layout in use.
        new: the next layout, of the same model.
        living: the ranks that may send; default: all ranks of `old`.

    Returns:
        One transfer per block and new holder. The source is the living holder with the fewest
        copies to
        send so far, lowest rank first, or None if no holder is alive.

    Raises:
        ValueError: the layouts are of different models.
    """
    old_blocks, new_blocks = tuple(old.blocks()), tuple(new.blocks())
    if old_blocks != new_blocks:
        raise ValueError("the layouts are of two different models")
    alive = set(old.ranks if living is None else living)
    sends: dict[int, int] = {}
    result: list[Transfer] = []
    for block in new_blocks:
        holders = set(old.holders(block))
        sources = holders & alive
        for destination in new.holders(block):
            if destination in holders:
                continue
            source = min(sources, key=lambda r: (sends.get(r, 0), r)) if sources else None
            if source is not None:
                sends[source] = sends.get(source, 0) + 1
            result.append(Transfer(block, source, destination))
    return tuple(result)


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
