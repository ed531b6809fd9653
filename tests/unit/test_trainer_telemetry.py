"""A rank's ring never stops training, whatever happens to it."""

import hashlib
import os
import threading
from pathlib import Path

import pytest

from pacekeeper.core import ring
from pacekeeper.core.records import Record, StepRecord
from pacekeeper.core.topology import Attachment
from pacekeeper.trainer.telemetry import MAX_ERRORS, Ring

ATTACHMENT = Attachment(job="job", rank=3, world_size=4, pid=os.getpid())


def step(number: int) -> StepRecord:
    return StepRecord(rank=3, step=number, generation=1, duration_s=0.5, tokens=10)


def read(path: Path, index: int) -> Record | None:
    data = path.read_bytes()
    offset = ring.slot_offset(index)
    (sequence,) = ring.SEQUENCE.unpack_from(data, offset)
    return ring.decode_slot(index, sequence, data[offset : offset + ring.SLOT_BYTES], sequence)


def test_records_lie_in_the_file_in_order(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path == tmp_path / "job" / "rank-00003.ring"
    for number in range(5):
        ours.write(step(number))
    assert [read(ours.path, i) for i in range(6)] == [*map(step, range(5)), None]
    assert ring.decode_header(ours.path.read_bytes()) == ATTACHMENT


def test_the_oldest_records_are_overwritten(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    for number in range(ring.SLOT_COUNT + 1):
        ours.write(step(number))
    assert ours.path is not None
    with pytest.raises(LookupError):
        read(ours.path, 0)
    assert read(ours.path, ring.SLOT_COUNT) == step(ring.SLOT_COUNT)


def test_no_permission_is_one_warning_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    ours = Ring.create(tmp_path / "file", ATTACHMENT)
    ours.write(step(0))
    assert not ours.is_armed
    assert ours.command() == ring.CommandSlot()
    assert ours.read_plan(1, bytes(32)) is None
    ours.write_layout(1, b"{}")
    ours.close()
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text


def test_a_ring_that_keeps_failing_disarms_itself(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    impossible = StepRecord(rank=-1, step=0, generation=1, duration_s=0.0, tokens=0)
    for _ in range(MAX_ERRORS):
        assert ours.is_armed
        ours.write(impossible)
    assert not ours.is_armed
    assert "disarmed" in ours.reason


def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    child = os.fork()
    if child == 0:
        ours.write(step(7))
        os._exit(0)
    os.waitpid(child, 0)
    assert ours.path is not None
    assert read(ours.path, 0) is None


def test_commands_are_seen_once_whole(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    assert ours.command() == ring.CommandSlot()
    command = ring.CommandSlot(plan_generation=2, base_generation=1, dead_ranks=frozenset({1}))
    data = ring.encode_command(1, command)
    torn = data[:20] + bytes(len(data) - 20)
    for written, seen in ((torn, ring.CommandSlot()), (data, command)):
        with ours.path.open("r+b") as file:
            file.seek(ring.COMMAND_OFFSET)
            file.write(written)
        assert ours.command() == seen


def test_a_plan_is_read_only_if_it_fits_its_digest(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    digest = hashlib.sha256(b"plan").digest()
    assert ours.read_plan(4, digest) is None
    target = ours.path.with_name(ring.plan_file_name(4))
    target.write_bytes(b"pla")
    assert ours.read_plan(4, digest) is None
    target.write_bytes(b"plan")
    assert ours.read_plan(4, digest) == b"plan"


def test_a_racing_reader_never_gets_a_wrong_record(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    path, total = ours.path, 5 * ring.SLOT_COUNT
    writer = threading.Thread(target=lambda: [ours.write(step(i)) for i in range(total)])
    writer.start()
    index, right = 0, 0
    while index < total and (writer.is_alive() or right == 0):
        try:
            record = read(path, index)
        except (ring.TornError, ring.CorruptError):
            continue
        except LookupError:
            index += ring.SLOT_COUNT // 2
            continue
        if record is not None:
            assert record == step(index)
            right += 1
            index += 1
    writer.join()
    assert right > 0
