"""Reads the rings of this node and writes back what the controller says: files only, no network.

A ring that is not ours, of another version or damaged is reported and left alone; a damaged record
is counted and skipped. Nothing a trainer does can stop the agent, and nothing here stops a trainer.
Nothing of a trainer's is deleted here: what an earlier life of a job left behind is told as its
own, to the end, and the present life is told nothing of it.
"""

import contextlib
import fcntl
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pacekeeper.agent.ring_reader import Counts, RingReader, open_ring
from pacekeeper.agent.window import Reading
from pacekeeper.core import ring
from pacekeeper.core.errors import HostError, VersionError
from pacekeeper.core.records import Record
from pacekeeper.core.reports import PlanFile
from pacekeeper.core.topology import Attachment, is_job_name

MAX_LAYOUT_BYTES = 16 * 1024 * 1024
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Job:
    """One job's directory: its rings, what its ranks should know, layout files already told.

    `life` is the newest one seen, `told` what this agent was told to say to it. Where lives have no
    number, `earlier_pids` and `earlier_layouts` belong to one before the present.
    """

    life: int = 0

    rings: dict[str, RingReader] = field(default_factory=dict)
    told: ring.CommandSlot = field(default_factory=ring.CommandSlot)
    layouts: dict[str, int] = field(default_factory=dict)  # file name -> mtime_ns
    earlier_pids: frozenset[int] = frozenset()
    earlier_layouts: dict[str, int] = field(default_factory=dict)

    @property
    def present_ranks(self) -> list[RingReader]:
        return [
            reader
            for reader in self.rings.values()
            if reader.is_rank and self.is_present(reader.attachment)
        ]

    def is_present(self, attachment: Attachment) -> bool:
        """Is this one of the job's present life?"""
        return attachment.life == self.life and attachment.pid not in self.earlier_pids

    def began_anew(self, life: int) -> None:
        """The job was started again, under the same name: the dead of before are no one's dead."""
        self.earlier_pids = frozenset(
            () if life else (r.attachment.pid for r in self.rings.values())
        )
        self.earlier_layouts = {} if life else dict(self.layouts)
        self.life = life
        self.told = ring.CommandSlot(life=life)


