"""What the agent lets go of: rings of jobs that ended, plans of the past; what it never touches."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.agent.rings.collector import RELEASE_DELAY_S, RingCollector
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import PlanFile
from pacekeeper.core.telemetry.records import PlanAppliedRecord, RankExitRecord, Record, StepRecord
from pacekeeper.trainer.hooks.ring_writer import Ring

LATER_S = RELEASE_DELAY_S + 1.0


def attachment(rank: int, run_id: int = 7) -> Attachment:
    return Attachment(job="job", rank=rank, world_size=3, pid=100 + rank, run_id=run_id)


def exited(rank: int, signal: int = 0) -> RankExitRecord:
    return RankExitRecord(rank=rank, pid=100 + rank, exit_code=0, signal=signal)


def step(number: int, rank: int = 0, generation: int = 1) -> StepRecord:
    return StepRecord(rank=rank, step=number, generation=generation, duration_s=0.1, tokens=1)


def runs(generation: int, rank: int = 0) -> PlanAppliedRecord:
    return PlanAppliedRecord(
        rank=rank,
        step=0,
        generation=generation,
        previous_generation=generation - 1,
        duration_s=0.0,
        moved_bytes=0,
        is_regroup=False,
        layout_crc=0,
    )


def plan(generation: int) -> PlanFile:
    data = b"plan %d" % generation
    return PlanFile(
        job="job",
        generation=generation,
        base_generation=generation - 1,
        data=data,
        sha256=hashlib.sha256(data).digest(),
        run_id=7,
    )


class Launch:
    """A supervisor's and two ranks' rings, as a launch on this node makes them."""

    def __init__(self, directory: Path, run_id: int = 7) -> None:
        self.run_id = run_id
        self.directory = directory
        supervisor = replace(attachment(0, run_id), pid=99, role="supervisor")
        self.supervisor = Ring.create(directory, supervisor, file_name=shm_ring.SUPERVISOR_RING)
        self.ranks = [Ring.create(directory, attachment(rank, run_id)) for rank in range(2)]

    def end(self, *records: Record) -> None:
        for record in records or (exited(0), exited(1)):
            self.supervisor.write(record)

    @property
    def files(self) -> set[str]:
        return {path.name for path in (self.directory / "job").iterdir()}


@pytest.fixture
def collector(tmp_path: Path) -> RingCollector:
    return RingCollector(directory=tmp_path)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


RINGS = {"rank-00000.ring", "rank-00001.ring", "supervisor.ring"}


class TestRings:
    def test_of_a_job_that_ended_are_let_go_and_their_files_stay(
        self, collector: RingCollector, launch: Launch
    ) -> None:
        before = open_files()
        collector.poll(0.0)
        assert (collector.num_rings, open_files()) == (3, before + 3)
        launch.end()
        collector.poll(1.0)
        assert collector.ended_jobs(2.0) == (), "late words are waited for"
        assert collector.ended_jobs(1.0 + LATER_S) == ("job",)
        collector.release_job("job")
        assert (collector.num_rings, open_files()) == (0, before)
        assert launch.files == RINGS

    def test_are_not_opened_again_nor_told_again(
        self, collector: RingCollector, launch: Launch
    ) -> None:
        launch.ranks[0].write(step(0))
        launch.end()
        (reading,) = collector.poll(0.0)
        assert len(reading.records) == 3
        collector.release_job("job")
        for now_s in (1.0, 2.0, 3.0, 4.0):
            assert all(reading.is_empty for reading in collector.poll(now_s))
        assert collector.num_rings == 0
        assert collector.poll(5.0) == (), "nobody even looks into the directory"
        assert collector.resync() == ()

    def test_of_a_job_with_a_rank_that_runs_are_kept(
        self, collector: RingCollector, launch: Launch
    ) -> None:
        launch.end(exited(0))
        collector.poll(0.0)
        assert collector.ended_jobs(LATER_S) == ()

    def test_of_a_trainer_without_supervisor_are_kept(
        self, collector: RingCollector, tmp_path: Path
    ) -> None:
        Ring.create(tmp_path, attachment(0, run_id=0)).write(step(0))
        collector.poll(0.0)
        assert collector.ended_jobs(1e6) == (), "silence is no end"

    def test_another_process_of_the_same_rank_has_not_ended(
        self, collector: RingCollector, launch: Launch
    ) -> None:
        launch.end(exited(0), replace(exited(1), pid=4711))
        collector.poll(0.0)
        assert collector.ended_jobs(LATER_S) == ()

    def test_news_put_the_end_off(self, collector: RingCollector, launch: Launch) -> None:
        launch.end()
        collector.poll(0.0)
        launch.ranks[1].write(step(5, rank=1))
        collector.poll(LATER_S)
        assert collector.ended_jobs(LATER_S) == ()
        assert collector.ended_jobs(2 * LATER_S) == ("job",)

    def test_a_rank_that_comes_late_is_read_and_its_end_too(
        self, collector: RingCollector, launch: Launch, tmp_path: Path
    ) -> None:
        launch.end()
        collector.poll(0.0)
        collector.release_job("job")
        for now_s in (1.0, 2.0, 3.0):
            collector.poll(now_s)
        late = Ring.create(tmp_path, attachment(2))
        late.write(step(0, rank=2))
        seen = [
            record for now_s in (4.0, 5.0) for r in collector.poll(now_s) for record in r.records
        ]
        assert step(0, rank=2) in seen
        assert collector.ended_jobs(1e6) == ()
        launch.end(exited(2, signal=9))
        (reading,) = collector.poll(6.0)
        assert reading.records == (exited(2, signal=9),)
        assert collector.ended_jobs(6.0 + LATER_S) == ("job",)

    def test_the_next_launch_is_read_like_any_other(
        self, collector: RingCollector, launch: Launch, tmp_path: Path
    ) -> None:
        launch.end()
        collector.poll(0.0)
        collector.release_job("job")
        for now_s in (1.0, 2.0, 3.0):
            collector.poll(now_s)
        for name in RINGS:
            (tmp_path / "job" / name).unlink()
        again = Launch(tmp_path, run_id=8)
        again.ranks[0].write(step(0))
        (reading,) = [r for r in collector.poll(4.0) if not r.is_empty]
        assert (reading.run_id, reading.records) == (8, (step(0),))
        assert [a.rank for a in reading.attached] == [0, 1]
        assert collector.ended_jobs(1e6) == (), "the ends of the launch before are not of this one"

    def test_a_file_that_is_only_touched_is_the_same_ring(
        self, collector: RingCollector, launch: Launch, tmp_path: Path
    ) -> None:
        launch.end()
        collector.poll(0.0)
        collector.release_job("job")
        os.utime(tmp_path / "job" / "rank-00000.ring")
        (tmp_path / "job" / "stranger").touch()  # so that the directory is looked into
        assert all(reading.is_empty for reading in collector.poll(1.0))
        assert collector.num_rings == 0

    def test_a_directory_removed_by_its_owner_is_forgotten(
        self, collector: RingCollector, launch: Launch, tmp_path: Path
    ) -> None:
        launch.end()
        collector.poll(0.0)
        collector.release_job("job")
        for name in RINGS:
            (tmp_path / "job" / name).unlink()
        (tmp_path / "job").rmdir()
        assert collector.poll(1.0) == ()
        assert collector.pids() == {}

    def test_until_it_is_let_go_a_controller_hears_of_the_end_again(
        self, collector: RingCollector, launch: Launch
    ) -> None:
        launch.ranks[0].write(step(0))
        launch.end(exited(0, signal=9))
        collector.poll(0.0)
        (again,) = collector.resync()
        assert again.records == (exited(0, signal=9),), "facts, not measurements"


class TestPlans:
    def test_of_generations_before_the_one_in_force_are_removed(
        self, collector: RingCollector, launch: Launch
    ) -> None:
        collector.poll(0.0)
        for generation in (2, 3, 4):
            assert collector.offer_plan(plan(generation))
        collector.poll(1.0)
        assert {shm_ring.plan_file_name(g) for g in (2, 3, 4)} <= launch.files
        launch.ranks[0].write(runs(3))
        collector.poll(2.0)
        assert launch.files - RINGS == {shm_ring.plan_file_name(g) for g in (3, 4)}
        assert launch.ranks[1].read_plan(3, plan(3).sha256) == plan(3).data, "a late rank may ask"

    def test_work_says_which_generation_is_in_force_too(
        self, collector: RingCollector, launch: Launch
    ) -> None:
        collector.poll(0.0)
        assert collector.offer_plan(plan(2))
        launch.ranks[1].write(step(9, rank=1, generation=5))
        collector.poll(1.0)
        assert launch.files == RINGS

    def test_of_a_job_that_ended_are_removed_layouts_are_not(
        self, collector: RingCollector, launch: Launch
    ) -> None:
        collector.poll(0.0)
        assert collector.offer_plan(plan(2))
        launch.ranks[0].write_layout(1, b"{}")
        launch.end()
        collector.poll(1.0)
        collector.release_job("job")
        assert launch.files - RINGS == {shm_ring.layout_file_name(1, 7)}
        assert not collector.offer_plan(plan(3)), "there is nobody to take it"

    def test_a_plan_that_can_not_be_removed_is_said_and_tried_again(
        self, collector: RingCollector, launch: Launch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        collector.poll(0.0)
        assert collector.offer_plan(plan(2))
        launch.ranks[0].write(runs(3))

        def refuse(name: str, *, dir_fd: int) -> None:
            raise PermissionError(1, "Operation not permitted")

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            collector.poll(1.0)
        assert collector.unwritable == {"job/plans": "Operation not permitted"}
        collector.poll(2.0)
        assert (launch.files, collector.unwritable) == (RINGS, {})
