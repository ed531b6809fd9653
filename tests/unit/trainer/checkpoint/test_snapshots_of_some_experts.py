"""Snapshots that copy some experts of each layer: the others are where they were copied last."""

from collections import Counter
from dataclasses import replace

import pytest

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.partial_experts import select_experts
from pacekeeper.core.checkpoint.two_level import choose_num_snapshot
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.trainer.checkpoint.policies.interval import CheckpointCostMeter
from pacekeeper.trainer.checkpoint.restore import MEMORY
from pacekeeper.trainer.checkpoint.tensors import piece_bytes, piece_rows
from support.trainees import Job, assert_steps, snapshots_cut

CONFIG = JobConfig(
    job="some",
    steps=100,
    snapshot_period_steps=1,
    checkpoint_period_steps=99,
    experts_per_checkpoint=1,
    experts_per_snapshot=2,
    lost_tokens_limit=0.0,
    peer_timeout_s=60.0,
)
EQUAL = [[0.0] * 4] * 2


def job_of(config: JobConfig = CONFIG) -> Job:
    """Four ranks on two nodes, each expert on one of them."""
    layout = even_layout(ranks=range(4), num_layers=2, num_experts=4, replicas=1)
    return Job(config=config, layout=layout, node_of={0: 0, 1: 0, 2: 1, 3: 1})


def later(layout: Layout) -> Layout:
    """The same, of the next generation."""
    return replace(layout, generation=layout.generation + 1)


def steps_in_memory(layout: Layout, until: int) -> dict[Block, int]:
    """The step of each block's newest copy: the first snapshot has all."""
    found = dict.fromkeys(layout.blocks(), 1)
    for step in range(2, until + 1):
        chosen = select_experts(EQUAL, 2, step)
        for block in found:
            if block.kind is not BlockKind.EXPERT or block in chosen:
                found[block] = step
    return found


def test_lost_experts_come_from_the_newest_snapshot_that_has_them() -> None:
    job = job_of()
    states = job.trained(4)
    of_step = steps_in_memory(job.layout, 4)
    lost = [block for block in job.layout.blocks() if job.layout.holders(block) == (3,)]
    assert len({of_step[block] for block in lost}) > 1, "the test can tell steps apart"
    assert job.die([3]).only_lost and job.step == 4
    wanted = dict.fromkeys(of_step, 4) | {block: of_step[block] for block in lost}
    assert_steps(job.state(), states, wanted)
    assert sum(job.leader.checkpoints.partial.books.lost) > 0


def test_all_go_back_to_dense_state_of_one_step_and_experts_of_several() -> None:
    job = job_of()
    states = job.trained(3)
    routed = job.leader.checkpoints.partial.account.routed
    of_step = steps_in_memory(job.layout, 3)
    seen = {}
    for one in job.ranks.values():
        one.checkpoints.snapshots.leave()
        for kept in one.checkpoints.snapshots.kept:
            seen[kept.id.step] = kept.account.routed
    job.settle(RecoveryPlan(layout=later(job.layout), restore=(MEMORY,)))
    assert_steps(job.state(), states, of_step)
    experts = [block for block in of_step if block.kind is BlockKind.EXPERT]
    wanted = [0, 0]
    for block in experts:
        then = seen[of_step[block]][block.layer][block.index]
        wanted[block.layer] += routed[block.layer][block.index] - then
    books = [one.checkpoints.partial.books for one in job.ranks.values()]
    assert sum(wanted) > 0 and {tuple(one.lost) for one in books} == {tuple(wanted)}
    assert {one.num_faults for one in books} == {1}
    job.train(1)
    first = job.leader.checkpoints.snapshots.kept[0]
    own = {piece.block for piece in first.pieces}
    assert first.id.step == 4 and own >= {b for b in experts if job.layout.holders(b) == (0,)}


def test_dense_state_is_of_one_step_where_the_newest_snapshot_broke_on_its_way() -> None:
    job = job_of()
    states = job.trained(2)
    with snapshots_cut({0, 2}):
        job.train(1)
    job.settle(RecoveryPlan(layout=later(job.layout), restore=(MEMORY,)))
    assert job.step == 2
    assert_steps(job.state(), states, steps_in_memory(job.layout, 2))


def test_the_first_snapshot_of_a_layout_is_whole() -> None:
    job = job_of()
    job.train(2)
    job.settle(RecoveryPlan(layout=later(job.layout)))
    job.train(1)
    newest = [one.checkpoints.snapshots.kept[0] for one in job.ranks.values()]
    assert {piece.block for one in newest for piece in one.pieces} == set(job.layout.blocks())
    assert {one.id.step for one in newest} == {3}


def test_two_copies_of_each_piece_stay_however_many_snapshots_they_are_in() -> None:
    job = job_of()
    job.train(7)
    for one in job.ranks.values():
        kept = one.checkpoints.snapshots.kept
        copies = Counter(piece for snapshot in kept for piece in snapshot.pieces)
        assert set(copies.values()) == {2}
        steps = [snapshot.id.step for snapshot in kept]
        assert steps == sorted(steps, reverse=True) and steps[0] - steps[-1] < 4


def test_measured_snapshots_copy_what_the_slowest_rank_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_of(replace(CONFIG, experts_per_snapshot=-1))
    sizes = piece_bytes(job.leader.states, job.layout)
    rows = piece_rows(job.leader.states, sizes)

    def fitting(budget: float) -> int:
        return choose_num_snapshot(job.layout, sizes, rows, budget_bytes=budget, num_persisted=1)

    budget = next(b for b in range(1000, 1_000_000, 500) if fitting(b) == 3)
    budgets = iter([budget * 9.0, budget, budget * 4, budget * 2] * 9)
    monkeypatch.setattr(CheckpointCostMeter, "budget_bytes", property(lambda _: next(budgets)))
    job.train(3)
    copied = {
        piece
        for one in job.ranks.values()
        for piece in one.checkpoints.snapshots.kept[0].pieces
        if piece.block.kind is BlockKind.EXPERT and not piece.kind
    }
    assert copied == {Piece(block) for block in select_experts(EQUAL, 3, 3)}


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
