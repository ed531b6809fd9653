"""Reads one ring file: each record once, in order; lost and corrupt records are counted.

A slot that is being written is read again in the next poll. A slot with a wrong checksum in two
polls is counted as corrupt and skipped; overwritten slots are counted as lost. Reading neither
blocks nor raises. The file is not memory-mapped: its writer may truncate it, and the agent would
get SIGBUS.
"""

import fcntl
import logging
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pacekeeper.agent.host.process_state import lock_holder, read_process
from pacekeeper.agent.rings.standstill import PhaseWatch
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import Record
from pacekeeper.core.telemetry.sign_of_life import SIGN, RankPhase, SignOfLife, decode_sign
from pacekeeper.protos.convert import reports

LOOKAHEAD_SLOTS = 4  # whole records after a missing one that prove it abandoned
MAX_RECORDS_PER_POLL = 4096  # per ring, so that one busy rank does not starve the others
_SCANNED_SLOTS = LOOKAHEAD_SLOTS + 2  # slots, including the last one that was read
_SEQUENCES = struct.Struct(
    "<" + f"Q{shm_ring.SLOT_BYTES - shm_ring.SEQUENCE.size}x" * _SCANNED_SLOTS
)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RecordCounts:
    """Number of records since the agent's start."""

    read: int = 0
    lost: int = 0
    corrupt: int = 0


