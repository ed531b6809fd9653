"""Snapshots in memory and on a partner: what is left after deaths, and what is taken from where."""

import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint import in_memory as snapshots
from pacekeeper.trainer.checkpoint.async_writer import SaveResult
from pacekeeper.trainer.checkpoint.reader import complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.restore import MEMORY
from pacekeeper.trainer.checkpoint.storage import open_storage
from pacekeeper.trainer.groups import checked_payload
from support.rank_threads import ThreadGroup
from support.trainees import Job, Trainee, assert_all_same, assert_steps, same, snapshots_cut

CONFIG = JobConfig(
    job="memory",
    steps=100,
    snapshot_period_steps=1,
    checkpoint_period_steps=99,
    peer_timeout_s=60.0,
)
LAYOUT = even_layout(ranks=range(4), num_layers=2, num_experts=4, replicas=1)
NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def job_of(config: JobConfig = CONFIG) -> Job:
    """Four ranks on two nodes, each expert on one of them."""
    return Job(config=config, layout=LAYOUT, node_of=NODES)


def newest(job: Job) -> list[int]:
    """Of each rank, the step of the newest complete snapshot."""
    return [rank.checkpoints.snapshots.kept[0].id.step for rank in job.ranks.values()]


def experts_on(job: Job, ranks: Collection[int]) -> set[Block]:
    return {
        Block(BlockKind.EXPERT, layer, expert)
        for layer in range(2)
        for rank in ranks
        for expert in job.layout.experts_on(rank, layer)
    }


@pytest.mark.parametrize("victims", [(3,), (2, 3), (1,)])
def test_all_go_back_to_the_newest_snapshot_though_a_whole_node_is_gone(
    victims: tuple[int, ...],
) -> None:
    """Without storage: what the dead had copied lies with their keepers, on the other node.

    Two steps later all is as if nothing had been.
    """
    job = job_of(replace(CONFIG, snapshot_period_steps=2))
    states = job.trained(5)
    chosen = job.die(victims)
    assert chosen.restore == (MEMORY,) and not chosen.only_lost and job.step == 4
    assert_all_same(job.state(), states[4])
    assert not same(states[4][Block(BlockKind.HEAD)], states[5][Block(BlockKind.HEAD)])
    job.train(1)
    assert_all_same(job.state(), states[5])


def test_of_partial_checkpoints_lost_experts_come_from_memory_where_that_is_newer(
    tmp_path: Path,
) -> None:
    config = replace(
        CONFIG, experts_per_checkpoint=1, lost_tokens_limit=0.0, checkpoint_dir=str(tmp_path),
        checkpoint_period_steps=2, snapshot_period_steps=3,
    )  # fmt: skip
    job = job_of(config)
    states = job.trained(4)
    lost = experts_on(job, [3])
    before = job.leader.checkpoints.partial.account.routed
    assert job.die([3]).only_lost and job.step == 4
    # Of each the newest: step 4's checkpoint has one expert of each layer, step 3's snapshot all.
    storage = open_storage(f"{config.checkpoint_dir}/{config.job}")
    older = {e.piece.block for e in read_manifest(storage, complete_ids(storage)[0]).older}
    assert_steps(job.state(), states, dict.fromkeys(states[4], 4) | dict.fromkeys(lost & older, 3))
    assert lost & older and lost - older, "some from either"
    books = job.leader.checkpoints.partial.books
    assert sum(books.lost) > 0 and books.routed == [list(counts) for counts in before]


def test_storage_is_taken_where_it_is_newer_than_memory(tmp_path: Path) -> None:
    job = job_of(
        replace(
            CONFIG, checkpoint_dir=str(tmp_path), checkpoint_period_steps=4, snapshot_period_steps=3
        )
    )
    states = job.trained(5)
    chosen = job.die([3])
    assert chosen.restore[1:] == (MEMORY,) and job.step == 4
    assert_all_same(job.state(), states[4])
    assert job.leader.checkpoints.snapshots.kept == (), (
        "what is older than where the run is, is let go"
    )


def test_where_owner_and_keeper_died_nothing_is_left_of_it() -> None:
    job = job_of()
    job.train(2)
    with pytest.raises(LostStateError, match="snapshot"):
        job.die([1, 3])


def test_a_snapshot_that_broke_on_its_way_leaves_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On two ranks the newest is complete, on two it is not: the one before is, everywhere."""
    job = job_of()
    states = job.trained(2)
    with snapshots_cut({0, 2}):
        job.train(1)
    assert "snapshot of step=3 is given up: cut" in caplog.text
    assert newest(job) == [2, 3, 2, 3]
    job.train(1)
    assert set(newest(job)) == {2, 3}, "no more"
    job.die([3])
    assert job.step == 2
    assert_all_same(job.state(), states[2])
    job.train(2)
    assert set(newest(job)) == {4}


def test_training_goes_on_while_a_snapshot_is_on_its_way_and_skips_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of()
    gate, travel = threading.Event(), checked_payload.all_to_all_bytes

    def slow(*arguments: object) -> object:
        assert gate.wait(60.0)
        return travel(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshots, "all_to_all_bytes", slow)

    def go_on(one: Trainee, group: ThreadGroup) -> list[SaveResult]:
        results = [result for _ in range(3) for result in one.do_step(group)]
        group.all_gather(torch.zeros(1))
        gate.set()
        return results + one.checkpoints.close()

    seen = [(1, "complete", True), (2, "skipped", True), (3, "skipped", True)]
    for results in job.run(go_on).values():
        told = sorted((one.step, one.outcome.value, one.in_memory) for one in results)
        assert told == seen, "what a controller shows"
    assert newest(job) == [1] * 4 and job.step == 3
    assert "step=2 snapshot skipped" in caplog.text


def test_three_are_in_memory_at_most() -> None:
    job = job_of()
    job.train(4)
    for one in job.ranks.values():
        assert [kept.id.step for kept in one.checkpoints.snapshots.kept] == [4, 3]


def test_a_rank_alone_keeps_its_own_only() -> None:
    layout = even_layout(ranks=[0], num_layers=2, num_experts=4, replicas=1)
    job = Job(config=CONFIG, layout=layout)
    job.train(2)
    (newest, _) = job.leader.checkpoints.snapshots.kept
    assert {piece.block for piece in newest.pieces} == set(layout.blocks())
