"""Polls all rings of this node and writes the controller's commands into them. No network.

A ring of another version, another job or with damage is reported and left alone; a damaged record
is counted and skipped. Files of a trainer are never deleted: records left by an earlier incarnation
of a job are reported under that incarnation. Rings of an ended job are closed once their records
are acknowledged. Plan files, which the agent wrote, are deleted when a later generation is active.
"""

import logging
import math
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
from pacekeeper.agent.rings.stack_dump import DumpTarget
from pacekeeper.core.errors import VersionError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import PlanFile
from pacekeeper.core.telemetry.records import Record
from pacekeeper.core.telemetry.sign_of_life import RankPhase, RankStack

RELEASE_DELAY_S = 60.0  # after the last record of an ended job, for records that arrive late
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RingCollector:
    """All rings below one ring directory.

    `unreadable` and `unwritable` map files to the reason; they contain the present problems only.
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
        """Create and claim the directory. Raises HostError if that fails."""
        self._lock = ring_directory.claim(self.directory)
        self.fencing.load()

    def close(self) -> None:
        """Close all rings and release the directory."""
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
        """Process ids by job and rank."""
        return {
            name: {r.attachment.rank: r.attachment.pid for r in job.current_ranks}
            for name, job in self._jobs.items()
        }

    def suspects(self) -> Mapping[str, frozenset[int]]:
        """By job with ranks here: those of them that a finding of the controller names."""
        return {name: job.suspects for name, job in self._jobs.items() if job.current_ranks}

    def poll(self, now_s: float) -> tuple[RingBatch, ...]:
        """Read new records of all rings and write heartbeats.

        A directory that cannot be listed is reported; its rings stay open.

        Args:
            now_s: Monotonic clock.

        Returns:
            One batch per job and incarnation, empty ones included.
        """
        try:
            stamps_ns, links = ring_directory.list_jobs(self.directory)
        except OSError as error:
            self._record_problem(self.unreadable, ".", str(error.strerror))
            return ()
        for name in [n for n in self.unreadable if "/" not in n and n not in (*stamps_ns, *links)]:
            del self.unreadable[name]
        for name in links:
            self._record_problem(self.unreadable, name, "a symbolic link: not followed")
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
        """State of all jobs, for a controller that may have lost it: see `resync_job`."""
        return tuple(self.resync_job(name) for name, job in sorted(self._jobs.items()) if job.rings)

    def resync_job(self, name: str) -> RingBatch:
        """Attachments, layouts and exits of a job's current incarnation, without measurements."""
        job = self._jobs[name]
        job.layouts.clear()
        return RingBatch(
            job=name,
            run_id=job.run_id,
            attached=tuple(r.attachment for r in job.current_ranks),
            records=tuple(job.exits.values()),
            layouts=tuple(self._new_layouts(name, job, self._list(name) or {})[job.run_id]),
        )

    def ended_jobs(self, now_s: float) -> tuple[str, ...]:
        """Jobs whose ranks here have all exited, RELEASE_DELAY_S after the last record."""
        return tuple(
            name
            for name, job in sorted(self._jobs.items())
            if job.has_ended and now_s - job.last_record_s > RELEASE_DELAY_S
        )

    def release_job(self, name: str) -> None:
        """Close the rings of an ended job. Their files stay, except plan files."""
        job = self._jobs[name]
        files = self._list(name)
        if files is None:
            return  # retried later: without the listing they would be opened again as new rings
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
        _log.info("job=%s ended, its rings are closed", name)

    def offer_plan(self, plan: PlanFile) -> bool:
        """Write the plan file, then its number into the rings of the job's ranks.

        Returns:
            False if this node has no ring of that incarnation, or the file cannot be written.
        """
        known = self._jobs.get(plan.job)
        if known is None or plan.run_id != known.run_id or not known.rings:
            return False
        target = self.directory / plan.job / shm_ring.plan_file_name(plan.generation)
        offered = (known.command.plan_generation, known.command.plan_sha256)
        if offered == (plan.generation, plan.sha256) and target.exists():
            return True  # the controller repeats offers until it observes their effect
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

    def notify_deaths(self, job: str, ranks: frozenset[int], run_id: int = 0) -> None:
        """Add dead ranks to the commands of this incarnation's ranks."""
        known = self._jobs.get(job)
        sane = frozenset(rank for rank in ranks if 0 <= rank < shm_ring.MAX_RANKS)
        if known is not None and known.run_id == run_id and sane:
            self._update_commands(known, lambda old: replace(old, dead_ranks=old.dead_ranks | sane))

    def set_suspects(self, job: str, ranks: frozenset[int], run_id: int = 0) -> None:
        """Replace the suspect ranks in the commands of this incarnation's ranks."""
        known = self._jobs.get(job)
        sane = frozenset(rank for rank in ranks if 0 <= rank < shm_ring.MAX_RANKS)
        if known is not None and known.run_id == run_id:
            self._update_commands(known, lambda old: replace(old, suspect_ranks=sane))

    def request_probe(self, job: str, number: int, run_id: int = 0) -> None:
        """Request probe `number` from this incarnation's ranks; lower numbers are ignored."""
        known = self._jobs.get(job)
        if known is not None and known.run_id == run_id and number > known.command.probe:
            self._update_commands(known, lambda old: replace(old, probe=max(number, old.probe)))

    def dump_targets(
        self, job: str, ranks: frozenset[int], run_id: int = 0
    ) -> tuple[DumpTarget, ...]:
        """The processes of these ranks of this incarnation, as far as they are on this node."""
        known = self._jobs.get(job)
        if known is None or known.run_id != run_id:
            return ()
        return tuple(
            DumpTarget(
                rank=reader.attachment.rank,
                ring=reader.path,
                pid=reader.process(),
                signal=reader.sign().dump_signal,
            )
            for reader in known.current_ranks
            if reader.attachment.rank in ranks
        )

    def add_stack(self, job: str, stack: RankStack, run_id: int = 0) -> None:
        """Report a dump with the next poll, unless the job was started anew meanwhile."""
        known = self._jobs.get(job)
        if known is not None and known.run_id == run_id:
            known.stacks.append(stack)

    def _update_commands(
        self, job: JobState, change: Callable[[shm_ring.CommandSlot], shm_ring.CommandSlot]
    ) -> None:
        """Change the command of every ring of this incarnation; other fields there are kept."""
        term = self.fencing.highest
        job.command = replace(change(job.command), term=term)
        for reader in job.rings.values():
            if reader.attachment.run_id == job.run_id:
                command = change(own_command(reader.command, job.run_id))
                reader.write_command(replace(command, term=term))

    def _poll_job(self, name: str, now_s: float) -> tuple[RingBatch, ...]:
        """New records of a job, by incarnation in ascending order; usually there is one."""
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
            records[reader.attachment.run_id] += self._drain(reader)
        # The supervisor's ring first: it is the first ring of a new incarnation.
        rings = sorted((f for f in files if f.endswith(".ring")), key=lambda f: (f[0] != "s", f))
        for file_name in rings:
            before = job.rings.get(file_name)
            opened, rest = self._open_if_new(name, job, file_name, files[file_name], now_s)
            if before is not None:
                records[before.attachment.run_id] += rest
            if opened is not None:
                job.last_record_s = now_s
                if opened.is_rank:
                    attached.append(opened.attachment)
        orphans = job.orphans()  # determined before reading, when all their records are written
        phases: list[RankPhase] = []
        suspect_s = max((r.watch.suspect_s for r in job.rings.values()), default=-math.inf)
        for reader in job.rings.values():
            own = reader.records(self.counts)
            records[reader.attachment.run_id] += own
            reader.write_heartbeat(now_s)
            is_watched = reader.is_rank and job.is_current(reader.attachment)
            if is_watched:
                seen = reader.standstill(own, now_s, suspect_s=suspect_s)
                phases += [] if seen is None else [seen]
        job.apply_records(records[job.run_id], now_s)
        unseen = job.inferred_exits(orphans, now_s)
        job.apply_records(unseen, now_s)
        records[job.run_id] += unseen
        self._remove_plans(name, files, before=job.active_generation)
        layouts = self._new_layouts(name, job, files)
        stacks, job.stacks = job.stacks, []
        for key in [k for k in self.unreadable if k.startswith(f"{name}/")]:
            if key.removeprefix(f"{name}/") not in files:
                del self.unreadable[key]
        return tuple(
            RingBatch(
                job=name,
                run_id=run_id,
                attached=tuple(a for a in attached if a.run_id == run_id),
                records=tuple(records[run_id]),
                layouts=tuple(layouts[run_id]),
                phases=tuple(phases) if run_id == job.run_id else (),
                stacks=tuple(stacks) if run_id == job.run_id else (),
            )
            for run_id in sorted({job.run_id, *records, *layouts, *(a.run_id for a in attached)})
        )

    def _open_if_new(
        self, name: str, job: JobState, file_name: str, status: os.stat_result, now_s: float
    ) -> tuple[RingReader | None, list[Record]]:
        """Open a ring file that is new: an unknown name, or another inode under a known one.

        Returns:
            The reader, None if the file is known or unreadable; and the unread records of the ring
            that the file replaces.
        """
        known = job.rings.get(file_name)
        if known is not None and known.inode == status.st_ino:
            if status.st_size == shm_ring.FILE_BYTES:
                return None, []
            known.close()  # the file was truncated: it is no longer a ring
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
        self.fencing.accept(
            reader.command.term
        )  # written by an earlier agent whose term file is lost
        rest: list[Record] = []
        if was is not None and (was.inode, was.attachment) == (reader.inode, reader.attachment):
            # The same ring with a new time stamp; it has been read to its end.
            job.drained[file_name] = replace(was, ctime_ns=status.st_ctime_ns)
            reader.close()
            return None, []
        replaced = None if was is None else was.attachment
        if known is not None and known.inode != status.st_ino:
            rest = self._drain(known)
            replaced = known.attachment
        is_of_present = replaced is not None and job.is_current(replaced)
        if replaced is not None and is_of_present and _is_later(reader.attachment, replaced):
            job.start_run(reader.attachment.run_id)
        if reader.attachment.run_id > job.run_id:
            job.start_run(reader.attachment.run_id)
        if self._has_polled:
            self.counts.lost += reader.index  # created since the last poll, yet overwritten already
        job.drained.pop(file_name, None)
        job.drained.pop(shm_ring.SUPERVISOR_RING, None)  # the job continues: expect further records
        job.rings[file_name] = reader
        if reader.attachment.run_id == job.run_id:
            command = merge_commands(reader.command, job.command)
            reader.write_command(replace(command, term=self.fencing.highest))
        return reader, rest

    def _drain(self, reader: RingReader) -> list[Record]:
        """Read the remaining records of a ring whose file is gone, and close it."""
        records = reader.read_remaining(self.counts)
        reader.close()
        return records

    def _close_job(self, name: str) -> tuple[RingBatch, ...]:
        job = self._jobs.pop(name)
        records: defaultdict[int, list[Record]] = defaultdict(list)
        for reader in job.rings.values():
            records[reader.attachment.run_id] += self._drain(reader)
        for notes in (self.unreadable, self.unwritable):
            for key in [k for k in notes if k.startswith(f"{name}/")]:
                del notes[key]
        return tuple(
            RingBatch(job=name, run_id=run_id, records=tuple(records[run_id]))
            for run_id in sorted(records)
        )

    def _new_layouts(
        self, name: str, job: JobState, files: Mapping[str, os.stat_result]
    ) -> defaultdict[int, list[tuple[int, bytes]]]:
        """(generation, data) of layout files not reported yet, by incarnation."""
        found: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for file_name, status in sorted(files.items()):
            parsed = shm_ring.parse_layout_file_name(file_name)
            if parsed is None:
                continue
            generation, run_id = parsed
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
            found[run_id].append((generation, data))
        return found

    def _is_unchanged(self, name: str, stamp_ns: int | None) -> bool:
        """Whether the job's rings are closed and its directory has not changed since.

        The directory's time must be equal in three polls, because two polls may fall into one tick.
        """
        job = self._jobs.get(name)
        if job is None:
            return False
        is_same = stamp_ns is not None and job.stamps_ns == (stamp_ns, stamp_ns)
        job.stamps_ns = (job.stamps_ns[1], stamp_ns)
        return is_same and bool(job.drained) and not job.rings

    def _remove_plans(self, name: str, files: Iterable[str], before: int) -> None:
        """Delete plan files of generations below the active one."""
        key = f"{name}/plans"
        try:
            remove_plans(self.directory / name, files, before)
        except OSError as error:
            self._record_problem(self.unwritable, key, str(error.strerror))
        else:
            self.unwritable.pop(key, None)

    def _list(self, name: str) -> dict[str, os.stat_result] | None:
        """Ring, layout and plan files of a job by name; None if the directory cannot be read."""
        try:
            found = list_files(self.directory / name)
        except OSError as error:
            self._record_problem(self.unreadable, name, str(error.strerror))
            return None
        self.unreadable.pop(name, None)
        return found

    def _record_problem(self, notes: dict[str, str], key: str, reason: str) -> None:
        """Log a new problem; it is part of every report while it lasts."""
        if notes.get(key) != reason:
            _log.warning("file=%s/%s: %s", self.directory, key, reason)
        notes[key] = reason


def _is_later(one: Attachment, replaced: Attachment) -> bool:
    """Whether `one`, which replaced the other's file, is of a later incarnation.

    A numbered incarnation is replaced by a higher number only.
    """
    if one.run_id and replaced.run_id:
        return one.run_id > replaced.run_id
    return (one.run_id, one.pid) != (replaced.run_id, replaced.pid)
