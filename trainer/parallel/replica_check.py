"""Compares the replicas of blocks bit by bit, and heals those that a majority contradicts.

Replicas are equal while all is well: they get the same sums of gradients and are updated alike. A
difference is silent corruption of a device, of memory or of a message, or a fault of ours. Which
replica is right is a vote: of two none is.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.write_plan import piece_holders
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.diff import StatePart, Transfer
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import BlockStates, blocks_on
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.parallel.moves import checksum, fetch_blocks
from pacekeeper.trainer.parallel.row_exchange import exchange

_WORD = 8  # bytes
_MOST_NAMED = 4  # differences in a message
_log = logging.getLogger(__name__)


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
        rank: {
            block: [
                one if rank in piece_holders(layout, Piece(block, kind)) else None
                for kind, one in zip(states.kinds, of_block, strict=True)
            ]
            for block, of_block in zip(blocks, part.tolist(), strict=True)
        }
        for (rank, blocks), part in zip(held.items(), rows.split(counts), strict=True)
    }
    return differences(by_rank, states.kinds)


def differences(
    by_rank: Mapping[int, Mapping[Block, Sequence[int | None]]], kinds: Sequence[str]
) -> tuple[Difference, ...]:
    """Return where replicas differ, given the checksums of each kind by rank and block. Pure.

    None stands for what a rank does not have: optimizer state of blocks that others own.
    """
    holders: dict[Block, list[int]] = defaultdict(list)
    for rank, sums in sorted(by_rank.items()):
        for block in sums:
            holders[block].append(rank)
    found = []
    for block, ranks in holders.items():
        for place, kind in enumerate(kinds):
            sides: dict[int, list[int]] = defaultdict(list)
            for rank in ranks:
                one = by_rank[rank][block][place]
                if one is not None:
                    sides[one].append(rank)
            if len(sides) > 1:
                order = sorted(sides.values(), key=lambda side: (-len(side), side))
                found.append(Difference(block=block, kind=kind, sides=tuple(map(tuple, order))))
    return tuple(found)


def plan_healing(found: Sequence[Difference]) -> tuple[Transfer, ...] | None:
    """Return the copies that make all replicas equal to their majority; None: one has none. Pure.

    The source of a block is a rank that is in the majority for all kinds that differ.
    """
    wrong: dict[Block, set[int]] = defaultdict(set)
    right: dict[Block, set[int]] = {}
    parts: dict[Block, StatePart] = {}
    for one in found:
        if not one.has_majority:
            return None
        part = StatePart.OPTIMIZER if one.kind else StatePart.WEIGHTS
        parts[one.block] = part if parts.get(one.block, part) is part else StatePart.ALL
        wrong[one.block] |= set(one.suspects)
        right[one.block] = right.get(one.block, set(one.sides[0])) & set(one.sides[0])
    if not all(right[block] for block in wrong):
        return None
    return tuple(
        Transfer(block=block, source=min(right[block]), destination=rank, part=parts[block])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """What a comparison of all replicas came to.

    Attributes:
        events: For the log of this rank.
        sound_step: Steps committed when replicas were last equal, if some differ now and none is
            known to be right; None: all are equal, or were made so.
        difference: What differs then.
        num_returns: How often that happened since replicas were last equal, this time included.
    """

    events: tuple[dict[str, object], ...] = ()
    sound_step: int | None = None
    difference: str = ""
    num_returns: int = 0


class ReplicaGuard:
    """Compares all replicas from time to time, and heals those that a majority contradicts.

    Attributes:
        sound_step: Steps committed when they were last equal, as far as this rank knows.
    """

    def __init__(self) -> None:
        self.sound_step = 0
        self._num_returns = 0

    def check(
        self, states: BlockStates, step: int, layout: Layout, groups: EngineGroups
    ) -> CheckOutcome:
        """Compare all replicas; all ranks call it together, between two steps.

        Args:
            states: Blocks held here.
            step: Steps committed.
            layout: The layout in force.
            groups: Of its ranks.
        """
        found = compare_replicas(states, layout, groups.control)
        moves = plan_healing(found)
        suspects = sorted({rank for one in found for rank in one.suspects})
        own: dict[str, object] = {"step": step - 1, "ranks": suspects}
        if moves is None:
            self._num_returns += 1
            known = groups.control.all_gather(torch.tensor([self.sound_step, self._num_returns]))
            sound_step, num_returns = known.amax(0).tolist()  # who came late knows of no check
            named = "; ".join(map(str, found[:_MOST_NAMED]))
            return CheckOutcome(
                events=({"event": "differed"} | own,),
                sound_step=sound_step,
                num_returns=num_returns,
                difference=f"after step {step - 1} replicas on ranks {format_ranks(suspects)} "
                f"differ and none has a majority ({named})",
            )
        events: list[dict[str, object]] = []
        if moves:
            heal_replicas(states, moves, layout, groups.exchange)
            _log.warning(
                "step=%d replicas on ranks %s differed from the majority and were replaced: "
                "suspect silent corruption of their devices or memory",
                step - 1,
                format_ranks(suspects),
            )
            events.append({"event": "healed"} | own)
        self.sound_step, self._num_returns = step, 0
        return CheckOutcome(events=(*events, {"event": "checked", "step": step - 1}))
