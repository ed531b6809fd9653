"""Rank and agent share a page without a lock: two real processes never see half of anything."""

import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import Record, StepRecord
from pacekeeper.trainer.hooks.ring_writer import Ring

ATTACHMENT = Attachment(job="race", rank=0, world_size=64, pid=os.getpid())
# Without memory fences only strongly ordered machines promise more than the checksum does.
IS_STRONGLY_ORDERED = platform.machine() in ("x86_64", "AMD64")
GIVE_UP_S = 150.0

RANK = """
import sys
from pathlib import Path
from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.trainer.hooks.ring_writer import Ring
ours = Ring.create(Path(sys.argv[1]), Attachment(job="race", rank=0, world_size=64, pid=1))
for i in range(10_000_000):
    ours.write(StepRecord(rank=0, step=i, generation=i % 97, duration_s=i * 0.5, tokens=i * i))
"""

AGENT = """
import sys, time
from pathlib import Path
from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.telemetry import shm_ring as ring
collector = RingCollector(directory=Path(sys.argv[1]))
collector.poll(1.0)
(reader,) = collector._jobs["race"].rings.values()
for i in range(1, 10_000_000):
    reader.write_command(
        ring.CommandSlot(
            plan_generation=i,
            base_generation=i - 1,
            plan_sha256=bytes([i % 251]) * 32,
            dead_ranks=frozenset({i % 64}),
        )
    )
    reader.write_heartbeat(time.monotonic())
"""


def expected(i: int) -> StepRecord:
    return StepRecord(rank=0, step=i, generation=i % 97, duration_s=i * 0.5, tokens=i * i)


@contextmanager
def process(code: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", code, str(directory)])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wait_for(path: Path, child: subprocess.Popen[bytes]) -> mmap.mmap:
    give_up_s = time.monotonic() + GIVE_UP_S
    while not path.exists():
        assert child.poll() is None and time.monotonic() < give_up_s
        time.sleep(0.01)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), shm_ring.FILE_BYTES)


def read(memory: mmap.mmap, index: int) -> tuple[Record | None, int]:
    """The record, and the sequence its slot held; raises as `decode_slot` does."""
    offset = shm_ring.slot_offset(index)
    (before,) = shm_ring.SEQUENCE.unpack_from(memory, offset)
    slot = memory[offset : offset + shm_ring.SLOT_BYTES]
    (after,) = shm_ring.SEQUENCE.unpack_from(memory, offset)
    return shm_ring.decode_slot(index, before, slot, after), before


def newest(memory: mmap.mmap) -> int:
    """The number of the newest record, roughly: the writer goes on meanwhile."""
    offsets = map(shm_ring.slot_offset, range(shm_ring.SLOT_COUNT))
    sequence: int = max(shm_ring.SEQUENCE.unpack_from(memory, offset)[0] for offset in offsets)
    return max(sequence - 1, 0)


def test_a_reader_that_races_a_writing_process_gets_right_records_or_none(tmp_path: Path) -> None:
    wanted, right, index = 20_000, 0, 0
    with process(RANK, tmp_path) as rank:
        memory = wait_for(tmp_path / "race" / shm_ring.ring_file_name(0), rank)
        give_up_s = time.monotonic() + GIVE_UP_S
        while right < wanted and time.monotonic() < give_up_s:
            try:
                record, _ = read(memory, index)
            except shm_ring.TornError:
                continue
            except shm_ring.CorruptError:
                assert not IS_STRONGLY_ORDERED
                continue
            except LookupError:
                index = newest(memory)  # lapped: go where the writer is, right on its heels
                continue
            if record is not None:
                assert record == expected(index)
                right += 1
                index += 1
    assert right == wanted


def test_a_rank_killed_in_mid_write_leaves_whole_records_and_at_most_one_open_slot(
    tmp_path: Path,
) -> None:
    with process(RANK, tmp_path) as rank:
        memory = wait_for(tmp_path / "race" / shm_ring.ring_file_name(0), rank)
        give_up_s = time.monotonic() + GIVE_UP_S
        while newest(memory) < 2 * shm_ring.SLOT_COUNT:
            assert rank.poll() is None and time.monotonic() < give_up_s
    last = newest(memory)
    open_slots = 0
    for index in range(last - shm_ring.SLOT_COUNT + 1, last + 1):
        record, sequence = read(memory, index)
        open_slots += sequence == 0
        assert record == (expected(index) if sequence else None)
    assert open_slots <= 1


def test_commands_are_never_half_never_older_and_never_forgotten(tmp_path: Path) -> None:
    ours = Ring.create(tmp_path, ATTACHMENT)
    seen, last = 0, 0
    with process(AGENT, tmp_path) as agent:
        give_up_s = time.monotonic() + GIVE_UP_S
        while seen < 3_000:
            assert agent.poll() is None and time.monotonic() < give_up_s
            command = ours.command()
            i = command.plan_generation
            assert i >= last, "what was said is not taken back while the next word is written"
            if i > last:
                assert command.base_generation == i - 1
                assert command.plan_sha256 == bytes([i % 251]) * 32
                assert command.dead_ranks == {i % 64}
                seen, last = seen + 1, i
        assert ours.heartbeat_mono_s() > 0.0
    assert ours.num_errors == 0
