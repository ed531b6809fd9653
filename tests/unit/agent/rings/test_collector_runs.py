"""Lives that have numbers: what one left behind is told as its own and obeys nobody."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.agent.rings.ring_batch import find_deaths
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import PlanFile
from pacekeeper.core.telemetry.records import RankExitRecord, StepRecord
from pacekeeper.trainer.hooks.ring_writer import Ring

DIGEST = hashlib.sha256(b"plan").digest()
PLAN = PlanFile(job="job", run_id=8, generation=2, base_generation=1, data=b"plan", sha256=DIGEST)


def attachment(rank: int = 0, *, run_id: int, pid: int = 100) -> Attachment:
    return Attachment(job="job", rank=rank, world_size=4, pid=pid, run_id=run_id)


def step(number: int) -> StepRecord:
    return StepRecord(rank=0, step=number, generation=1, duration_s=0.1, tokens=1)


@pytest.fixture
def collector(tmp_path: Path) -> RingCollector:
    made = RingCollector(directory=tmp_path)
    made.prepare()
    return made


def test_lives_are_told_apart_by_number_whatever_their_pids(
    collector: RingCollector, tmp_path: Path
) -> None:
    old = Ring.create(tmp_path, attachment(0, run_id=7))
    old.write_layout(1, b"old")
    collector.poll(0.0)
    collector.notify_deaths("job", frozenset({3}), 7)
    old.write(step(5))
    new = Ring.create(tmp_path, attachment(0, run_id=8))
    new.write(step(0))
    new.write_layout(1, b"new")
    before, after = collector.poll(1.0)
    assert (before.run_id, before.records, before.attached) == (7, (step(5),), ())
    assert (after.run_id, after.records) == (8, (step(0),))
    assert (after.attached, after.layouts) == ((attachment(0, run_id=8),), ((1, b"new"),))
    assert new.command() == shm_ring.CommandSlot(run_id=8), "the dead of a life before are no one's"
    (again,) = collector.resync()
    assert (again.run_id, again.attached, again.layouts) == (8, after.attached, after.layouts)


def test_commands_reach_the_life_they_are_meant_for_only(
    collector: RingCollector, tmp_path: Path
) -> None:
    left_behind = Ring.create(tmp_path, attachment(1, run_id=7))
    ours = Ring.create(tmp_path, attachment(0, run_id=8))
    collector.poll(0.0)
    assert not collector.offer_plan(replace(PLAN, run_id=7))
    collector.notify_deaths("job", frozenset({2}), 7)
    assert ours.command() == shm_ring.CommandSlot(run_id=8)
    assert left_behind.command() == shm_ring.CommandSlot()
    assert collector.offer_plan(PLAN)
    collector.notify_deaths("job", frozenset({3}), 8)
    assert ours.command().plan_generation == 2
    assert ours.command().dead_ranks == {3}
    assert left_behind.command() == shm_ring.CommandSlot()


def test_an_agent_that_starts_late_knows_the_newest_life(
    collector: RingCollector, tmp_path: Path
) -> None:
    Ring.create(tmp_path, attachment(0, run_id=8))
    Ring.create(tmp_path, attachment(1, run_id=7))  # of a launch with more ranks
    readings = collector.poll(0.0)
    assert [reading.run_id for reading in readings] == [7, 8]
    (again,) = collector.resync()
    assert [a.rank for a in again.attached] == [0]


def test_a_death_of_an_earlier_life_is_told_as_such(
    collector: RingCollector, tmp_path: Path
) -> None:
    boss = Attachment(job="job", rank=0, world_size=4, pid=50, role="supervisor", run_id=7)
    old = Ring.create(tmp_path, boss, file_name=shm_ring.SUPERVISOR_RING)
    collector.poll(0.0)
    old.write(RankExitRecord(rank=1, pid=101, exit_code=0, signal=9))
    Ring.create(tmp_path, replace(boss, run_id=8), file_name=shm_ring.SUPERVISOR_RING)
    assert find_deaths(collector.poll(1.0), collector.pids()) == {("job", 7): {1}}


def test_a_trainer_without_numbers_may_follow_a_launch(
    collector: RingCollector, tmp_path: Path
) -> None:
    Ring.create(tmp_path, attachment(0, run_id=8))
    collector.poll(0.0)
    Ring.create(tmp_path, attachment(0, run_id=0, pid=200))
    collector.poll(1.0)
    (again,) = collector.resync()
    assert (again.run_id, [a.pid for a in again.attached]) == (0, [200])


def test_the_life_that_is_spoken_to_stands_in_the_slot(
    collector: RingCollector, tmp_path: Path
) -> None:
    first = Ring.create(tmp_path, attachment(0, run_id=8))
    collector.poll(0.0)
    collector.notify_deaths("job", frozenset({3}), 8)
    assert first.command().run_id == 8
    late = Ring.create(tmp_path, attachment(1, run_id=8))
    again = RingCollector(directory=tmp_path)  # finds what the agent before it said
    again.poll(1.0)
    again.notify_deaths("job", frozenset({2}), 8)
    assert first.command() == shm_ring.CommandSlot(run_id=8, dead_ranks=frozenset({2, 3}))
    assert late.command() == shm_ring.CommandSlot(run_id=8, dead_ranks=frozenset({2}))


def test_what_a_ring_says_to_another_life_is_not_said_on(
    collector: RingCollector, tmp_path: Path
) -> None:
    ours = Ring.create(tmp_path, attachment(0, run_id=8))
    assert ours.path is not None
    stale = shm_ring.CommandSlot(dead_ranks=frozenset({1}), run_id=7)
    with ours.path.open("r+b") as file:
        file.seek(shm_ring.COMMAND_OFFSET)
        file.write(shm_ring.encode_command(1, stale))
    collector.poll(0.0)
    collector.notify_deaths("job", frozenset({3}), 8)
    assert ours.command().dead_ranks == {3}
