"""A rank's ring never stops training, whatever happens to it."""

import errno
import hashlib
import mmap
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from pacekeeper.core.errors import HostError, VersionError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import Record, StepRecord
from pacekeeper.trainer.hooks.hooks import attach
from pacekeeper.trainer.hooks.ring_writer import MAX_ERRORS, Ring, claim_directory
from support.slots import encode_slot

ATTACHMENT = Attachment(job="job", rank=3, world_size=4, pid=os.getpid())


def step(number: int) -> StepRecord:
    return StepRecord(rank=3, step=number, generation=1, duration_s=0.5, tokens=10)


def read(path: Path, index: int) -> Record | None:
    data = path.read_bytes()
    offset = shm_ring.slot_offset(index)
    (sequence,) = shm_ring.SEQUENCE.unpack_from(data, offset)
    return shm_ring.decode_slot(
        index, sequence, data[offset : offset + shm_ring.SLOT_BYTES], sequence
    )


def test_records_lie_in_the_file_in_order(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path == tmp_path / "job" / "rank-00003.ring"
    for number in range(5):
        ours.write(step(number))
    assert [read(ours.path, i) for i in range(6)] == [*map(step, range(5)), None]
    assert shm_ring.decode_header(ours.path.read_bytes()) == ATTACHMENT


def test_the_oldest_records_are_overwritten(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    for number in range(shm_ring.SLOT_COUNT + 1):
        ours.write(step(number))
    assert ours.path is not None
    with pytest.raises(LookupError):
        read(ours.path, 0)
    assert read(ours.path, shm_ring.SLOT_COUNT) == step(shm_ring.SLOT_COUNT)


def test_no_permission_is_one_warning_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    ours = Ring.create(tmp_path / "file", ATTACHMENT)
    ours.write(step(0))
    assert not ours.is_armed
    assert ours.command() == shm_ring.CommandSlot()
    assert ours.read_plan(1, bytes(32)) is None
    ours.write_layout(1, b"{}")
    ours.close()
    assert len(caplog.records) == 1
    assert "rank=3" in caplog.text


def test_a_ring_that_keeps_failing_disarms_itself(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    impossible = StepRecord(rank=-1, step=0, generation=1, duration_s=0.0, tokens=0)
    for _ in range(MAX_ERRORS):
        assert ours.is_armed
        ours.write(impossible)
    assert not ours.is_armed
    assert "disarmed" in ours.reason


@pytest.mark.parametrize("tokens", [-1, 1 << 64, "many", None])
def test_a_wrong_value_is_the_callers_and_the_warning_says_what_to_pass(
    tokens: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pace = attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    for number in range(MAX_ERRORS):
        with pace.step(number), pace.micro_batch_timer(tokens=tokens):
            pass
    first, last = (record.getMessage() for record in caplog.records)
    assert "a reported value is negative, too large or of another type" in first
    assert Path(__file__).name in first and "pass counts as integers" in last


def test_errors_in_another_thread_than_the_one_that_attached_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    ours.count_error(IndexError("list index out of range"))
    for _ in range(2):
        other = threading.Thread(target=ours.count_error, args=(IndexError("x"),), name="loader")
        other.start()
        other.join()
    assert "reported by" not in caplog.records[0].getMessage()
    assert "reported by thread 'loader', attached by another" in caplog.records[-1].getMessage()


def test_a_ring_that_disarmed_itself_still_hears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    with monkeypatch.context() as patched:

        def write_bytes(path: Path, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(Path, "write_bytes", write_bytes)
        for generation in range(MAX_ERRORS):
            ours.write_layout(generation, b"layout")
    assert not ours.is_armed
    ours.write(step(0))
    assert ours.path is not None and read(ours.path, 0) is None
    for sequence, dead in enumerate((1, 2), start=1):
        said = shm_ring.CommandSlot(plan_generation=2, probe=sequence, dead_ranks=frozenset({dead}))
        put_command(ours, shm_ring.encode_command(sequence, said))
        assert ours.command() == said
    ours.path.with_name(shm_ring.plan_file_name(2)).write_bytes(b"plan")
    assert ours.read_plan(2, hashlib.sha256(b"plan").digest()) == b"plan"
    with ours.path.open("r+b") as file:
        file.seek(shm_ring.HEARTBEAT_OFFSET)
        file.write(shm_ring.HEARTBEAT.pack(100.0))
    assert ours.heartbeat_mono_s() == 100.0


def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    child = os.fork()
    if child == 0:
        ours.write(step(7))
        os._exit(3 if ours.is_armed else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ours.is_armed
    assert ours.path is not None
    assert read(ours.path, 0) is None


def test_commands_are_seen_once_whole(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    assert ours.command() == shm_ring.CommandSlot()
    command = shm_ring.CommandSlot(plan_generation=2, base_generation=1, dead_ranks=frozenset({1}))
    data = shm_ring.encode_command(1, command)
    torn = data[:20] + bytes(len(data) - 20)
    for written, seen in ((torn, shm_ring.CommandSlot()), (data, command)):
        with ours.path.open("r+b") as file:
            file.seek(shm_ring.COMMAND_OFFSET)
            file.write(written)
        assert ours.command() == seen


def test_a_plan_is_read_only_if_it_fits_its_digest(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    digest = hashlib.sha256(b"plan").digest()
    assert ours.read_plan(4, digest) is None
    target = ours.path.with_name(shm_ring.plan_file_name(4))
    target.write_bytes(b"pla")
    assert ours.read_plan(4, digest) is None
    target.write_bytes(b"plan")
    assert ours.read_plan(4, digest) == b"plan"


def test_a_slot_is_closed_before_and_opened_after_its_content_changes(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    slot = encode_slot(0, step(0))
    start = shm_ring.slot_offset(0)
    stores: list[tuple[int, bytes]] = []
    rests: list[bytes] = []  # of the slot, as each store to the sequence finds it

    class Watched(bytearray):
        def __setitem__(self, place: Any, data: Any) -> None:
            stores.append((place.start, bytes(data)))
            rests.append(bytes(self[start + 8 : start + len(slot)]))

    ours._slots = cast(mmap.mmap, Watched(shm_ring.FILE_BYTES))
    ours.write(step(0))
    assert stores == [(start, bytes(8)), (start, slot[:8])]
    assert rests == [bytes(len(slot) - 8), slot[8:]]


def put_command(ours: Ring, data: bytes) -> None:
    assert ours.path is not None
    with ours.path.open("r+b") as file:
        file.seek(shm_ring.COMMAND_OFFSET)
        file.write(data)


def test_a_new_ring_owns_all_its_pages(tmp_path: Path) -> None:
    # A store into a page that a full tmpfs can not give would end training by SIGBUS.
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    assert ours.path.stat().st_blocks * 512 >= shm_ring.FILE_BYTES


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small tmpfs")
def test_a_full_tmpfs_costs_the_ring_and_not_the_training(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting is not permitted here")
    code = (
        "import sys; from pacekeeper.trainer.hooks import hooks\n"
        "pace = hooks.attach(job='j', rank=0, world_size=1, ring_dir=sys.argv[1])\n"
        "for step in range(2000):\n"
        "    pace.begin_step(step); pace.end_step(tokens=1)\n"
        "print(pace.ring.is_armed, pace.ring.reason)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(small)], capture_output=True, text=True
        )
        left = list((small / "j").iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert done.returncode == 0
    assert done.stdout.startswith("False") and "No space left" in done.stdout
    assert left == [], "half a ring is not left behind for the agent to stumble over"


def test_a_ring_of_another_version_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "job" / shm_ring.ring_file_name(3)
    path.parent.mkdir()
    header = bytearray(shm_ring.encode_header(ATTACHMENT).ljust(shm_ring.FILE_BYTES, b"\0"))
    header[8] += 1
    path.write_bytes(header)
    with pytest.raises(VersionError):
        shm_ring.decode_header(path.read_bytes())
    ours = Ring.create(tmp_path, ATTACHMENT)
    ours.write(step(1))
    assert shm_ring.decode_header(path.read_bytes()) == ATTACHMENT
    assert read(path, 0) == step(1)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_command_caught_between_two_writes_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    first, second = (shm_ring.CommandSlot(dead_ranks=frozenset({r})) for r in (1, 2))
    put_command(ours, shm_ring.encode_command(1, first))
    assert ours.command() == first
    put_command(ours, shm_ring.encode_command(2, second))
    decode = shm_ring.decode_command
    with monkeypatch.context() as patched:  # the agent begins its next write under our hands
        patched.setattr(shm_ring, "decode_command", lambda area: decode(bytes(8) + area[8:]))
        assert ours.command() == first
    assert ours.command() == second


def test_an_agent_that_died_in_mid_write_and_counts_anew_is_heard(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    first, second = (shm_ring.CommandSlot(dead_ranks=frozenset({r})) for r in (1, 2))
    put_command(ours, shm_ring.encode_command(1, first))
    assert ours.command() == first
    put_command(ours, bytes(8))
    assert ours.command() == first
    put_command(ours, shm_ring.encode_command(1, second))
    assert ours.command() == second


def test_the_last_beat_of_an_agent_can_be_read(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.heartbeat_mono_s() == 0.0
    assert ours.path is not None
    with ours.path.open("r+b") as file:
        file.seek(shm_ring.HEARTBEAT_OFFSET)
        file.write(shm_ring.HEARTBEAT.pack(100.0))
    assert ours.heartbeat_mono_s() == 100.0


def test_a_missing_and_a_wrong_plan_are_counted_apart(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    assert ours.read_plan(4, bytes(32)) is None
    ours.path.with_name(shm_ring.plan_file_name(4)).write_bytes(b"plan")
    assert ours.read_plan(4, bytes(32)) is None
    assert (ours.num_plans_missing, ours.num_plans_wrong) == (1, 1)
    assert ours.num_errors == 0, "a plan that is not there yet is no error of ours"


def test_a_plan_that_never_fits_is_hashed_once_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    target = ours.path.with_name(shm_ring.plan_file_name(4))
    digest, reads = hashlib.sha256(b"plan").digest(), []
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        reads.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    for _ in range(3):
        assert ours.read_plan(4, digest) is None  # not there
    for data in (b"nalp", b"palm"):  # of the plan's length, and others again in their own turn
        fresh = target.with_name("fresh")
        fresh.write_bytes(data)
        fresh.rename(target)
        for _ in range(5):
            assert ours.read_plan(4, digest) is None
    assert (ours.num_plans_missing, ours.num_plans_wrong, len(reads)) == (3, 2, 2)
    (warning,) = caplog.records
    assert "plan=4" in warning.getMessage()
    assert ours.read_plan(5, digest) is None
    assert len(caplog.records) == 2, "another plan, another word"
    target.write_bytes(b"plan")
    assert ours.read_plan(4, digest) == b"plan"


def test_a_layout_appears_whole_or_not_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours.path is not None
    ours.write_layout(7, b"layout")
    target = ours.path.with_name(shm_ring.layout_file_name(7))
    assert target.read_bytes() == b"layout"
    blocked = ours.path.with_name(shm_ring.layout_file_name(8))
    blocked.mkdir()
    (blocked / "full").touch()
    ours.write_layout(8, b"layout")  # can not be renamed onto a directory
    assert sorted(p.name for p in ours.path.parent.iterdir()) == sorted(
        [ours.path.name, target.name, blocked.name]
    )
    assert ours.num_errors == 1
    assert len(caplog.records) == 1


def test_the_supervisor_has_a_ring_of_its_own(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT, file_name=shm_ring.SUPERVISOR_RING)
    ours.write(step(0))
    assert ours.path == tmp_path / "job" / shm_ring.SUPERVISOR_RING
    assert read(ours.path, 0) == step(0)


def test_a_closed_ring_takes_no_more_and_stays_readable(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    ours.write(step(0))
    ours.close()
    ours.close()
    ours.write(step(1))
    assert ours.path is not None
    assert read(ours.path, 0) == step(0)
    assert read(ours.path, 1) is None
    assert ours.heartbeat_mono_s() == 0.0


def test_what_is_meant_for_another_life_is_not_obeyed(tmp_path: Path) -> None:
    for own, meant, heard in ((8, 8, {3}), (8, 7, set()), (8, 0, {3}), (0, 7, {3})):
        ours = Ring.create(tmp_path, replace(ATTACHMENT, run_id=own))
        assert ours._memory is not None
        said = shm_ring.CommandSlot(dead_ranks=frozenset({3}), run_id=meant)
        start = shm_ring.COMMAND_OFFSET
        ours._memory[start : start + shm_ring.COMMAND_BYTES] = shm_ring.encode_command(1, said)
        assert ours.command().dead_ranks == heard, (own, meant)


def test_what_a_past_controller_says_is_not_obeyed(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    assert ours._memory is not None
    start, heard = shm_ring.COMMAND_OFFSET, list[int]()
    for number, (term, dead) in enumerate([(5, 1), (4, 2), (5, 3), (0, 4), (6, 5)], 1):
        said = shm_ring.CommandSlot(dead_ranks=frozenset({dead}), term=term)
        ours._memory[start : start + shm_ring.COMMAND_BYTES] = shm_ring.encode_command(number, said)
        heard += ours.command().dead_ranks
    assert heard == [1, 1, 3, 3, 5]


def test_a_launch_clears_what_earlier_ones_left_and_nothing_else(tmp_path: Path) -> None:
    old = Ring.create(tmp_path, ATTACHMENT)
    old.write_layout(3, b"layout")
    directory = tmp_path / ATTACHMENT.job
    for name in ("plan-000002.json", ".rank-00001.ring.77", "notes.txt"):
        (directory / name).touch()
    claim = claim_directory(tmp_path, ATTACHMENT.job)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
    with pytest.raises(HostError, match="another launch of job"):
        claim_directory(tmp_path, ATTACHMENT.job)
    os.close(claim)
    os.close(claim_directory(tmp_path, ATTACHMENT.job))


def test_no_directory_to_claim_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert claim_directory(tmp_path / "file", "job") == -1
