"""Reads the rings of this node and writes back what the controller says: files only, no network.

A ring that is not ours, of another version or damaged is reported and left alone; a damaged record
is counted and skipped. Nothing a trainer does can stop the agent, and nothing here stops a trainer.
"""

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from pacekeeper.agent.window import Reading
from pacekeeper.core import ring
from pacekeeper.core.errors import HostError, VersionError
from pacekeeper.core.records import Record
from pacekeeper.core.topology import Attachment, is_job_name

MAX_RECORDS_PER_LOOK = 4096  # per ring and look: one busy rank must not starve the others
SETTLE_LOOKS = 3  # looks a half-written ring may take before it counts as unreadable


@dataclass(slots=True, kw_only=True)
class RingReader:
    """The reader's side of one ring file."""

    path: Path
    inode: int
    memory: mmap.mmap
    attachment: Attachment
    index: int = 0
    command_sequence: int = 0

    def records(self, counts: "Counts") -> list[Record]:
        """What is new; never more than MAX_RECORDS_PER_LOOK."""
        found: list[Record] = []
        while len(found) < MAX_RECORDS_PER_LOOK:
            offset = ring.slot_offset(self.index)
            (before,) = ring.SEQUENCE.unpack_from(self.memory, offset)
            slot = self.memory[offset : offset + ring.SLOT_BYTES]
            (after,) = ring.SEQUENCE.unpack_from(self.memory, offset)
            try:
                record = ring.decode_slot(self.index, before, slot, after)
            except ring.TornError:
                break
            except ring.CorruptError:
                counts.corrupt += 1
                self.index += 1
                continue
            except LookupError:
                # Lapped: the slot holds a record of a later round. Go to the oldest still there.
                oldest = before - ring.SLOT_COUNT + 1
                counts.lost += max(1, oldest - self.index)
                self.index = max(self.index + 1, oldest)
                continue
            if record is None:
                break
            counts.read += 1
            found.append(record)
            self.index += 1
        return found

    def write_command(self, command: ring.CommandSlot) -> None:
        """Put the command into the slot: sequence last, so that a rank sees it whole or not."""
        self.command_sequence += 1
        data = ring.encode_command(self.command_sequence, command)
        start = ring.COMMAND_OFFSET
        self.memory[start : start + 8] = bytes(8)
        self.memory[start + 8 : start + len(data)] = data[8:]
        self.memory[start : start + 8] = data[:8]

    def beat(self, now_s: float) -> None:
        """Tell the rank that somebody reads."""
        ring.HEARTBEAT.pack_into(self.memory, ring.HEARTBEAT_OFFSET, now_s)


@dataclass(slots=True)
class Counts:
    """Since the agent's start."""

    read: int = 0
    lost: int = 0
    corrupt: int = 0


@dataclass(slots=True, kw_only=True)
class _Job:
    """One job's directory: its rings, what its ranks should know, layout files already told."""

    rings: dict[str, RingReader] = field(default_factory=dict)
    command: ring.CommandSlot = field(default_factory=ring.CommandSlot)
    layouts: dict[str, int] = field(default_factory=dict)  # file name -> mtime_ns


