"""Survivors that lost an expert go back to a window as real ranks do, also from within it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.checkpoint.restore import MEMORY
from support.trainees import Job, assert_all_same

CONFIG = JobConfig(
    job="deaths",
    steps=20,
    checkpoint_period_steps=1,
    checkpoint_window_steps=3,
    peer_timeout_s=60.0,
)


def layout_of(ranks: Sequence[int], replicas: int = 1) -> Layout:
    return even_layout(ranks=ranks, num_layers=2, num_experts=4, replicas=replicas)


LONELY = layout_of(range(3))  # each expert on one rank only


def job_in(directory: Path, snapshot_period_steps: int = 0, layout: Layout = LONELY) -> Job:
    config = replace(
        CONFIG, checkpoint_dir=str(directory), snapshot_period_steps=snapshot_period_steps
    )
    return Job(config=config, layout=layout)


def is_replaying(job: Job) -> set[bool]:
    return {one.checkpoints.is_replaying() for one in job.ranks.values()}


def test_who_lost_an_expert_replays_and_who_loses_one_more_meanwhile_begins_it_again(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path)
    job.train(5)
    assert is_replaying(job) == {False}
    chosen = job.die({2})
    assert chosen.restore and not chosen.only_lost
    assert job.step == 1 and is_replaying(job) == {True}
    job.train(1)
    assert job.step == 2 and is_replaying(job) == {True}
    assert job.die({1}).restore and job.step == 1, "nobody holds a whole state"
    job.train(2)
    assert job.step == 3 and is_replaying(job) == {False}
    assert_undisturbed(job)
    job.train(3)
    assert_undisturbed(job)


def test_where_every_block_has_a_holder_a_death_costs_no_step_unless_some_are_frozen(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path, layout=layout_of(range(5), replicas=2))
    job.train(4)
    assert not job.die({4}, replicas=2).restore and job.step == 4
    assert_undisturbed(job)
    holders = {replica.rank for replica in job.layout.experts[0][0]}
    assert job.die(holders, replicas=2).restore and is_replaying(job) == {True}
    first, last = sorted(job.ranks)
    assert all({r.rank for r in on} == {first, last} for on in job.layout.experts[0])
    assert job.die({last}).restore and is_replaying(job) == {True}, "what is held is not whole"


@pytest.mark.parametrize("snapshot_every", [1, 4])
def test_snapshots_are_taken_where_a_window_would_have_more_done_again(
    tmp_path: Path, snapshot_every: int
) -> None:
    """After 6 steps the newest whole window is of steps 4 to 6: going back to it begins at 4. So
    does the snapshot of step 4, and nothing of it has to be replayed.
    """
    job = job_in(tmp_path, snapshot_every)
    job.train(6)
    assert job.die({2}).restore[0] == MEMORY and is_replaying(job) == {False}
    assert job.step == (6 if snapshot_every == 1 else 4)
    job.train(9 - job.step)
    assert not job.die({1}).only_lost and is_replaying(job) == {False}, "windows go on, too"
    job.train(10 - job.step)
    assert_undisturbed(job)


def test_where_memory_has_too_little_the_window_is_replayed_and_snapshots_wait_for_its_end(
    tmp_path: Path,
) -> None:
    """Who died, and who kept a copy for it."""
    job = job_in(tmp_path, 1)
    job.train(6)
    assert job.die({1, 2}).restore[0] == MEMORY
    assert job.step == 4 and is_replaying(job) == {True}
    job.train(1)
    assert not job.leader.checkpoints.snapshots.kept, "some blocks are frozen"
    job.train(1)
    assert is_replaying(job) == {False}
    job.train(1)
    assert [kept.id.step for kept in job.leader.checkpoints.snapshots.kept] == [7, 6]
    assert_undisturbed(job)


def assert_undisturbed(job: Job) -> None:
    """All is as one rank alone would have it."""
    alone = Job(config=CONFIG, layout=layout_of([0]))
    alone.train(job.step)
    assert_all_same(job.state(), alone.state())