@dataclass(slots=True, kw_only=True)
class RingReader:
    """One open ring.

    Attributes:
        command: Content of its command slot.
        was_locked: The writer held the file's lock at opening, so a free lock proves its exit.
        problem: Why the file cannot be read to its end, or written; logged once.
        watch: The phases of the rank.
    """

    path: Path
    inode: int
    descriptor: int
    attachment: Attachment
    index: int = 0
    command: shm_ring.CommandSlot = field(default_factory=shm_ring.CommandSlot)
    command_sequence: int = 0
    was_locked: bool = False
    problem: str = ""
    watch: PhaseWatch = field(init=False)
    _stuck_at: int = -1
    _corrupt_at: int = -1

    def __post_init__(self) -> None:
        self.watch = PhaseWatch(self.attachment.rank)

    @property
    def is_rank(self) -> bool:
        return self.path.name != shm_ring.SUPERVISOR_RING

    def records(self, counts: RecordCounts) -> list[Record]:
        """New records, at most MAX_RECORDS_PER_POLL; `counts` is updated."""
        found: list[Record] = []
        if self._is_unchanged():
            self._stuck_at = -1
            return found
        while len(found) < MAX_RECORDS_PER_POLL:
            try:
                record = self._decode(self.index)
            except shm_ring.TornError:
                break
            except shm_ring.CorruptError:
                if self._sequence_at(self.index) == self.index + 1:
                    if not self._is_corrupt_again():
                        break  # on a weakly ordered processor its bytes may appear later
                    counts.corrupt += 1
                    self.index += 1
                    continue
                record = None  # the damaged slot may not be the next record
            except LookupError:
                # The slot holds a record of a later lap: the oldest one left is in the next slot.
                oldest = max(self.index + 1, self._sequence_at(self.index) - shm_ring.SLOT_COUNT)
                counts.lost += oldest - self.index
                self.index = oldest
                continue
            if record is not None:
                counts.read += 1
                found.append(record)
            elif self._sequence_at(self.index - 1) == self.index + shm_ring.SLOT_COUNT:
                counts.lost += 1  # the writer has lapped the reader and is overwriting the slot
            elif self._is_abandoned():
                counts.corrupt += 1
            else:
                break
            self.index += 1
        return found

    def sign(self) -> SignOfLife:
        """The rank's phase as it is published now."""
        return decode_sign(self._read(shm_ring.SIGN_OFFSET, SIGN.size))

    def standstill(
        self, records: Iterable[Record], now_s: float, *, suspect_s: float
    ) -> RankPhase | None:
        """Return the report of the rank's phase that is due at this poll; None: none is.

        Args:
            records: Its new records.
            now_s: Monotonic clock.
            suspect_s: When a rank of the node was last reported to stand still without waiting.
        """
        seen = self.watch.observe(self.sign(), records, now_s, suspect_s=suspect_s)
        if seen is None or not seen.is_standing or not (pid := self.process()):
            return seen
        process = read_process(pid)
        return seen if process is None else self.watch.with_process(seen, process, now_s)

    def process(self) -> int:
        """The process that writes the ring, in the agent's namespace; 0: not visible."""
        try:
            return lock_holder(os.fstat(self.descriptor))
        except OSError:
            return 0

    def read_remaining(self, counts: RecordCounts) -> list[Record]:
        """All remaining records of a ring that is not polled again; bad ones are read twice."""
        found: list[Record] = []
        until, num_idle = self.index + shm_ring.SLOT_COUNT, 0
        while num_idle < 2 and self.index < until:
            before = self.index
            found += self.records(counts)
            num_idle = num_idle + 1 if self.index == before else 0
        return found

    def _is_unchanged(self) -> bool:
        """Whether nothing was written since the last poll: the cheap path of most polls."""
        first = (self.index - 1) % shm_ring.SLOT_COUNT
        if first + _SCANNED_SLOTS <= shm_ring.SLOT_COUNT:
            area = self._read(shm_ring.slot_offset(first), _SEQUENCES.size)
            before, *later = _SEQUENCES.unpack(area)
        else:  # they wrap around to the first slot
            before, *later = (self._sequence_at(self.index - 1 + i) for i in range(_SCANNED_SLOTS))
        if before == self.index + shm_ring.SLOT_COUNT:
            return False  # the writer has lapped the reader
        return all(sequence <= index for index, sequence in enumerate(later, start=self.index))

    def _is_corrupt_again(self) -> bool:
        """Whether the previous poll found the same record corrupt."""
        was_seen = self._corrupt_at == self.index
        self._corrupt_at = self.index
        return was_seen

    def _is_abandoned(self) -> bool:
        """Whether the next record is permanently incomplete.

        True if two polls in a row found a complete later record: a writer writes in order.
        """
        is_passed = any(
            self._is_complete(self.index + ahead) for ahead in range(1, LOOKAHEAD_SLOTS + 1)
        )
        was_seen = self._stuck_at == self.index
        self._stuck_at = self.index if is_passed else -1
        return is_passed and was_seen

    def _is_complete(self, index: int) -> bool:
        try:
            return self._decode(index) is not None
        except LookupError:
            return True  # a record of a later lap
        except ValueError:
            return False

    def _decode(self, index: int) -> Record | None:
        slot = self._read(shm_ring.slot_offset(index), shm_ring.SLOT_BYTES)
        before: int = shm_ring.SEQUENCE.unpack_from(slot)[0]
        return shm_ring.decode_slot(index, before, slot, self._sequence_at(index))

    def _sequence_at(self, index: int) -> int:
        data = self._read(shm_ring.slot_offset(index), shm_ring.SEQUENCE.size)
        sequence: int = shm_ring.SEQUENCE.unpack(data)[0]
        return sequence

    def _read(self, offset: int, size: int) -> bytes:
        """Read bytes of the file; zeros beyond the end of a truncated one."""
        try:
            data = os.pread(self.descriptor, size, offset)
        except OSError as error:
            data = b""
            self._report_problem(f"cannot be read: {error.strerror}")
        if len(data) < size:
            self._report_problem(
                f"was truncated: {offset + len(data)} bytes, a ring has {shm_ring.FILE_BYTES}"
            )
            return data.ljust(size, b"\0")
        return data

    def _write(self, data: bytes, offset: int) -> None:
        """Write bytes, unless the file was truncated: the write would extend it."""
        try:
            if (size := os.fstat(self.descriptor).st_size) != shm_ring.FILE_BYTES:
                self._report_problem(
                    f"was truncated: {size} bytes, a ring has {shm_ring.FILE_BYTES}"
                )
                return
            os.pwrite(self.descriptor, data, offset)
        except OSError as error:
            self._report_problem(f"cannot be written: {error.strerror}")

    def _report_problem(self, problem: str) -> None:
        if not self.problem:
            _log.warning("file=%s %s", self.path, problem)
            self.problem = problem

    def write_command(self, command: shm_ring.CommandSlot) -> None:
        """Write the command slot, the sequence last: a rank sees the old or the new command."""
        if command == self.command:
            return
        self.command = command
        self.command_sequence += 1
        data = shm_ring.encode_command(self.command_sequence, command)
        self._write(bytes(8), shm_ring.COMMAND_OFFSET)
        self._write(data[8:], shm_ring.COMMAND_OFFSET + 8)
        self._write(data[:8], shm_ring.COMMAND_OFFSET)

    def write_heartbeat(self, now_s: float) -> None:
        """Write the time of this poll: ranks read it to see that an agent is running."""
        self._write(shm_ring.HEARTBEAT.pack(now_s), shm_ring.HEARTBEAT_OFFSET)

    def has_writer_exited(self) -> bool:
        """Whether the writer has exited for certain: its lock was held once and is free now."""
        return self.was_locked and self._is_locked() is False

    def _is_locked(self) -> bool | None:
        """Whether the file is locked; None if unknown, as another file has its name."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags)
        except OSError:
            return None
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                return None
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return False

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def open_ring(path: Path, job: str, now_s: float) -> RingReader:
    """Open a ring at its oldest record.

    Args:
        path: The ring file.
        job: Name of the job whose directory contains it.
        now_s: Monotonic clock.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is not a ring of `job`.
        VersionError: It is a ring of another version.
    """
    # Other users may write to the directory: do not follow links, do not block on pipes.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size != shm_ring.FILE_BYTES:
            raise ValueError(f"{status.st_size} bytes, a ring has {shm_ring.FILE_BYTES}")
        data = os.pread(descriptor, shm_ring.FILE_BYTES, 0)
        if len(data) < shm_ring.FILE_BYTES:
            raise ValueError(f"was truncated: {len(data)} bytes, a ring has {shm_ring.FILE_BYTES}")
        attachment = shm_ring.decode_header(data[: shm_ring.COMMAND_OFFSET])
        _check_header(attachment, path.name, job)
    except BaseException:
        os.close(descriptor)
        raise
    reader = RingReader(
        path=path,
        inode=status.st_ino,
        descriptor=descriptor,
        attachment=attachment,
        index=_oldest_index(data),
    )
    reader.command_sequence, reader.command = _existing_command(data, now_s)
    if status.st_uid not in (0, os.geteuid()):
        # A term forged by another user would lock every controller out of this node.
        reader.command = replace(reader.command, term=0)
    reader.was_locked = reader._is_locked() is True
    return reader


def _check_header(attachment: Attachment, file_name: str, job: str) -> None:
    """Check a header. Raises ValueError if it is of another ring or exceeds the wire format."""
    if attachment.job != job:
        raise ValueError(f"belongs to job {attachment.job!r}, but is in the directory of {job!r}")
    if attachment.rank >= shm_ring.MAX_RANKS:
        raise ValueError(
            f"rank {attachment.rank} exceeds the maximum of {shm_ring.MAX_RANKS} ranks"
        )
    expected = shm_ring.ring_file_name(attachment.rank)
    if file_name not in (expected, shm_ring.SUPERVISOR_RING):
        raise ValueError(f"belongs to rank {attachment.rank}, whose ring is {expected}")
    reports.attachment_to_message(attachment)


def _oldest_index(data: bytes) -> int:
    """Index of the oldest record in the ring; 0 if it is empty."""
    present = []
    for slot in range(shm_ring.SLOT_COUNT):
        (sequence,) = shm_ring.SEQUENCE.unpack_from(data, shm_ring.slot_offset(slot))
        if sequence and (sequence - 1) % shm_ring.SLOT_COUNT == slot:
            present.append(sequence - 1)
    return min(present, default=0)


def _existing_command(data: bytes, now_s: float) -> tuple[int, shm_ring.CommandSlot]:
    """Sequence and command that an earlier run of the agent left in the slot."""
    start = shm_ring.COMMAND_OFFSET
    try:
        sequence, command = shm_ring.decode_command(data[start : start + shm_ring.COMMAND_BYTES])
    except shm_ring.TornError:
        sequence, command = 0, shm_ring.CommandSlot()
    if sequence == 0:
        # Empty, or an agent was killed while writing. The rank compares with the last sequence it
        # saw; one taken from the clock differs from it.
        sequence = int(now_s * 1e6)
    return sequence, command
