"""Blocks move with their optimizer state, or not at all."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pacekeeper.core.errors import ConfigError, CorruptStateError, LostStateError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, ExpertReplica, Layout, ReplicaSet
from pacekeeper.trainer.checkpoint.block_states import (
    blocks_on,
    read_block,
)
from pacekeeper.trainer.groups.group import Pending, SingleProcess
from pacekeeper.trainer.parallel.moves import (
    _number,
    assign_slots,
    checksum,
    commit_move,
    require_slots,
    stage_move,
)
from support.dict_states import States, value_of
from support.rank_threads import ThreadGroup, run_ranks

RANKS, LAYERS, EXPERTS = 3, 2, 4


def assert_holds(states: States, layout: Layout, rank: int) -> None:
    assert list(states.held) == list(blocks_on(layout, rank))
    for block in states.held:
        for name, tensor in value_of(block).items():
            assert torch.equal(read_block(states, block)[name], tensor)
            assert read_block(states, block)[name].dtype == tensor.dtype


def any_layout(
    chosen: random.Random, generation: int, ranks: Sequence[int] = range(RANKS)
) -> Layout:
    base = even_layout(
        ranks=ranks,
        num_layers=LAYERS,
        num_experts=EXPERTS,
        replicas=1,
        generation=generation,
    )

    def replicas() -> ReplicaSet:
        on = sorted(chosen.sample(ranks, chosen.randint(1, len(ranks))))
        return tuple(ExpertReplica(rank, 1.0 / len(on)) for rank in on)

    return replace(
        base, experts=tuple(tuple(replicas() for _ in range(EXPERTS)) for _ in range(LAYERS))
    )


@pytest.mark.parametrize("seed", range(4))
def test_after_any_moves_each_rank_holds_its_blocks_with_their_state(seed: int) -> None:
    chosen = random.Random(seed)
    layouts = [any_layout(chosen, generation) for generation in range(1, 6)]

    def work(group: ThreadGroup) -> int:
        states = States(blocks_on(layouts[0], group.rank), 1)
        moved = 0
        for old, new in pairwise(layouts):
            before = dict(states.held)
            staged = stage_move(states, old, new, group)
            assert_holds(states, old, group.rank)
            commit_move(states, staged)
            assert_holds(states, new, group.rank)
            assert all(before[b] is states.held[b] for b in before.keys() & states.held.keys())
            moved += staged.moved_bytes
        return moved

    assert sum(run_ranks(RANKS, work)) > 0


def test_a_rank_that_joins_gets_dense_blocks_too_and_the_number_of_updates() -> None:
    chosen = random.Random(3)
    old, new = any_layout(chosen, 1, (0, 2)), any_layout(chosen, 2)

    def work(group: ThreadGroup) -> int:
        states = States(blocks_on(old, group.rank), 7 * (group.rank != 1))
        commit_move(states, stage_move(states, old, new, group))
        assert_holds(states, new, group.rank)
        return states.num_updates

    assert run_ranks(RANKS, work) == [7] * RANKS


@dataclass(frozen=True)
class Lost:
    """Blocks that no living rank holds after the death of rank 2, where `old` was in force."""

    old: Layout
    new: Layout
    blocks: tuple[Block, ...]


def lost() -> Lost:
    old = any_layout(random.Random(0), 1)
    alone = tuple(
        b for b in old.blocks() if b.kind is BlockKind.EXPERT and old.holders(b) == (RANKS - 1,)
    )
    assert alone
    return Lost(old, any_layout(random.Random(1), 2, range(RANKS - 1)), alone)


def test_blocks_of_the_dead_are_refilled_or_missed_on_all_ranks() -> None:
    case = lost()

    def work(group: ThreadGroup) -> bool:
        states = States(blocks_on(case.old, group.rank), 1)
        with pytest.raises(LostStateError):
            stage_move(states, case.old, case.new, group)
        own = {b: value_of(b) for b in case.blocks if group.rank in case.new.holders(b)}
        commit_move(states, stage_move(states, case.old, case.new, group, own))
        assert_holds(states, case.new, group.rank)
        return True

    assert run_ranks(RANKS - 1, work) == [True] * (RANKS - 1)


class BadLink(ThreadGroup):
    """Flips one bit of the rows that arrive at rank 1."""

    bit = 0

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Pending:
        done = super().all_to_all_rows(output, rows, receive, send)
        done.wait()
        if self.rank == 1 and len(output):
            output[self.bit // 8 % len(output)] ^= 1 << self.bit % 8
        return SingleProcess().all_reduce(output)


@pytest.mark.parametrize("bit", [0, 7, 63, 64, 127, 500])
def test_a_changed_bit_stops_the_move_on_all_ranks_before_anything_changes(
    bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(0)
    old, new = any_layout(chosen, 1), any_layout(chosen, 2)
    monkeypatch.setattr(BadLink, "bit", bit)

    def work(group: ThreadGroup) -> bool:
        states = States(blocks_on(old, group.rank), 1)
        bad = BadLink(group._hub, group.rank, range(RANKS))
        with pytest.raises(CorruptStateError):
            stage_move(states, old, new, bad)
        assert_holds(states, old, group.rank)
        return True

    assert run_ranks(RANKS, work) == [True] * RANKS


def test_thechecksum_tells_exchanged_missing_and_sign_flipped_words() -> None:
    number, other = (_number(2, Block(BlockKind.EXPERT, 1, expert)) for expert in (0, 1))
    data = torch.tensor([1.5, -1.5, 0.25, 7.0], dtype=torch.float64)

    def told(values: torch.Tensor, of: int = number) -> int:
        return int(checksum(values.view(torch.uint8), of))

    assert told(data) != told(data[[1, 0, 2, 3]])
    assert told(data) != told(data * torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    assert told(data) != told(data, other)
    assert told(torch.zeros(4, dtype=torch.float64)) != 0
    assert told(data) == told(data.clone())


def test_a_layout_that_needs_more_slots_is_rejected_before_anything_moves() -> None:
    layout = any_layout(random.Random(0), 7)
    most = max(len(layout.experts_on(r, layer)) for r in range(RANKS) for layer in range(LAYERS))
    require_slots(layout, most)
    with pytest.raises(ConfigError):
        require_slots(layout, most - 1)


def test_what_stays_keeps_its_slot() -> None:
    assert assign_slots({5: 2, 1: 0}, [1, 3, 4], 4) == {1: 0, 3: 1, 4: 2}
    with pytest.raises(ValueError):
        assign_slots({}, [1, 2, 3], 2)
