"""Replicas that differ are found on all ranks, and made equal to their majority."""

import random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.block_states import WEIGHTS, blocks_on, read_block
from pacekeeper.trainer.parallel.replica_check import (
    Difference,
    compare_replicas,
    differences,
    heal_replicas,
    plan_healing,
)
from support.dict_states import STATE, States, value_of
from support.rank_threads import ThreadGroup, run_ranks

EXPERT, DENSE = Block(BlockKind.EXPERT, 1, 2), Block(BlockKind.EMBEDDING)


def layout_of(ranks: int, replicas: int) -> Layout:
    return even_layout(ranks=range(ranks), num_layers=2, num_experts=4, replicas=replicas)


@pytest.mark.parametrize("block", [EXPERT, DENSE])
@pytest.mark.parametrize("name", ["bias", "up.exp_avg", "up.step"])
def test_one_of_three_is_found_and_healed(block: Block, name: str) -> None:
    layout = layout_of(3, 3)

    def work(group: ThreadGroup) -> tuple[Difference, ...]:
        states = States(blocks_on(layout, group.rank), 5)
        assert compare_replicas(states, layout, group) == ()
        if group.rank == 1:
            states.held[block][name].view(-1)[0] += 1
        found = compare_replicas(states, layout, group)
        moves = plan_healing(found)
        assert moves is not None
        heal_replicas(states, moves, layout, group)
        assert compare_replicas(states, layout, group) == ()
        for one, tensor in read_block(states, block).items():
            assert tensor.equal(value_of(block)[one])
        assert states.num_updates == 5
        return found

    kind = STATE if "." in name else WEIGHTS
    expected = Difference(block=block, kind=kind, sides=((0, 2), (1,)))
    assert run_ranks(3, work) == [(expected,)] * 3
    assert expected.suspects == (1,)


def test_of_two_replicas_none_is_right() -> None:
    layout = layout_of(4, 2)
    first, second = layout.holders(EXPERT)

    def work(group: ThreadGroup) -> tuple[Difference, ...]:
        states = States(blocks_on(layout, group.rank), 5)
        if group.rank == second:
            states.held[EXPERT]["up"] *= -1.0
        return compare_replicas(states, layout, group)

    for found in run_ranks(4, work):
        (one,) = found
        assert plan_healing(found) is None
        assert one.suspects == (first, second) and not one.has_majority


@given(st.randoms(use_true_random=False), st.integers(2, 5))
def test_healing_copies_only_from_ranks_that_are_right_in_all_kinds(
    chosen: random.Random, size: int
) -> None:
    blocks = [Block(BlockKind.EXPERT, 0, i) for i in range(3)]
    truth = {block: (7, 9) for block in blocks}
    wrong = {
        (rank, block, place)
        for rank in range(size)
        for block in blocks
        for place in (0, 1)
        if chosen.random() < 0.2
    }
    by_rank = {
        rank: {
            block: [
                value + 100 * (rank + 1) * ((rank, block, place) in wrong)
                for place, value in enumerate(truth[block])
            ]
            for block in blocks
        }
        for rank in range(size)
    }
    found = differences(by_rank, (WEIGHTS, STATE))
    moves = plan_healing(found)
    event(f"healed: {bool(moves)}, no majority: {moves is None}")
    for move in moves or ():
        assert move.source is not None
        assert not {(move.source, move.block, place) for place in (0, 1)} & wrong
        by_rank[move.destination][move.block] = by_rank[move.source][move.block]
    if moves is not None:
        assert differences(by_rank, (WEIGHTS, STATE)) == ()
    elif size > 2:
        assert any(
            2 * sum((rank, block, place) in wrong for rank in range(size)) >= size
            or sum((r, block, p) in wrong for r in range(size) for p in (0, 1)) >= size
            for block in blocks
            for place in (0, 1)
        )