@dataclass(slots=True, kw_only=True)
class Intake:
    """All rings below one ring directory."""

    directory: Path
    counts: Counts = field(default_factory=Counts)
    unreadable: dict[str, str] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _young: dict[Path, int] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make the directory. Raises HostError where it can not be made or written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise HostError(
                f"ring directory {self.directory}: {error.strerror}",
                remedy="make it writable for this user, or name another with --ring-dir",
            ) from None

    @property
    def num_rings(self) -> int:
        return sum(len(job.rings) for job in self._jobs.values())

    def look(self, now_s: float) -> tuple[Reading, ...]:
        """Everything new in all rings; heartbeats written."""
        readings = []
        names = {path.name for path in _subdirectories(self.directory) if is_job_name(path.name)}
        for gone in set(self._jobs) - names:
            del self._jobs[gone]
        for name in sorted(names):
            readings.append(self._look_at_job(name, now_s))
        return tuple(readings)

    def everything_again(self) -> tuple[Reading, ...]:
        """All attachments and layouts once more, for a controller that has forgotten them."""
        readings = []
        for name, job in sorted(self._jobs.items()):
            job.layouts.clear()
            attached = tuple(r.attachment for r in job.rings.values() if _is_rank(r))
            readings.append(
                Reading(job=name, attached=attached, layouts=self._new_layouts(name, job))
            )
        return tuple(readings)

    def offer_plan(
        self, job: str, generation: int, base_generation: int, data: bytes, digest: bytes
    ) -> bool:
        """Write the plan's file, whole, then tell the job's ranks. False: no such job here."""
        known = self._jobs.get(job)
        if known is None:
            return False
        command = known.command
        if (command.plan_generation, command.plan_sha256) == (generation, digest):
            return True  # said before: offers are repeated until they are observed
        target = self.directory / job / ring.plan_file_name(generation)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        fresh.write_bytes(data)
        fresh.rename(target)
        self._tell(
            known,
            ring.CommandSlot(
                plan_generation=generation,
                base_generation=base_generation,
                plan_sha256=digest,
                dead_ranks=command.dead_ranks,
            ),
        )
        return True

    def notify_deaths(self, job: str, ranks: frozenset[int]) -> None:
        """Tell the job's ranks here who is dead, in addition to what they know."""
        known = self._jobs.get(job)
        if known is None or ranks <= known.command.dead_ranks:
            return
        command = known.command
        self._tell(
            known,
            ring.CommandSlot(
                plan_generation=command.plan_generation,
                base_generation=command.base_generation,
                plan_sha256=command.plan_sha256,
                dead_ranks=command.dead_ranks | ranks,
            ),
        )

    def _tell(self, job: _Job, command: ring.CommandSlot) -> None:
        job.command = command
        for reader in job.rings.values():
            reader.write_command(command)

    def _look_at_job(self, name: str, now_s: float) -> Reading:
        job = self._jobs.setdefault(name, _Job())
        attached = []
        for path in sorted((self.directory / name).glob("*.ring")):
            reader = self._open_if_new(job, path)
            if reader is not None and _is_rank(reader):
                attached.append(reader.attachment)
        records: list[Record] = []
        for reader in job.rings.values():
            records += reader.records(self.counts)
            reader.beat(now_s)
        return Reading(
            job=name,
            attached=tuple(attached),
            records=tuple(records),
            layouts=self._new_layouts(name, job),
        )

    def _open_if_new(self, job: _Job, path: Path) -> RingReader | None:
        """A reader where the file is new (another inode: another life of that rank), else None."""
        try:
            status = path.stat()
        except OSError:
            return None
        known = job.rings.get(path.name)
        key = str(path.relative_to(self.directory))
        if known is not None and known.inode == status.st_ino:
            return None
        try:
            with path.open("r+b") as file:
                if status.st_size != ring.FILE_BYTES:
                    raise ValueError(f"{status.st_size} bytes, a ring has {ring.FILE_BYTES}")
                memory = mmap.mmap(file.fileno(), ring.FILE_BYTES)
            attachment = ring.decode_header(memory[: ring.COMMAND_OFFSET])
        except (OSError, ValueError, VersionError) as error:
            self.unreadable[key] = str(error)
            return None
        self.unreadable.pop(key, None)
        if _is_job_restart(known, attachment):
            # The ranks of an earlier life of this job are no one's dead any more.
            job.command = ring.CommandSlot()
        reader = RingReader(path=path, inode=status.st_ino, memory=memory, attachment=attachment)
        reader.command_sequence, command = _old_command(memory)
        job.rings[path.name] = reader
        if known is None and command.plan_generation > job.command.plan_generation:
            job.command = command  # the agent was restarted: go on with what it had said
        if job.command != ring.CommandSlot():
            reader.write_command(job.command)
        return reader

    def _new_layouts(self, name: str, job: _Job) -> tuple[tuple[int, bytes], ...]:
        found = []
        for path in sorted((self.directory / name).glob("layout-*.json")):
            try:
                stamp_ns = path.stat().st_mtime_ns
                if job.layouts.get(path.name) == stamp_ns:
                    continue
                generation = int(path.stem.removeprefix("layout-"))
                found.append((generation, path.read_bytes()))
            except (OSError, ValueError):
                continue
            job.layouts[path.name] = stamp_ns
        return tuple(found)


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []


def _is_rank(reader: RingReader) -> bool:
    return reader.path.name != ring.SUPERVISOR_RING


def _is_job_restart(known: RingReader | None, attachment: Attachment) -> bool:
    return known is not None and known.attachment.pid != attachment.pid


def _old_command(memory: mmap.mmap) -> tuple[int, ring.CommandSlot]:
    """What an earlier life of the agent left in the command slot."""
    start = ring.COMMAND_OFFSET
    try:
        return ring.decode_command(memory[start : start + ring.COMMAND_BYTES])
    except ring.TornError:
        return 1, ring.CommandSlot()
