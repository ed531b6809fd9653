"""What the agent can not read is said and hides nothing else; no link of a stranger is followed."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pacekeeper.agent.rings import directory as ring_directory
from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.errors import HostError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import PlanFile
from pacekeeper.core.telemetry.records import RankExitRecord, Record
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.agents import step

TOO_MANY = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    (tmp_path / "rings").mkdir()
    return tmp_path / "rings"


@pytest.fixture
def collector(rings: Path) -> RingCollector:
    made = RingCollector(directory=rings)
    made.prepare()
    return made


def ring_of(rings: Path, job: str) -> Ring:
    return Ring.create(rings, Attachment(job=job, rank=0, world_size=4, pid=100))


def records(collector: RingCollector, now_s: float) -> dict[str, tuple[Record, ...]]:
    return {reading.job: reading.records for reading in collector.poll(now_s)}


def test_a_link_that_leads_to_itself_hides_no_job(collector: RingCollector, rings: Path) -> None:
    names = [f"job-{number}" for number in range(8)]  # on all sides of it in the directory's order
    for name in names:
        ring_of(rings, name).write(step(1))
    (rings / "loop").symlink_to("loop")
    assert sorted(records(collector, 0.0)) == names
    assert list(collector.unreadable) == ["loop"]
    (rings / "loop").unlink()
    collector.poll(1.0)
    assert collector.unreadable == {}


def test_a_job_that_is_a_link_is_left_alone_and_said(
    collector: RingCollector, rings: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    ring_of(foreign, "job").write(step(1))
    plan = foreign / "job" / shm_ring.plan_file_name(1)
    plan.touch()
    (rings / "job").symlink_to(foreign / "job")
    assert collector.poll(0.0) == ()
    assert list(collector.unreadable) == ["job"]
    assert plan.exists()


def test_a_job_that_becomes_a_link_is_written_and_cleared_no_more(
    collector: RingCollector, rings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_of(rings, "job").write(step(1))
    collector.poll(0.0)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    old = foreign / shm_ring.plan_file_name(0)
    old.touch()
    shutil.rmtree(rings / "job")
    (rings / "job").symlink_to(foreign)
    data = b"plan"
    plan = PlanFile(
        job="job", generation=2, base_generation=1, data=data,
        sha256=hashlib.sha256(data).digest(),
    )  # fmt: skip
    assert not collector.offer_plan(plan)
    collector._remove_plans("job", [old.name], before=5)  # as where it was listed before the change
    assert list(foreign.iterdir()) == [old]
    assert sorted(collector.unwritable) == ["job/plan-000002.json", "job/plans"]


def test_a_directory_that_can_not_be_listed_lets_nothing_go(
    collector: RingCollector,
    rings: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = ring_of(rings, "job")
    collector.poll(0.0)
    writer.write(step(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing)
        assert collector.poll(1.0) == collector.poll(2.0) == ()
    assert collector.unreadable == {".": TOO_MANY.strerror}
    assert (collector.num_rings, len(caplog.records)) == (1, 1)
    (reading,) = collector.poll(3.0)
    assert (reading.attached, reading.records) == ((), (step(1),)), "read on where it stood"
    assert collector.unreadable == {}


def test_a_ring_directory_that_is_removed_is_said(collector: RingCollector, rings: Path) -> None:
    shutil.rmtree(rings)
    assert collector.poll(0.0) == ()
    assert collector.unreadable == {".": os.strerror(errno.ENOENT)}


def failing(path: object) -> None:
    raise TOO_MANY


def failing_below(listing: Callable[..., object]) -> Callable[..., object]:
    """As with the last descriptor gone: the ring directory can be listed, a job's can not."""

    def scandir(path: object) -> object:
        if isinstance(path, int):
            raise TOO_MANY
        return listing(path)

    return scandir


def test_a_job_that_can_not_be_listed_keeps_its_rings(
    collector: RingCollector, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ring_of(rings, "job")
    collector.poll(0.0)
    writer.write(step(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing_below(os.scandir))
        assert collector.poll(1.0) == ()
        assert collector.unreadable == {"job": TOO_MANY.strerror}
        assert collector.num_rings == 1
    (reading,) = collector.poll(2.0)
    assert (reading.attached, reading.records) == ((), (step(1),)), "read on where it stood"
    assert collector.unreadable == {}


def test_a_job_that_ended_is_let_go_of_when_its_files_can_be_listed(
    collector: RingCollector, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_of(rings, "job").write(RankExitRecord(rank=0, pid=100, exit_code=0, signal=0))
    collector.poll(0.0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing_below(os.scandir))
        collector.release_job("job")
    assert collector.poll(1.0)[0].attached == (), "no ring of it is taken for a new one"
    collector.release_job("job")
    assert collector.poll(2.0)[0].attached == ()
    assert collector.num_rings == 0


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_layout_that_is_no_file_is_said_and_neither_followed_nor_waited_for(
    collector: RingCollector, rings: Path, tmp_path: Path, kind: str
) -> None:
    ring_of(rings, "job")
    collector.poll(0.0)
    layout = rings / "job" / shm_ring.layout_file_name(1)
    match kind:
        case "link":
            (tmp_path / "secret").write_text("of root")
            layout.symlink_to(tmp_path / "secret")
        case "pipe":
            os.mkfifo(layout)
        case _:
            layout.mkdir()
    num_open = len(os.listdir("/proc/self/fd"))
    for now_s in (1.0, 2.0):
        assert collector.poll(now_s)[0].layouts == ()
    assert list(collector.unreadable) == [f"job/{layout.name}"]
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.skipif(os.geteuid() != 0, reason="only root takes a directory over")
def test_a_ring_directory_that_a_rank_made_becomes_roots(tmp_path: Path) -> None:
    """Its owner could take away the verdict and the term that the agent keeps there."""
    directory = tmp_path / "rings"
    directory.mkdir(mode=0o755)
    os.chown(directory, 12345, 12345)
    os.close(ring_directory.claim(directory))
    status = directory.stat()
    assert (status.st_uid, status.st_mode & 0o7777) == (0, 0o1777)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_is_no_ring_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "rings"
    link.symlink_to(tmp_path / "elsewhere")
    os.close(ring_directory.claim(link))  # the administrator's own
    os.lchown(link, 12345, 12345)
    with pytest.raises(HostError, match="link of another user"):
        ring_directory.claim(link)
