"""Snapshots that copy some experts of each layer: the others are where they were copied last."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.partial_experts import select_experts
from pacekeeper.core.checkpoint.two_level import choose_num_snapshot
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.core.layout.shrink import RecoveryPlan
from pacekeeper.trainer.checkpoint.policies.interval import CheckpointCostMeter
from pacekeeper.trainer.checkpoint.restore import MEMORY
from pacekeeper.trainer.checkpoint.tensors import piece_bytes, piece_rows
from support.checkpoints import TINY
from support.thread_ranks import State, ThreadRanks

CONFIG = replace(
    TINY,
    steps=100,
    num_layers=2,
    num_experts=4,
    rows_per_step=4,
    replicas=1,
    clock="cpu",
    snapshot_period_steps=1,
    checkpoint_period_steps=99,
    experts_per_checkpoint=1,
    experts_per_snapshot=2,
    lost_tokens_limit=0.0,
)
EQUAL = [[0.0] * 4] * 2


def job_in(directory: Path, config: TrainConfig = CONFIG) -> ThreadRanks:
    """Four ranks on two nodes, each expert on one of them."""
    layout = even_layout(
        ranks=range(4), num_layers=2, num_experts=4, replicas=1,
        num_virtual_shards=config.num_heads, generation=2,
    )  # fmt: skip
    nodes = {0: 0, 1: 0, 2: 1, 3: 1}
    return ThreadRanks(config=config, layout=layout, directory=directory, node_of=nodes)


def trained(job: ThreadRanks, steps: int) -> list[dict[Block, State]]:
    """The blocks after each step; none of step 0."""
    states: list[dict[Block, State]] = [{}]
    for _ in range(steps):
        job.train(1)
        states.append(job.blocks())
    return states


def steps_in_memory(layout: Layout, until: int) -> dict[Block, int]:
    """The step of each block's newest copy: the first snapshot has all."""
    found = dict.fromkeys(layout.blocks(), 1)
    for step in range(2, until + 1):
        chosen = select_experts(EQUAL, 2, step)
        for block in found:
            if block.kind is not BlockKind.EXPERT or block in chosen:
                found[block] = step
    return found


def assert_is(found: dict[Block, State], states: list[dict[Block, State]], block: Block, step: int):  # type: ignore[no-untyped-def]
    for name, tensor in found[block].items():
        assert tensor.equal(states[step][block][name]), (block, step)


def test_lost_experts_come_from_the_newest_snapshot_that_has_them(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    states = trained(job, 4)
    in_memory = steps_in_memory(job.layout, 4)
    lost = {b for b in job.layout.blocks() if job.layout.holders(b) == (3,)}
    assert len({in_memory[block] for block in lost}) > 1, "the test can tell steps apart"
    chosen = job.die([3])
    assert chosen.only_lost and job.step == 4
    found = job.blocks()
    for block in found:
        assert_is(found, states, block, in_memory[block] if block in lost else 4)
    assert sum(job.ranks[0].checkpoints.partial.books.lost) > 0
    job.close()


def test_all_go_back_to_dense_state_of_one_step_and_experts_of_several(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    states = trained(job, 3)
    routed = job.ranks[0].checkpoints.partial.account.routed
    in_memory = steps_in_memory(job.layout, 3)
    seen = {}
    for rank in job.ranks.values():
        rank.leave()
        for kept in rank.checkpoints.snapshots.kept:
            seen[kept.id.step] = kept.account.routed
    layout = replace(job.layout, generation=job.layout.generation + 1)
    job._settle(RecoveryPlan(layout=layout, restore=(MEMORY,)))
    found = job.blocks()
    for block in found:
        assert_is(found, states, block, in_memory[block])
    experts = [block for block in in_memory if block.kind is BlockKind.EXPERT]
    wanted = [0, 0]
    for block in experts:
        then = seen[in_memory[block]][block.layer][block.index]
        wanted[block.layer] += routed[block.layer][block.index] - then
    books = [rank.checkpoints.partial.books for rank in job.ranks.values()]
    assert sum(wanted) > 0 and {tuple(one.lost) for one in books} == {tuple(wanted)}
    assert {one.num_faults for one in books} == {1}
    job.train(1)
    first = job.ranks[0].checkpoints.snapshots.kept[0]
    own = {piece.block for piece in first.pieces}
    assert first.id.step == 4 and own >= {b for b in experts if job.layout.holders(b) == (0,)}
    job.close()


def test_two_copies_of_each_piece_stay_however_many_snapshots_they_are_in(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.train(7)
    for rank in job.ranks.values():
        kept = rank.checkpoints.snapshots.kept
        copies = Counter(piece for snapshot in kept for piece in snapshot.pieces)
        assert set(copies.values()) == {2}
        assert [one.id.step for one in kept] == sorted((k.id.step for k in kept), reverse=True)
        assert all(kept[0].id.step - one.id.step < 4 for one in kept)
    job.close()


def test_measured_snapshots_copy_what_the_slowest_rank_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, experts_per_snapshot=-1)
    job = job_in(tmp_path, config)
    states = job.ranks[0].checkpoints.states
    sizes = piece_bytes(states, job.layout)
    rows = piece_rows(states, sizes)

    def fitting(budget: float) -> int:
        return choose_num_snapshot(job.layout, sizes, rows, budget_bytes=budget, num_persisted=1)

    budget = next(b for b in range(1000, 1_000_000, 500) if fitting(b) == 3)
    budgets = iter([budget * 9.0, budget, budget * 4, budget * 2] * 9)
    monkeypatch.setattr(CheckpointCostMeter, "budget_bytes", property(lambda _: next(budgets)))
    job.train(3)
    copied = {
        piece
        for rank in job.ranks.values()
        for piece in rank.checkpoints.snapshots.kept[0].pieces
        if piece.block.kind is BlockKind.EXPERT and not piece.kind
    }
    assert copied == {Piece(block) for block in select_experts(EQUAL, 3, 3)}
    job.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"experts_per_checkpoint": 0},
        {"experts_per_checkpoint": 3},
        {"experts_per_snapshot": -2},
    ],
)
def test_snapshots_of_some_experts_need_partial_checkpoints(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        replace(CONFIG, **wrong)  # type: ignore[arg-type]
