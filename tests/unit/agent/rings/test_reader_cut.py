"""A ring that is cut under its reader is an empty one that says so, and never the agent's end."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.agent.rings.reader import RecordCounts, RingReader, open_ring
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.agents import step

ATTACHED = Attachment(job="job", rank=0, world_size=1, pid=1)


@pytest.fixture
def writer(tmp_path: Path) -> Ring:
    return Ring.create(tmp_path, ATTACHED)


@pytest.fixture
def reader(writer: Ring) -> Iterator[RingReader]:
    assert writer.path is not None
    reader = open_ring(writer.path, "job", 1.0)
    yield reader
    reader.close()


@pytest.mark.parametrize(
    "left", [0, 100, shm_ring.COMMAND_OFFSET + 8, shm_ring.slot_offset(1) + 20]
)
def test_what_was_cut_off_is_nothing_and_is_said_once(
    left: int, writer: Ring, reader: RingReader, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        writer.write(step(number))
    os.truncate(reader.path, left)
    counts = RecordCounts()
    found = reader.read_remaining(counts) + reader.records(counts)
    assert found == ([step(0)] if left > shm_ring.slot_offset(1) else [])
    assert reader.path.name in caplog.text
    assert len(caplog.records) == 1


def test_a_cut_file_is_not_written_to(writer: Ring, reader: RingReader) -> None:
    os.truncate(reader.path, 100)
    reader.write_heartbeat(7.0)
    reader.write_command(shm_ring.CommandSlot(plan_generation=2))
    assert os.stat(reader.path).st_size == 100
    assert "100 bytes" in reader.problem


def test_a_ring_that_goes_on_at_its_beginning_is_read_on(writer: Ring, reader: RingReader) -> None:
    """Looks that lie on both sides of the ring's end."""
    counts, told = RecordCounts(), 0
    for number in range(2 * shm_ring.SLOT_COUNT + 9):
        writer.write(step(number))
        if number % shm_ring.SLOT_COUNT in (1020, 1021, 1022, 1023, 0, 1, 500):
            told += len(reader.records(counts))
            assert reader.records(counts) == []
    told += len(reader.records(counts))
    assert (told, counts.lost, counts.corrupt) == (2 * shm_ring.SLOT_COUNT + 9, 0, 0)


def test_what_the_rank_is_told_arrives(writer: Ring, reader: RingReader) -> None:
    command = shm_ring.CommandSlot(plan_generation=2, dead_ranks=frozenset({5}), run_id=0)
    reader.write_command(command)
    reader.write_heartbeat(3.5)
    assert writer.command() == command
    data = reader.path.read_bytes()
    assert shm_ring.HEARTBEAT.unpack_from(data, shm_ring.HEARTBEAT_OFFSET) == (3.5,)


def test_a_ring_cut_and_removed_costs_its_records_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut, whole = Ring.create(tmp_path, ATTACHED), Ring.create(tmp_path, _of_rank(1))
    collector = RingCollector(directory=tmp_path)
    collector.poll(0.0)
    for number, one in enumerate((cut, whole)):
        one.write(step(number, rank=number))
    assert cut.path is not None
    os.truncate(cut.path, 4096)
    cut.path.unlink()  # between two looks: nothing tells that it was cut before it was removed
    (reading,) = collector.poll(1.0)
    assert reading.records == (step(1, rank=1),)
    assert "truncated" in caplog.text


def test_no_descriptor_stays_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "job").mkdir()
    bad = tmp_path / "job" / "rank-00001.ring"
    bad.write_bytes(bytes(shm_ring.FILE_BYTES))
    with pytest.raises(ValueError, match="magic"):
        open_ring(bad, "job", 1.0)
    bad.write_bytes(bytes(7))
    with pytest.raises(ValueError, match="7 bytes"):
        open_ring(bad, "job", 1.0)
    assert len(os.listdir("/proc/self/fd")) == before


def _of_rank(rank: int) -> Attachment:
    return Attachment(job="job", rank=rank, world_size=2, pid=1 + rank)
