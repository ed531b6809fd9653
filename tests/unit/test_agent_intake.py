"""Reading rings: everything once, nothing believed that does not fit, nothing stops the agent."""

import os
from pathlib import Path

import pytest

from pacekeeper.agent.intake import Intake
from pacekeeper.agent.window import Reading, batch, deaths_in
from pacekeeper.core import ring
from pacekeeper.core.errors import HostError
from pacekeeper.core.records import RankExitRecord, StepRecord
from pacekeeper.core.reports import AgentHealth
from pacekeeper.core.topology import Attachment, DeviceSample
from pacekeeper.trainer.telemetry import Ring


def attachment(rank: int = 0, pid: int = 100, job: str = "job") -> Attachment:
    return Attachment(job=job, rank=rank, world_size=4, pid=pid)


def step(number: int) -> StepRecord:
    return StepRecord(rank=0, step=number, generation=1, duration_s=0.1, tokens=1)


@pytest.fixture
def intake(tmp_path: Path) -> Intake:
    made = Intake(directory=tmp_path)
    made.prepare()
    return made


def test_new_rings_and_records_are_seen_once(intake: Intake, tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, attachment())
    writer.write(step(0))
    (first,) = intake.look(1.0)
    assert first.attached == (attachment(),)
    assert first.records == (step(0),)
    writer.write(step(1))
    (second,) = intake.look(2.0)
    assert (second.attached, second.records) == ((), (step(1),))
    assert intake.look(3.0)[0].is_empty
    assert writer.heartbeat_mono_s() == 3.0


def test_a_lapped_reader_goes_on_and_counts_what_it_lost(intake: Intake, tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, attachment())
    intake.look(0.0)
    extra = 10
    for number in range(ring.SLOT_COUNT + extra):
        writer.write(step(number))
    (reading,) = intake.look(1.0)
    numbers = [r.step for r in reading.records if isinstance(r, StepRecord)]
    assert numbers[-1] == ring.SLOT_COUNT + extra - 1
    assert numbers == sorted(set(numbers))
    assert intake.counts.lost == extra
    assert len(numbers) + intake.counts.lost == ring.SLOT_COUNT + extra


def test_a_corrupt_record_is_counted_and_skipped(intake: Intake, tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, attachment())
    for number in range(3):
        writer.write(step(number))
    assert writer.path is not None
    with writer.path.open("r+b") as file:
        file.seek(ring.slot_offset(1) + 20)
        file.write(b"\xff\xff")
    (reading,) = intake.look(0.0)
    assert reading.records == (step(0), step(2))
    assert intake.counts.corrupt == 1


def test_what_is_no_ring_of_ours_is_reported_and_left_alone(intake: Intake, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank-00001.ring").write_bytes(b"garbage")
    (tmp_path / "job" / "rank-00002.ring").write_bytes(bytes(ring.FILE_BYTES))
    newer = bytearray(ring.encode_header(attachment(3)).ljust(ring.FILE_BYTES, b"\0"))
    newer[8] = 9
    (tmp_path / "job" / "rank-00003.ring").write_bytes(newer)
    Ring.create(tmp_path, attachment(0)).write(step(0))
    (reading,) = intake.look(0.0)
    assert reading.records == (step(0),)
    assert sorted(intake.unreadable) == [f"job/rank-0000{i}.ring" for i in (1, 2, 3)]
    assert "version 9" in intake.unreadable["job/rank-00003.ring"]
    assert "7 bytes" in intake.unreadable["job/rank-00001.ring"]


def test_a_plan_reaches_file_and_slot_and_survives_a_new_agent(
    intake: Intake, tmp_path: Path
) -> None:
    import hashlib

    writer = Ring.create(tmp_path, attachment())
    intake.look(0.0)
    digest = hashlib.sha256(b"plan").digest()
    assert not intake.offer_plan("other", 2, 1, b"plan", digest)
    assert intake.offer_plan("job", 2, 1, b"plan", digest)
    assert writer.command().plan_generation == 2
    assert writer.read_plan(2, digest) == b"plan"
    intake.notify_deaths("job", frozenset({3}))
    assert writer.command().dead_ranks == {3}
    assert writer.command().plan_generation == 2
    again = Intake(directory=tmp_path)
    again.look(1.0)
    again.notify_deaths("job", frozenset({2}))
    assert writer.command().dead_ranks == {2, 3}
    assert writer.command().plan_generation == 2


def test_a_restarted_job_has_no_dead(intake: Intake, tmp_path: Path) -> None:
    Ring.create(tmp_path, attachment(pid=100))
    intake.look(0.0)
    intake.notify_deaths("job", frozenset({1}))
    reborn = Ring.create(tmp_path, attachment(pid=200))
    (reading,) = intake.look(1.0)
    assert reading.attached == (attachment(pid=200),)
    assert reborn.command().dead_ranks == frozenset()


def test_layout_files_are_told_once_and_again_on_request(intake: Intake, tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, attachment())
    writer.write_layout(3, b"{}")
    assert intake.look(0.0)[0].layouts == ((3, b"{}"),)
    assert intake.look(1.0)[0].layouts == ()
    (again,) = intake.everything_again()
    assert again.layouts == ((3, b"{}"),)
    assert again.attached == (attachment(),)


def test_a_directory_that_can_not_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="make it writable"):
        Intake(directory=tmp_path / "file" / "rings").prepare()


def test_a_vanished_job_is_forgotten(intake: Intake, tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, attachment())
    intake.look(0.0)
    assert writer.path is not None
    os.unlink(writer.path)
    writer.path.parent.rmdir()
    assert intake.look(1.0) == ()


def exit_record(rank: int, code: int = 0, signal: int = 0) -> RankExitRecord:
    return RankExitRecord(rank=rank, pid=1, exit_code=code, signal=signal)


def test_a_clean_exit_is_no_death() -> None:
    readings = (
        Reading(job="a", records=(exit_record(0), exit_record(1, signal=9))),
        Reading(job="b", records=(exit_record(2, code=1),)),
    )
    assert deaths_in(readings) == {"a": {1}, "b": {2}}


def test_a_batch_holds_the_newest_sample_of_each_device_and_no_empty_job() -> None:
    old = DeviceSample(device_index=0, device_uuid="x", sampled_s=1.0)
    new = DeviceSample(device_index=0, device_uuid="x", sampled_s=2.0)
    readings = (Reading(job="a"), Reading(job="b", records=(step(0),)))
    report = batch(readings, (new, old), AgentHealth(), sequence=4, now_s=5.0)
    assert report.devices == (new,)
    assert [job.job for job in report.jobs] == ["b"]
    assert report.sequence == 4
