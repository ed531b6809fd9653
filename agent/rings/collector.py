"""Reads the rings of this node and writes back what the controller says: files only, no network.

A ring that is not ours, of another version or damaged is reported and left alone; a damaged record
is counted and skipped. Nothing a trainer does can stop the agent, and nothing here stops a trainer.
Nothing of a trainer's is deleted here: what an earlier life of a job left behind is told as its
own, to the end, and the present life is told nothing of it. Rings of a job that ended are let go
of once they are told; our plans go when a later generation is in force.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pacekeeper.agent.rings import directory as ring_directory
from pacekeeper.agent.rings.directory import list_files, read_layout, remove_plans, write_atomically
from pacekeeper.agent.rings.fencing_epoch import FencingEpoch
from pacekeeper.agent.rings.job_state import DrainedRing, JobState, merge_commands, own_command
from pacekeeper.agent.rings.reader import RecordCounts, RingReader, open_ring
from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.core.errors import VersionError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import PlanFile
from pacekeeper.core.telemetry.records import Record

RELEASE_DELAY_S = 60.0  # without news of a job that has ended: its late words are read first
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RingCollector:
    """All rings below one ring directory.

    `unreadable` and `unwritable` name files and say why; they hold what is wrong now.
    """

    directory: Path
    fencing: FencingEpoch = field(default_factory=FencingEpoch)
    counts: RecordCounts = field(default_factory=RecordCounts)
    unreadable: dict[str, str] = field(default_factory=dict)
    unwritable: dict[str, str] = field(default_factory=dict)
    _jobs: dict[str, JobState] = field(default_factory=dict)
    _lock: int = -1
    _has_polled: bool = False

    def prepare(self) -> None:
        """Make the directory and claim it. Raises HostError where that can not be."""
        self._lock = ring_directory.claim(self.directory)
        self.fencing.load()

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
            name: {r.attachment.rank: r.attachment.pid for r in job.current_ranks}
            for name, job in self._jobs.items()
        }

    def suspects(self) -> Mapping[str, frozenset[int]]:
        """Of each job with ranks here, those of them on which the controller has a finding."""
        return {name: job.suspects for name, job in self._jobs.items() if job.current_ranks}

    def poll(self, now_s: float) -> tuple[RingBatch, ...]:
        """Everything new in all rings; heartbeats written.

        What can not be listed just now is said, and nothing of it is let go.
        """
        try:
            stamps_ns, links = ring_directory.list_jobs(self.directory)
        except OSError as error:
            self._record_problem(self.unreadable, ".", str(error.strerror))
            return ()
        for name in [n for n in self.unreadable if "/" not in n and n not in (*stamps_ns, *links)]:
            del self.unreadable[name]
        for name in links:
            self._record_problem(self.unreadable, name, "a link: it is not followed")
        last = [
            r for gone in sorted(set(self._jobs) - set(stamps_ns)) for r in self._close_job(gone)
        ]
        readings = [
            reading
            for name in sorted(stamps_ns)
            if not self._is_unchanged(name, stamps_ns[name])
            for reading in self._poll_job(name, now_s)
        ]
        self._has_polled = True
        return (*(reading for reading in last if not reading.is_empty), *readings)

    def resync(self) -> tuple[RingBatch, ...]:
        """Attachments and layouts of all jobs once more, for a controller that has forgotten."""
        return tuple(self.resync_job(name) for name, job in sorted(self._jobs.items()) if job.rings)

    def resync_job(self, name: str) -> RingBatch:
        """What must be known of a job's present life, once more: who is here, what ran, who ended.

        Measurements are not said again.
        """
        job = self._jobs[name]
        job.layouts.clear()
        return RingBatch(
            job=name,
            life=job.life,
            attached=tuple(r.attachment for r in job.current_ranks),
            records=tuple(job.exits.values()),
            layouts=tuple(self._new_layouts(name, job, self._list(name) or {})[job.life]),
        )

    def ended_jobs(self, now_s: float) -> tuple[str, ...]:
        """Jobs whose ranks here have all ended and of which nothing more has come for a while."""
        return tuple(
            name
            for name, job in sorted(self._jobs.items())
            if job.has_ended and now_s - job.last_record_s > RELEASE_DELAY_S
        )

    def release_job(self, name: str) -> None:
        """Let the rings of a job that ended go. Their files stay: they are the trainer's."""
        job = self._jobs[name]
        files = self._list(name)
        if files is None:
            return  # they would be taken for new ones: the next time, then
        for file_name, reader in job.rings.items():
            reader.close()
            if file_name in files and files[file_name].st_ino == reader.inode:
                job.drained[file_name] = DrainedRing(
                    inode=reader.inode,
                    ctime_ns=files[file_name].st_ctime_ns,
                    attachment=reader.attachment,
                )
        job.rings.clear()
        self._remove_plans(name, files, before=1 << 62)
        _log.info("job=%s ended: its rings are let go", name)

    def offer_plan(self, plan: PlanFile) -> bool:
        """Write the plan's file, whole, then tell the job's ranks. False: not possible here."""
        known = self._jobs.get(plan.job)
        if known is None or plan.life != known.life or not known.rings:
            return False
        target = self.directory / plan.job / shm_ring.plan_file_name(plan.generation)
        said = (known.command.plan_generation, known.command.plan_sha256)
        if said == (plan.generation, plan.sha256) and target.exists():
            return True  # offers are repeated until they are observed
        key = f"{plan.job}/{target.name}"
        try:
            write_atomically(target, plan.data)
        except OSError as error:
            self._record_problem(self.unwritable, key, str(error.strerror))
            return False
        self.unwritable.pop(key, None)
        self._update_commands(
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
        sane = frozenset(rank for rank in ranks if 0 <= rank < shm_ring.MAX_RANKS)
        if known is not None and known.life == life and sane:
            self._update_commands(known, lambda old: replace(old, dead_ranks=old.dead_ranks | sane))

    def set_suspects(self, job: str, ranks: frozenset[int], life: int = 0) -> None:
        """Tell the ranks of this life here who stands on nodes with a finding: these only."""
        known = self._jobs.get(job)
        sane = frozenset(rank for rank in ranks if 0 <= rank < shm_ring.MAX_RANKS)
        if known is not None and known.life == life:
            self._update_commands(known, lambda old: replace(old, suspect_ranks=sane))

    def request_probe(self, job: str, number: int, life: int = 0) -> None:
        """Tell the ranks of this life here that all of them shall run a probe."""
        known = self._jobs.get(job)
        if known is not None and known.life == life and number > known.command.probe:
            self._update_commands(known, lambda old: replace(old, probe=max(number, old.probe)))

    def _update_commands(
        self, job: JobState, change: Callable[[shm_ring.CommandSlot], shm_ring.CommandSlot]
    ) -> None:
        """Change what every ring of this life says; what an earlier agent said there is kept."""
        term = self.fencing.highest
        job.command = replace(change(job.command), term=term)
        for reader in job.rings.values():
            if reader.attachment.life == job.life:
                said = change(own_command(reader.command, job.life))
                reader.write_command(replace(said, term=term))

    def _poll_job(self, name: str, now_s: float) -> tuple[RingBatch, ...]:
        """What is new, by life, the earliest first: nearly always there is one."""
        job = self._jobs.setdefault(name, JobState(last_record_s=now_s))
        files = self._list(name)
        if files is None:
            return ()
        job.drained = {
            file_name: was for file_name, was in job.drained.items() if file_name in files
        }
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
            if opened is not None:
                job.last_record_s = now_s
                if opened.is_rank:
                    attached.append(opened.attachment)
        orphans = job.orphans()  # before reading: what they had to say is all there
        for reader in job.rings.values():
            records[reader.attachment.life] += reader.records(self.counts)
            reader.write_heartbeat(now_s)
        job.apply_records(records[job.life], now_s)
        unseen = job.inferred_exits(orphans, now_s)
        job.apply_records(unseen, now_s)
        records[job.life] += unseen
        self._remove_plans(name, files, before=job.active_generation)
        layouts = self._new_layouts(name, job, files)
        for key in [k for k in self.unreadable if k.startswith(f"{name}/")]:
            if key.removeprefix(f"{name}/") not in files:
                del self.unreadable[key]
        return tuple(
            RingBatch(
                job=name,
                life=life,
                attached=tuple(a for a in attached if a.life == life),
                records=tuple(records[life]),
                layouts=tuple(layouts[life]),
            )
            for life in sorted({job.life, *records, *layouts, *(a.life for a in attached)})
        )

    def _open_if_new(
        self, name: str, job: JobState, file_name: str, status: os.stat_result, now_s: float
    ) -> tuple[RingReader | None, list[Record]]:
        """A reader where the file is new (another inode: another life of that rank), else None.

        And what was left unread in the ring that it replaces.
        """
        known = job.rings.get(file_name)
        if known is not None and known.inode == status.st_ino:
            if status.st_size == shm_ring.FILE_BYTES:
                return None, []
            known.close()  # somebody cut the file: what is left of it is no ring
            del job.rings[file_name]
        was = job.drained.get(file_name)
        if was is not None and (was.inode, was.ctime_ns) == (status.st_ino, status.st_ctime_ns):
            return None, []
        key = f"{name}/{file_name}"
        try:
            reader = open_ring(self.directory / name / file_name, name, now_s)
        except OSError as error:
            self._record_problem(self.unreadable, key, str(error.strerror))
            return None, []
        except (ValueError, VersionError) as error:
            self._record_problem(self.unreadable, key, str(error))
            return None, []
        self.unreadable.pop(key, None)
        self.fencing.accept(reader.command.term)  # of an agent before us, whose file is gone
        rest: list[Record] = []
        if was is not None and (was.inode, was.attachment) == (reader.inode, reader.attachment):
            # Touched, but the same ring: it was read to its end.
            job.drained[file_name] = replace(was, ctime_ns=status.st_ctime_ns)
            reader.close()
            return None, []
        replaced = None if was is None else was.attachment
        if known is not None and known.inode != status.st_ino:
            rest = self._drain(known)
            replaced = known.attachment
        is_of_present = replaced is not None and job.is_current(replaced)
        if replaced is not None and is_of_present and _is_later(reader.attachment, replaced):
            job.start_life(reader.attachment.life)
        if reader.attachment.life > job.life:
            job.start_life(reader.attachment.life)
        if self._has_polled:
            self.counts.lost += reader.index  # it was born under our eyes, yet lapped already
        job.drained.pop(file_name, None)
        job.drained.pop(
            shm_ring.SUPERVISOR_RING, None
        )  # the job goes on: its next words are waited for
        job.rings[file_name] = reader
        if reader.attachment.life == job.life:
            said = merge_commands(reader.command, job.command)
            reader.write_command(replace(said, term=self.fencing.highest))
        return reader, rest

    def _drain(self, reader: RingReader) -> list[Record]:
        """The last records of a ring whose file is gone, and the end of its reader."""
        records = reader.read_remaining(self.counts)
        reader.close()
        return records

    def _close_job(self, name: str) -> tuple[RingBatch, ...]:
        job = self._jobs.pop(name)
        records: defaultdict[int, list[Record]] = defaultdict(list)
        for reader in job.rings.values():
            records[reader.attachment.life] += self._drain(reader)
        for notes in (self.unreadable, self.unwritable):
            for key in [k for k in notes if k.startswith(f"{name}/")]:
                del notes[key]
        return tuple(
            RingBatch(job=name, life=life, records=tuple(records[life])) for life in sorted(records)
        )

    def _new_layouts(
        self, name: str, job: JobState, files: Mapping[str, os.stat_result]
    ) -> defaultdict[int, list[tuple[int, bytes]]]:
        """(generation, data) of layout files not told yet, by life."""
        found: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for file_name, status in sorted(files.items()):
            parsed = shm_ring.parse_layout_file_name(file_name)
            if parsed is None:
                continue
            generation, life = parsed
            stamp_ns = status.st_mtime_ns
            if stamp_ns in (job.layouts.get(file_name), job.previous_layouts.get(file_name)):
                continue
            key = f"{name}/{file_name}"
            try:
                data = read_layout(self.directory / name / file_name)
            except OSError as error:
                self._record_problem(self.unreadable, key, str(error.strerror))
                continue
            except ValueError as error:
                self._record_problem(self.unreadable, key, str(error))
                continue
            self.unreadable.pop(key, None)
            job.layouts[file_name] = stamp_ns
            found[life].append((generation, data))
        return found

    def _is_unchanged(self, name: str, stamp_ns: int | None) -> bool:
        """Was the job let go, and has no file come or gone since? Then it costs no look.

        The directory's time has to be the same three times: two looks may lie in one tick of it.
        """
        job = self._jobs.get(name)
        if job is None:
            return False
        is_same = stamp_ns is not None and job.stamps_ns == (stamp_ns, stamp_ns)
        job.stamps_ns = (job.stamps_ns[1], stamp_ns)
        return is_same and bool(job.drained) and not job.rings

    def _remove_plans(self, name: str, files: Iterable[str], before: int) -> None:
        """Plans of generations nobody will ask for again: those before the one in force."""
        key = f"{name}/plans"
        try:
            remove_plans(self.directory / name, files, before)
        except OSError as error:
            self._record_problem(self.unwritable, key, str(error.strerror))
        else:
            self.unwritable.pop(key, None)

    def _list(self, name: str) -> dict[str, os.stat_result] | None:
        """Ring, layout and plan files of a job, by name; None where it can not be read just now."""
        try:
            found = list_files(self.directory / name)
        except OSError as error:
            self._record_problem(self.unreadable, name, str(error.strerror))
            return None
        self.unreadable.pop(name, None)
        return found

    def _record_problem(self, notes: dict[str, str], key: str, reason: str) -> None:
        """Say it in the log when it is new, and in every report while it lasts."""
        if notes.get(key) != reason:
            _log.warning("file=%s/%s: %s", self.directory, key, reason)
        notes[key] = reason


def _is_later(one: Attachment, replaced: Attachment) -> bool:
    """Is `one`, which took the other's file over, of another life? A number is never outdone."""
    if one.life and replaced.life:
        return one.life > replaced.life
    return (one.life, one.pid) != (replaced.life, replaced.pid)
