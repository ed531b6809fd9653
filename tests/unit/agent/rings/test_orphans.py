"""Ranks whose launcher was killed: the agent tells of their end, and of none that is not one."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.agent.rings.ring_batch import find_deaths
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import EXIT_UNKNOWN, RankExitRecord, Record
from pacekeeper.core.telemetry.shm_ring import SUPERVISOR_RING
from pacekeeper.trainer.hooks.ring_writer import Ring

SUPERVISOR = -1


def attachment(rank: int, pid: int) -> Attachment:
    role = "supervisor" if rank == SUPERVISOR else "train"
    return Attachment(job="job", rank=max(rank, 0), world_size=4, pid=pid, role=role, run_id=7)


def write(directory: Path, rank: int, orders: Connection) -> None:
    """A process with one ring: writes the records it is sent, closes its ring when told None."""
    file_name = SUPERVISOR_RING if rank == SUPERVISOR else None
    ring = Ring.create(directory, attachment(rank, os.getpid()), file_name=file_name)
    orders.send(os.getpid())
    while True:
        match orders.recv():
            case None:
                ring.close()
            case record:
                ring.write(record)
        orders.send("done")


class Writer:
    """A process that has a ring, and dies when it is told to."""

    def __init__(self, directory: Path, rank: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=write, args=(directory, rank, theirs), daemon=True)
        self._process.start()
        self.pid = self._orders.recv()

    def do(self, order: Record | None) -> None:
        self._orders.send(order)
        assert self._orders.recv() == "done"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Launch:
    """A supervisor and two ranks, each a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.supervisor = Writer(directory, SUPERVISOR)
        self.ranks = [Writer(directory, rank) for rank in range(2)]

    def unseen(self, rank: int) -> tuple[int, int, int, int]:
        return rank, self.ranks[rank].pid, EXIT_UNKNOWN, 0


@pytest.fixture
def collector(tmp_path: Path) -> RingCollector:
    return RingCollector(directory=tmp_path)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    for writer in (launch.supervisor, *launch.ranks):
        writer.kill()


def exits(collector: RingCollector, now_s: float = 1.0) -> list[tuple[int, int, int, int]]:
    return [
        (r.rank, r.pid, r.exit_code, r.signal)
        for reading in collector.poll(now_s)
        for r in reading.records
        if isinstance(r, RankExitRecord)
    ]


def test_who_ended_with_the_launcher_is_told_once(collector: RingCollector, launch: Launch) -> None:
    assert exits(collector) == []
    launch.supervisor.kill()
    for rank in launch.ranks:
        rank.kill()
    assert exits(collector, 5.0) == [launch.unseen(0), launch.unseen(1)]
    assert exits(collector) == [], "once"
    (again,) = collector.resync()
    assert [r.detected_mono_s for r in again.records if isinstance(r, RankExitRecord)] == [5.0] * 2


def test_it_is_a_death_for_the_neighbours(collector: RingCollector, launch: Launch) -> None:
    collector.poll(0.0)
    launch.supervisor.kill()
    launch.ranks[1].kill()
    assert find_deaths(collector.poll(1.0)) == {("job", 7): frozenset({1})}


def test_the_end_of_the_launcher_alone_is_nobodys_death(
    collector: RingCollector, launch: Launch
) -> None:
    collector.poll(0.0)
    launch.supervisor.kill()
    assert exits(collector) == []


def test_while_the_launcher_lives_its_word_is_waited_for(
    collector: RingCollector, launch: Launch
) -> None:
    collector.poll(0.0)
    launch.ranks[0].kill()
    assert exits(collector) == [], "it may have finished"
    pid = launch.ranks[0].pid
    launch.supervisor.do(RankExitRecord(rank=0, pid=pid, exit_code=0, signal=0))
    assert exits(collector) == [(0, pid, 0, 0)]


def test_the_last_words_of_the_launcher_are_believed(
    collector: RingCollector, launch: Launch
) -> None:
    collector.poll(0.0)
    pid = launch.ranks[0].pid
    launch.ranks[0].kill()
    launch.supervisor.do(RankExitRecord(rank=0, pid=pid, exit_code=0, signal=0))
    launch.supervisor.kill()
    launch.ranks[1].kill()
    assert exits(collector) == [(0, pid, 0, 0), launch.unseen(1)]


def test_a_stopped_launcher_and_stopped_ranks_are_alive(
    collector: RingCollector, launch: Launch
) -> None:
    collector.poll(0.0)
    for writer in (launch.supervisor, *launch.ranks):
        os.kill(writer.pid, signal.SIGSTOP)
    assert exits(collector) == []


def test_of_writers_that_hold_no_lock_nothing_is_said(
    collector: RingCollector, tmp_path: Path
) -> None:
    """Of another version, or on a file system without locks: the pid is not asked either."""
    for rank in (SUPERVISOR, 0):
        name = SUPERVISOR_RING if rank == SUPERVISOR else None
        ring = Ring.create(tmp_path, attachment(rank, 2**22 + 1), file_name=name)
        ring.close()
    assert exits(collector) == []
    assert exits(collector) == []


def test_an_agent_that_comes_later_does_not_guess(launch: Launch, tmp_path: Path) -> None:
    launch.supervisor.kill()
    launch.ranks[0].kill()
    late = RingCollector(directory=tmp_path)
    assert exits(late) == []
    assert exits(late) == []


def test_without_a_launcher_the_end_of_a_process_says_nothing(
    collector: RingCollector, tmp_path: Path
) -> None:
    rank = Writer(tmp_path, 0)
    collector.poll(0.0)
    rank.kill()
    assert exits(collector) == []
