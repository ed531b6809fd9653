"""Reading rings: everything once, nothing believed that does not fit, nothing stops the agent."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.agent.rings.ring_batch import RingBatch, find_deaths
from pacekeeper.agent.uplink.batching import build_report
from pacekeeper.core.errors import HostError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import AgentHealth, PlanFile
from pacekeeper.core.telemetry.records import RankExitRecord, StepRecord
from pacekeeper.core.telemetry.samples import DeviceSample
from pacekeeper.trainer.hooks.ring_writer import Ring

PLAN = PlanFile(
    job="job",
    generation=2,
    base_generation=1,
    data=b"plan",
    sha256=hashlib.sha256(b"plan").digest(),
)


def attachment(rank: int = 0, pid: int = 100, job: str = "job") -> Attachment:
    return Attachment(job=job, rank=rank, world_size=4, pid=pid)


def step(number: int) -> StepRecord:
    return StepRecord(rank=0, step=number, generation=1, duration_s=0.1, tokens=1)


@pytest.fixture
def collector(tmp_path: Path) -> RingCollector:
    made = RingCollector(directory=tmp_path)
    made.prepare()
    return made


def test_new_rings_and_records_are_seen_once(collector: RingCollector, tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, attachment())
    writer.write(step(0))
    (first,) = collector.poll(1.0)
    assert first.attached == (attachment(),)
    assert first.records == (step(0),)
    writer.write(step(1))
    (second,) = collector.poll(2.0)
    assert (second.attached, second.records) == ((), (step(1),))
    assert collector.poll(3.0)[0].is_empty
    assert writer.heartbeat_mono_s() == 3.0


def test_a_lapped_reader_goes_on_and_counts_what_it_lost(
    collector: RingCollector, tmp_path: Path
) -> None:
    writer = Ring.create(tmp_path, attachment())
    collector.poll(0.0)
    extra = 10
    for number in range(shm_ring.SLOT_COUNT + extra):
        writer.write(step(number))
    (reading,) = collector.poll(1.0)
    numbers = [r.step for r in reading.records if isinstance(r, StepRecord)]
    assert numbers[-1] == shm_ring.SLOT_COUNT + extra - 1
    assert numbers == sorted(set(numbers))
    assert collector.counts.lost == extra
    assert len(numbers) + collector.counts.lost == shm_ring.SLOT_COUNT + extra


def test_a_corrupt_record_is_counted_and_skipped(collector: RingCollector, tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, attachment())
    for number in range(3):
        writer.write(step(number))
    assert writer.path is not None
    with writer.path.open("r+b") as file:
        file.seek(shm_ring.slot_offset(1) + 20)
        file.write(b"\xff\xff")
    assert collector.poll(0.0)[0].records == (step(0),)
    assert collector.counts.corrupt == 0, "it may only be seen late"
    assert collector.poll(1.0)[0].records == (step(2),)
    assert collector.counts.corrupt == 1


def test_bad_records_hide_none_behind_them_where_the_file_is_gone(
    collector: RingCollector, tmp_path: Path
) -> None:
    writer = Ring.create(tmp_path, attachment())
    collector.poll(0.0)
    for number in range(6):
        writer.write(step(number))
    assert writer.path is not None
    with writer.path.open("r+b") as file:
        for bad in (1, 2, 4):
            file.seek(shm_ring.slot_offset(bad) + 20)
            file.write(b"\xff\xff")
    writer.path.unlink()
    (reading,) = collector.poll(1.0)
    assert reading.records == (step(0), step(3), step(5))
    assert (collector.counts.corrupt, collector.num_rings) == (3, 0)


def test_what_is_no_ring_of_ours_is_reported_and_left_alone(
    collector: RingCollector, tmp_path: Path
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank-00001.ring").write_bytes(b"garbage")
    (tmp_path / "job" / "rank-00002.ring").write_bytes(bytes(shm_ring.FILE_BYTES))
    newer = bytearray(shm_ring.encode_header(attachment(3)).ljust(shm_ring.FILE_BYTES, b"\0"))
    newer[8] = shm_ring.VERSION + 1
    (tmp_path / "job" / "rank-00003.ring").write_bytes(newer)
    Ring.create(tmp_path, attachment(0)).write(step(0))
    (reading,) = collector.poll(0.0)
    assert reading.records == (step(0),)
    assert sorted(collector.unreadable) == [f"job/rank-0000{i}.ring" for i in (1, 2, 3)]
    assert f"version {shm_ring.VERSION + 1}" in collector.unreadable["job/rank-00003.ring"]
    assert "7 bytes" in collector.unreadable["job/rank-00001.ring"]


def test_a_plan_reaches_file_and_slot_and_survives_a_new_agent(
    collector: RingCollector, tmp_path: Path
) -> None:
    writer = Ring.create(tmp_path, attachment())
    collector.poll(0.0)
    assert not collector.offer_plan(replace(PLAN, job="other"))
    assert collector.offer_plan(PLAN)
    assert writer.command().plan_generation == 2
    assert writer.read_plan(2, PLAN.sha256) == b"plan"
    collector.notify_deaths("job", frozenset({3}))
    assert writer.command().dead_ranks == {3}
    assert writer.command().plan_generation == 2
    again = RingCollector(directory=tmp_path)
    again.poll(1.0)
    again.notify_deaths("job", frozenset({2}))
    assert writer.command().dead_ranks == {2, 3}
    assert writer.command().plan_generation == 2


def test_a_restarted_job_has_no_dead(collector: RingCollector, tmp_path: Path) -> None:
    Ring.create(tmp_path, attachment(pid=100))
    collector.poll(0.0)
    collector.notify_deaths("job", frozenset({1}))
    reborn = Ring.create(tmp_path, attachment(pid=200))
    (reading,) = collector.poll(1.0)
    assert reading.attached == (attachment(pid=200),)
    assert reborn.command().dead_ranks == frozenset()


def test_layout_files_are_told_once_and_again_on_request(
    collector: RingCollector, tmp_path: Path
) -> None:
    writer = Ring.create(tmp_path, attachment())
    writer.write_layout(3, b"{}")
    assert collector.poll(0.0)[0].layouts == ((3, b"{}"),)
    assert collector.poll(1.0)[0].layouts == ()
    (again,) = collector.resync()
    assert again.layouts == ((3, b"{}"),)
    assert again.attached == (attachment(),)


def test_a_directory_that_can_not_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="make it writable"):
        RingCollector(directory=tmp_path / "file" / "rings").prepare()


def test_a_vanished_job_is_forgotten(collector: RingCollector, tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, attachment())
    collector.poll(0.0)
    assert writer.path is not None
    os.unlink(writer.path)
    writer.path.parent.rmdir()
    assert collector.poll(1.0) == ()


def exit_record(rank: int, code: int = 0, signal: int = 0) -> RankExitRecord:
    return RankExitRecord(rank=rank, pid=1, exit_code=code, signal=signal)


def test_a_clean_exit_is_no_death() -> None:
    readings = (
        RingBatch(job="a", records=(exit_record(0), exit_record(1, signal=9))),
        RingBatch(job="b", records=(exit_record(2, code=1),)),
    )
    assert find_deaths(readings) == {("a", 0): {1}, ("b", 0): {2}}


def test_a_batch_holds_the_newest_sample_of_each_device_and_no_empty_job() -> None:
    old = DeviceSample(device_index=0, device_uuid="x", sampled_s=1.0)
    new = DeviceSample(device_index=0, device_uuid="x", sampled_s=2.0)
    readings = (RingBatch(job="a"), RingBatch(job="b", records=(step(0),)))
    report = build_report(readings, (new, old), AgentHealth(), sequence=4, now_s=5.0)
    assert report.devices == (new,)
    assert [job.job for job in report.jobs] == ["b"]
    assert report.sequence == 4


def test_what_the_last_ranks_said_before_their_files_went_is_read(
    collector: RingCollector, tmp_path: Path
) -> None:
    replaced, removed = Ring.create(tmp_path, attachment(0)), Ring.create(tmp_path, attachment(1))
    whole = Ring.create(tmp_path, attachment(2, job="gone"))
    collector.poll(0.0)
    for number, writer in enumerate((replaced, removed, whole)):
        writer.write(step(number))
    Ring.create(tmp_path, attachment(0, pid=200)).write(step(10))
    assert removed.path is not None
    removed.path.unlink()
    shutil.rmtree(tmp_path / "gone")
    readings = {reading.job: reading for reading in collector.poll(1.0)}
    steps = sorted(r.step for r in readings["job"].records if isinstance(r, StepRecord))
    assert steps == [0, 1, 10]
    assert readings["gone"].records == (step(2),)
    assert collector.num_rings == 1
    assert [reading.job for reading in collector.poll(2.0)] == ["job"]


def test_a_file_that_is_cut_is_let_go_before_it_can_hurt(
    collector: RingCollector, tmp_path: Path
) -> None:
    writer = Ring.create(tmp_path, attachment())
    writer.write(step(0))
    collector.poll(0.0)
    assert writer.path is not None
    os.truncate(writer.path, 4096)
    (reading,) = collector.poll(1.0)
    assert reading.is_empty
    assert collector.unreadable == {"job/rank-00000.ring": "4096 bytes, a ring has 139264"}
    Ring.create(tmp_path, attachment()).write(step(1))
    assert collector.poll(2.0)[0].records == (step(1),)
    assert collector.unreadable == {}


def test_complaints_end_with_their_files(collector: RingCollector, tmp_path: Path) -> None:
    for job in ("a", "b"):
        (tmp_path / job).mkdir()
        (tmp_path / job / "rank-00000.ring").write_bytes(b"no ring")
    collector.poll(0.0)
    assert sorted(collector.unreadable) == ["a/rank-00000.ring", "b/rank-00000.ring"]
    (tmp_path / "a" / "rank-00000.ring").unlink()
    shutil.rmtree(tmp_path / "b")
    collector.poll(1.0)
    assert collector.unreadable == {}


def test_a_ring_in_another_jobs_directory_is_no_ring_of_that_job(
    collector: RingCollector, tmp_path: Path
) -> None:
    stray = Ring.create(tmp_path, attachment(job="a"))
    assert stray.path is not None
    (tmp_path / "b").mkdir()
    shutil.copy(stray.path, tmp_path / "b")
    readings = {reading.job: reading for reading in collector.poll(0.0)}
    assert readings["b"].attached == ()
    assert "directory of 'b'" in collector.unreadable["b/rank-00000.ring"]


def test_what_an_earlier_life_of_a_job_left_is_not_told_again(
    collector: RingCollector, tmp_path: Path
) -> None:
    for rank in range(4):
        Ring.create(tmp_path, attachment(rank, pid=100 + rank)).write_layout(1, b"old 1")
    Ring.create(tmp_path, attachment(0, pid=100)).write_layout(5, b"old 5")
    collector.poll(0.0)
    new = Ring.create(tmp_path, attachment(0, pid=200))
    new.write_layout(1, b"new 1")
    assert collector.poll(1.0)[0].layouts == ((1, b"new 1"),)
    Ring.create(tmp_path, attachment(1, pid=201))  # the second rank is slower, ranks 2, 3 are gone
    collector.poll(2.0)
    (again,) = collector.resync()
    assert {a.pid for a in again.attached} == {200, 201}
    assert again.layouts == ((1, b"new 1"),)
    assert collector.pids() == {"job": {0: 200, 1: 201}}


def test_a_job_that_starts_again_forgets_its_dead_once(
    collector: RingCollector, tmp_path: Path
) -> None:
    for rank in range(2):
        Ring.create(tmp_path, attachment(rank, pid=100 + rank))
    collector.poll(0.0)
    collector.notify_deaths("job", frozenset({3}))
    first = Ring.create(tmp_path, attachment(0, pid=200))
    collector.poll(1.0)
    collector.notify_deaths("job", frozenset({2}))  # a death of the new life, ...
    second = Ring.create(tmp_path, attachment(1, pid=201))
    collector.poll(2.0)
    assert first.command().dead_ranks == {2}
    assert second.command().dead_ranks == {2}, "... which the last of its ranks must hear too"


def test_an_old_death_does_not_reach_the_next_life_of_a_job(
    collector: RingCollector, tmp_path: Path
) -> None:
    def supervisor(pid: int) -> Ring:
        boss = Attachment(job="job", rank=0, world_size=4, pid=pid, role="supervisor")
        return Ring.create(tmp_path, boss, file_name=shm_ring.SUPERVISOR_RING)

    old = supervisor(50)
    Ring.create(tmp_path, attachment(1, pid=101))
    collector.poll(0.0)
    old.write(RankExitRecord(rank=1, pid=101, exit_code=0, signal=9))
    reborn = Ring.create(tmp_path, attachment(1, pid=201))
    supervisor(51)
    readings = collector.poll(1.0)
    assert [r for reading in readings for r in reading.records], "it is told to the controller"
    assert find_deaths(readings, collector.pids()) == {}
    assert reborn.command().dead_ranks == frozenset()


def test_a_new_rank_of_the_next_life_does_not_hear_of_the_last_ones_dead(
    collector: RingCollector, tmp_path: Path
) -> None:
    boss = Attachment(job="job", rank=0, world_size=4, pid=50, role="supervisor")
    Ring.create(tmp_path, boss, file_name=shm_ring.SUPERVISOR_RING)
    Ring.create(tmp_path, attachment(0, pid=100))
    collector.poll(0.0)
    collector.notify_deaths("job", frozenset({1}))
    Ring.create(tmp_path, replace(boss, pid=51), file_name=shm_ring.SUPERVISOR_RING)
    stranger = Ring.create(tmp_path, attachment(1, pid=201))  # this time rank 1 is of this node
    collector.poll(1.0)
    assert stranger.command().dead_ranks == frozenset(), "its supervisor would kill it"


def test_an_offer_is_written_once_and_again_when_its_file_is_gone(
    collector: RingCollector, tmp_path: Path
) -> None:
    writer = Ring.create(tmp_path, attachment())
    collector.poll(0.0)
    assert collector.offer_plan(PLAN)
    plan = tmp_path / "job" / shm_ring.plan_file_name(2)
    inode = plan.stat().st_ino
    assert collector.offer_plan(PLAN)
    assert plan.stat().st_ino == inode
    plan.unlink()
    assert collector.offer_plan(PLAN)
    assert writer.read_plan(2, PLAN.sha256) == b"plan"
    assert [p.name for p in (tmp_path / "job").iterdir() if p.name.startswith(".")] == []


def test_a_plan_that_can_not_be_written_is_told_and_tried_again(
    collector: RingCollector, tmp_path: Path
) -> None:
    writer = Ring.create(tmp_path, attachment())
    collector.poll(0.0)
    obstacle = tmp_path / "job" / shm_ring.plan_file_name(2)
    obstacle.mkdir()
    assert not collector.offer_plan(PLAN)
    assert list(collector.unwritable) == [f"job/{obstacle.name}"]
    assert writer.command().plan_generation == 0, "no rank hears of a plan that is not there"
    obstacle.rmdir()
    assert collector.offer_plan(PLAN)
    assert collector.unwritable == {}
    assert writer.command().plan_generation == 2


def test_a_rank_that_comes_late_hears_what_was_said_before(
    collector: RingCollector, tmp_path: Path
) -> None:
    Ring.create(tmp_path, attachment(0))
    collector.poll(0.0)
    collector.offer_plan(PLAN)
    collector.notify_deaths("job", frozenset({3}))
    late = Ring.create(tmp_path, attachment(1))
    collector.poll(1.0)
    command = late.command()
    assert (command.plan_generation, command.base_generation) == (2, 1)
    assert (command.plan_sha256, command.dead_ranks) == (PLAN.sha256, frozenset({3}))


def test_a_probe_is_asked_for_by_its_highest_number_beside_whatever_else_was_said(
    collector: RingCollector, tmp_path: Path
) -> None:
    first = Ring.create(tmp_path, attachment(0))
    collector.poll(0.0)
    collector.request_probe("job", 9)
    collector.offer_plan(PLAN)
    collector.request_probe("job", 8)  # an older one that comes late
    collector.request_probe("job", 99, run_id=5)  # of another life
    collector.request_probe("other", 99)
    late = Ring.create(tmp_path, attachment(1))
    collector.poll(1.0)
    for rank in (first, late):
        command = rank.command()
        assert (command.probe, command.plan_generation) == (9, 2)


@pytest.mark.parametrize("name", ["layout--00001.json", "layout-x.json", "layout-99999999999.json"])
def test_files_that_only_look_like_layouts_are_none(
    collector: RingCollector, tmp_path: Path, name: str
) -> None:
    Ring.create(tmp_path, attachment())
    (tmp_path / "job" / name).write_bytes(b"{}")
    assert collector.poll(0.0)[0].layouts == ()


def test_a_directory_has_one_agent(collector: RingCollector, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="another agent reads it"):
        RingCollector(directory=tmp_path).prepare()
    collector.close()
    RingCollector(directory=tmp_path).prepare()


def test_ranks_of_any_user_may_write_below_a_directory_the_agent_made(tmp_path: Path) -> None:
    RingCollector(directory=tmp_path / "a" / "rings").prepare()
    assert (tmp_path / "a" / "rings").stat().st_mode & 0o7777 == 0o1777
