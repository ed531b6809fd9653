"""Compares the replicas of blocks bit by bit, and heals those that a majority contradicts.

Replicas are equal while all is well: they get the same sums of gradients and are updated alike. A
difference is silent corruption of a device, of memory or of a message, or a fault of ours. Which
replica is right is a vote: of two none is.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.layout.diff import Transfer
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import BlockStates, blocks_on
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.parallel.moves import checksum, fetch_blocks
from pacekeeper.trainer.parallel.row_exchange import exchange

_WORD = 8  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A block whose replicas are not equal.

    Attributes:
        block: The block.
        kind: Kind of its tensors that differ, as of `BlockStates.kinds`.
        sides: Ranks that hold equal replicas: most ranks first, then that with the lowest rank.
    """

    block: Block
    kind: str
    sides: tuple[tuple[int, ...], ...]

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the replicas are equal."""
        return 2 * len(self.sides[0]) > sum(map(len, self.sides))

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside of the majority; all ranks if there is none."""
        wrong = self.sides[1:] if self.has_majority else self.sides
        return tuple(sorted(rank for side in wrong for rank in side))

    def __str__(self) -> str:
        first, *others = ([*side] for side in self.sides)
        what = self.kind or "weights"
        return f"{self.block}: {what} on ranks {', '.join(map(str, others))} differ from {first}"


def compare_replicas(states: BlockStates, layout: Layout, group: Group) -> tuple[Difference, ...]:
    """Compare all replicas; all ranks call it together, between two steps, with the same result.

    Args:
        states: Blocks held here.
        layout: The layout in force.
        group: Its ranks, with tensors in host memory: checksums travel, not blocks.
    """
    held: dict[int, list[Block]] = {rank: [] for rank in group.ranks}
    for block in layout.blocks():
        holders = layout.holders(block)
        for rank in holders if len(holders) > 1 else ():
            held[rank].append(block)
    own = [_checksums(states, block) for block in held[group.rank]]
    sums = torch.stack(own).cpu() if own else torch.zeros(0, len(states.kinds), dtype=torch.int64)
    counts = [len(blocks) for blocks in held.values()]
    rows = exchange(sums.repeat(len(counts), 1), group, counts, [len(own)] * len(counts))
    by_rank = {
        rank: dict(zip(blocks, part.tolist(), strict=True))
        for (rank, blocks), part in zip(held.items(), rows.split(counts), strict=True)
    }
    return differences(by_rank, states.kinds)


def differences(
    by_rank: Mapping[int, Mapping[Block, Sequence[int]]], kinds: Sequence[str]
) -> tuple[Difference, ...]:
    """Return where replicas differ, given the checksums of each kind by rank and block. Pure."""
    holders: dict[Block, list[int]] = defaultdict(list)
    for rank, sums in sorted(by_rank.items()):
        for block in sums:
            holders[block].append(rank)
    found = []
    for block, ranks in holders.items():
        for place, kind in enumerate(kinds):
            sides: dict[int, list[int]] = defaultdict(list)
            for rank in ranks:
                sides[by_rank[rank][block][place]].append(rank)
            if len(sides) > 1:
                order = sorted(sides.values(), key=lambda side: (-len(side), side))
                found.append(Difference(block=block, kind=kind, sides=tuple(map(tuple, order))))
    return tuple(found)


def plan_healing(found: Sequence[Difference]) -> tuple[Transfer, ...] | None:
    """Return the copies that make all replicas equal to their majority; None: one has none. Pure.

    A block is copied whole: its source is a rank that is in the majority for every kind.
    """
    wrong: dict[Block, set[int]] = defaultdict(set)
    right: dict[Block, set[int]] = {}
    for one in found:
        if not one.has_majority:
            return None
        wrong[one.block] |= set(one.suspects)
        right[one.block] = right.get(one.block, set(one.sides[0])) & set(one.sides[0])
    if not all(right[block] for block in wrong):
        return None
    return tuple(
        Transfer(block=block, source=min(right[block]), destination=rank)
        for block, ranks in wrong.items()
        for rank in sorted(ranks)
    )


def heal_replicas(
    states: BlockStates, moves: Sequence[Transfer], layout: Layout, group: Group
) -> None:
    """Copy blocks over those that differ; all ranks call it together.

    Raises:
        CorruptStateError: On all ranks: a block arrived damaged on one.
    """
    fetched = fetch_blocks(states, moves, layout.generation, group)
    states.load(blocks_on(layout, group.rank), fetched.arrived, states.num_updates)


def _checksums(states: BlockStates, block: Block) -> Tensor:
    """The checksum of the tensors of each kind, int64 [kinds]; 0 for a kind without tensors."""
    return torch.stack(
        [
            sum(
                (
                    _checksum(part.view.to(states.device), number)
                    for number, part in enumerate(states.parts(block, kind).values())
                ),
                torch.zeros((), dtype=torch.int64, device=states.device),
            )
            for kind in states.kinds
        ]
    )


def _checksum(tensor: Tensor, number: int) -> Tensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    return checksum(torch.cat([data, data.new_zeros(-len(data) % _WORD)]), number)