@dataclass(slots=True, kw_only=True)
class Intake:
    """All rings below one ring directory.

    `unreadable` and `unwritable` name files and say why; they hold what is wrong now.
    """

    directory: Path
    counts: Counts = field(default_factory=Counts)
    unreadable: dict[str, str] = field(default_factory=dict)
    unwritable: dict[str, str] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _lock: int = -1
    _has_looked: bool = False

    def prepare(self) -> None:
        """Make the directory and claim it. Raises HostError where that can not be."""
        remedy = "make it writable for this user, or name another with --ring-dir"
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True)
                self.directory.chmod(0o1777)  # ranks of other users make their job's directory
            with tempfile.TemporaryFile(dir=self.directory):
                pass
            self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileExistsError:
            raise HostError(
                f"ring directory {self.directory}: is not a directory", remedy=remedy
            ) from None
        except BlockingIOError:
            raise HostError(
                f"ring directory {self.directory}: another agent reads it",
                remedy="stop that agent, or name another directory with --ring-dir",
            ) from None
        except OSError as error:
            raise HostError(
                f"ring directory {self.directory}: {error.strerror}", remedy=remedy
            ) from None

    def close(self) -> None:
        """Close all rings and give the directory back."""
        for job in self._jobs.values():
            for reader in job.rings.values():
                reader.close()
        self._jobs.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def num_rings(self) -> int:
        return sum(len(job.rings) for job in self._jobs.values())

    def pids(self) -> Mapping[str, Mapping[int, int]]:
        """The process of each rank here, by job."""
        return {
            name: {r.attachment.rank: r.attachment.pid for r in job.present_ranks}
            for name, job in self._jobs.items()
        }

    def look(self, now_s: float) -> tuple[Reading, ...]:
        """Everything new in all rings; heartbeats written."""
        names = set()
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            names = {e.name for e in entries if is_job_name(e.name) and e.is_dir()}
        last = [r for gone in sorted(set(self._jobs) - names) for r in self._close_job(gone)]
        readings = [r for name in sorted(names) for r in self._look_at_job(name, now_s)]
        self._has_looked = True
        return (*(reading for reading in last if not reading.is_empty), *readings)

    def everything_again(self) -> tuple[Reading, ...]:
        """Attachments and layouts of all jobs once more, for a controller that has forgotten."""
        readings = []
        for name, job in sorted(self._jobs.items()):
            job.layouts.clear()
            readings.append(
                Reading(
                    job=name,
                    life=job.life,
                    attached=tuple(r.attachment for r in job.present_ranks),
                    layouts=tuple(self._new_layouts(name, job, self._list(name))[job.life]),
                )
            )
        return tuple(readings)

    def offer_plan(self, plan: PlanFile) -> bool:
        """Write the plan's file, whole, then tell the job's ranks. False: not possible here."""
        known = self._jobs.get(plan.job)
        if known is None or plan.life != known.life:
            return False
        target = self.directory / plan.job / ring.plan_file_name(plan.generation)
        said = (known.told.plan_generation, known.told.plan_sha256)
        if said == (plan.generation, plan.sha256) and target.exists():
            return True  # offers are repeated until they are observed
        key = f"{plan.job}/{target.name}"
        try:
            _write_whole(target, plan.data)
        except OSError as error:
            self._note(self.unwritable, key, str(error.strerror))
            return False
        self.unwritable.pop(key, None)
        self._tell(
            known,
            lambda command: replace(
                command,
                plan_generation=plan.generation,
                base_generation=plan.base_generation,
                plan_sha256=plan.sha256,
            ),
        )
        return True

    def notify_deaths(self, job: str, ranks: frozenset[int], life: int = 0) -> None:
        """Tell the ranks of this life here who of it is dead, in addition to what they know."""
        known = self._jobs.get(job)
        sane = frozenset(rank for rank in ranks if 0 <= rank < ring.MAX_RANKS)
        if known is not None and known.life == life and sane:
            self._tell(known, lambda old: replace(old, dead_ranks=old.dead_ranks | sane))

    def _tell(self, job: _Job, change: Callable[[ring.CommandSlot], ring.CommandSlot]) -> None:
        """Change what every ring of this life says; what an earlier agent said there is kept."""
        job.told = change(job.told)
        for reader in job.rings.values():
            if reader.attachment.life == job.life:
                reader.write_command(change(reader.said))

    def _look_at_job(self, name: str, now_s: float) -> tuple[Reading, ...]:
        """What is new, by life, the earliest first: nearly always there is one."""
        job = self._jobs.setdefault(name, _Job())
        files = self._list(name)
        records: defaultdict[int, list[Record]] = defaultdict(list)
        attached: list[Attachment] = []
        for gone in set(job.rings) - set(files):
            reader = job.rings.pop(gone)
            records[reader.attachment.life] += self._drain(reader)
        # The supervisor's ring first: it is the first one of a new life of the job.
        rings = sorted((f for f in files if f.endswith(".ring")), key=lambda f: (f[0] != "s", f))
        for file_name in rings:
            before = job.rings.get(file_name)
            opened, rest = self._open_if_new(name, job, file_name, files[file_name], now_s)
            if before is not None:
                records[before.attachment.life] += rest
            if opened is not None and opened.is_rank:
                attached.append(opened.attachment)
        for reader in job.rings.values():
            records[reader.attachment.life] += reader.records(self.counts)
            reader.beat(now_s)
        layouts = self._new_layouts(name, job, files)
        for key in [k for k in self.unreadable if k.startswith(f"{name}/")]:
            if key.removeprefix(f"{name}/") not in files:
                del self.unreadable[key]
        return tuple(
            Reading(
                job=name,
                life=life,
                attached=tuple(a for a in attached if a.life == life),
                records=tuple(records[life]),
                layouts=tuple(layouts[life]),
            )
            for life in sorted({job.life, *records, *layouts, *(a.life for a in attached)})
        )

    def _open_if_new(
        self, name: str, job: _Job, file_name: str, status: os.stat_result, now_s: float
    ) -> tuple[RingReader | None, list[Record]]:
        """A reader where the file is new (another inode: another life of that rank), else None.

        And what was left unread in the ring that it replaces.
        """
        known = job.rings.get(file_name)
        if known is not None and known.inode == status.st_ino:
            if status.st_size == ring.FILE_BYTES:
                return None, []
            known.close()  # somebody cut the file: touching the mapping would kill the agent
            del job.rings[file_name]
        key = f"{name}/{file_name}"
        try:
            reader = open_ring(self.directory / name / file_name, name, now_s)
        except OSError as error:
            self._note(self.unreadable, key, str(error.strerror))
            return None, []
        except (ValueError, VersionError) as error:
            self._note(self.unreadable, key, str(error))
            return None, []
        self.unreadable.pop(key, None)
        rest: list[Record] = []
        if known is not None and known.inode != status.st_ino:
            rest = self._drain(known)
            if job.is_present(known.attachment) and _is_later(reader.attachment, known.attachment):
                job.began_anew(reader.attachment.life)
        if reader.attachment.life > job.life:
            job.began_anew(reader.attachment.life)
        if self._has_looked:
            self.counts.lost += reader.index  # it was born under our eyes, yet lapped already
        job.rings[file_name] = reader
        if reader.attachment.life == job.life:
            reader.write_command(_merged(reader.said, job.told))
        return reader, rest

    def _drain(self, reader: RingReader) -> list[Record]:
        """The last records of a ring whose file is gone, and the end of its reader."""
        records = reader.records(self.counts)
        reader.close()
        return records

    def _close_job(self, name: str) -> tuple[Reading, ...]:
        job = self._jobs.pop(name)
        records: defaultdict[int, list[Record]] = defaultdict(list)
        for reader in job.rings.values():
            records[reader.attachment.life] += self._drain(reader)
        for notes in (self.unreadable, self.unwritable):
            for key in [k for k in notes if k.startswith(f"{name}/")]:
                del notes[key]
        return tuple(
            Reading(job=name, life=life, records=tuple(records[life])) for life in sorted(records)
        )

    def _new_layouts(
        self, name: str, job: _Job, files: Mapping[str, os.stat_result]
    ) -> defaultdict[int, list[tuple[int, bytes]]]:
        """(generation, data) of layout files not told yet, by life."""
        found: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for file_name, status in sorted(files.items()):
            parsed = ring.parse_layout_file_name(file_name)
            if parsed is None:
                continue
            generation, life = parsed
            stamp_ns = status.st_mtime_ns
            if stamp_ns in (job.layouts.get(file_name), job.earlier_layouts.get(file_name)):
                continue
            key = f"{name}/{file_name}"
            if status.st_size > MAX_LAYOUT_BYTES:
                self._note(self.unreadable, key, f"{status.st_size} bytes are no layout")
                continue
            try:
                data = (self.directory / name / file_name).read_bytes()
            except OSError as error:
                self._note(self.unreadable, key, str(error.strerror))
                continue
            self.unreadable.pop(key, None)
            job.layouts[file_name] = stamp_ns
            found[life].append((generation, data))
        return found

    def _list(self, name: str) -> dict[str, os.stat_result]:
        """Ring and layout files of a job, by name; empty where it can not be read."""
        found = {}
        try:
            with os.scandir(self.directory / name) as entries:
                for entry in entries:
                    if entry.name.endswith((".ring", ".json")) and entry.name[0] != ".":
                        with contextlib.suppress(FileNotFoundError):
                            found[entry.name] = entry.stat(follow_symlinks=False)
        except OSError as error:
            self._note(self.unreadable, name, str(error.strerror))
        else:
            self.unreadable.pop(name, None)
        return found

    def _note(self, notes: dict[str, str], key: str, reason: str) -> None:
        """Say it in the log when it is new, and in every report while it lasts."""
        if notes.get(key) != reason:
            _log.warning("file=%s/%s: %s", self.directory, key, reason)
        notes[key] = reason


def _is_later(one: Attachment, replaced: Attachment) -> bool:
    """Is `one`, which took the other's file over, of another life? A number is never outdone."""
    if one.life and replaced.life:
        return one.life > replaced.life
    return (one.life, one.pid) != (replaced.life, replaced.pid)


def _merged(own: ring.CommandSlot, told: ring.CommandSlot) -> ring.CommandSlot:
    """What a ring just opened must say: its own words, and what was told since."""
    dead = own.dead_ranks | told.dead_ranks
    if told.plan_generation:
        return replace(told, dead_ranks=dead)
    return replace(own, dead_ranks=dead)


def _write_whole(target: Path, data: bytes) -> None:
    """A file that appears whole or not at all, readable for ranks of any user."""
    descriptor, fresh = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        os.rename(fresh, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
