"""State of one job on this node: rings, current incarnation, exits; and merging of commands."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pacekeeper.agent.rings.reader import RingReader
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import EXIT_UNKNOWN, RankExitRecord
from pacekeeper.core.telemetry.shm_ring import CommandSlot
from pacekeeper.core.telemetry.sign_of_life import RankStack


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedRing:
    """Identity of a ring that was read to its end and closed."""

    inode: int
    ctime_ns: int
    attachment: Attachment


@dataclass(slots=True, kw_only=True)
class JobState:
    """One job.

    Attributes:
        run_id: ID of the newest run; 0: runs are not numbered.
        rings: Open rings by file name.
        command: The command for ranks of this incarnation.
        layouts: mtime_ns of reported layout files by name.
        previous_pids: Processes of the previous incarnation, if not numbered.
        previous_layouts: Layout files of the previous incarnation, if not numbered.
        exits: Exit records of this incarnation by rank and pid.
        active_generation: Newest generation that a rank has run.
        last_record_s: Time of the last record or new ring, monotonic.
        drained: Closed rings by file name.
        stamps_ns: mtime_ns of the directory in the last two polls.
        stacks: Dumps of ranks that are to be reported.
    """

    run_id: int = 0
    rings: dict[str, RingReader] = field(default_factory=dict)
    command: shm_ring.CommandSlot = field(default_factory=shm_ring.CommandSlot)
    layouts: dict[str, int] = field(default_factory=dict)
    previous_pids: frozenset[int] = frozenset()
    previous_layouts: dict[str, int] = field(default_factory=dict)
    exits: dict[tuple[int, int], RankExitRecord] = field(default_factory=dict)
    active_generation: int = 0
    last_record_s: float = 0.0
    drained: dict[str, DrainedRing] = field(default_factory=dict)
    stamps_ns: tuple[int | None, int | None] = (None, None)
    stacks: list[RankStack] = field(default_factory=list)

    @property
    def current_ranks(self) -> list[RingReader]:
        return [
            reader
            for reader in self.rings.values()
            if reader.is_rank and self.is_current(reader.attachment)
        ]

    @property
    def suspects(self) -> frozenset[int]:
        """Ranks of this incarnation on this node that a finding of the controller names."""
        return self.command.suspect_ranks & {r.attachment.rank for r in self.current_ranks}

    @property
    def has_ended(self) -> bool:
        """Whether there is an exit record of every rank on this node.

        Nothing else proves an exit: pids may be of another namespace, and a silent rank may live.
        """
        ranks = [r.attachment for r in self.rings.values() if r.is_rank]
        return bool(self.rings and self.exits) and all((r.rank, r.pid) in self.exits for r in ranks)

    def orphans(self) -> list[RingReader]:
        """Ranks whose process and supervisor have both exited without an exit record.

        A living supervisor reports the exit codes itself. Without a supervisor a failure cannot be
        distinguished from a clean exit, so there are none.
        """
        supervisor = self.rings.get(shm_ring.SUPERVISOR_RING)
        if supervisor is None or supervisor.attachment.run_id != self.run_id:
            return []
        waiting = [
            reader
            for reader in self.current_ranks
            if (reader.attachment.rank, reader.attachment.pid) not in self.exits
        ]
        if not waiting or not supervisor.has_writer_exited():
            return []
        return [reader for reader in waiting if reader.has_writer_exited()]

    def inferred_exits(self, orphans: Iterable[RingReader], now_s: float) -> list[RankExitRecord]:
        """Exit records, code unknown, of the orphans without one in the supervisor's records."""
        ranks = [reader.attachment for reader in orphans]
        return [
            RankExitRecord(
                rank=a.rank, pid=a.pid, exit_code=EXIT_UNKNOWN, signal=0, detected_mono_s=now_s
            )
            for a in ranks
            if self.is_current(a) and (a.rank, a.pid) not in self.exits
        ]

    def is_current(self, attachment: Attachment) -> bool:
        """Whether the attachment is of the job's current incarnation."""
        return attachment.run_id == self.run_id and attachment.pid not in self.previous_pids

    def start_run(self, run_id: int) -> None:
        """Start the next incarnation: exits, commands and the active generation are reset."""
        attachments = [r.attachment for r in self.rings.values()]
        attachments += [r.attachment for r in self.drained.values()]
        self.previous_pids = frozenset(() if run_id else (a.pid for a in attachments))
        self.previous_layouts = {} if run_id else dict(self.layouts)
        self.run_id = run_id
        self.command = shm_ring.CommandSlot(run_id=run_id)
        self.exits, self.active_generation = {}, 0
        self.stacks = []

    def apply_records(self, records: Iterable[object], now_s: float) -> None:
        """Update exits and the active generation from records of this incarnation."""
        for record in records:
            self.last_record_s = now_s
            if isinstance(record, RankExitRecord):
                self.exits[record.rank, record.pid] = record
            else:
                self.active_generation = max(
                    self.active_generation, getattr(record, "generation", 0)
                )


def own_command(command: CommandSlot, run_id: int) -> CommandSlot:
    """The command that a ring holds for this incarnation; empty if it is for another one."""
    is_same = command.run_id in (0, run_id)
    return replace(command, run_id=run_id) if is_same else CommandSlot(run_id=run_id)


def merge_commands(own: CommandSlot, newest: CommandSlot) -> CommandSlot:
    """The command for a ring just opened.

    Args:
        own: What the ring holds, written by an earlier agent.
        newest: The job's command since this agent started; its plan wins.
    """
    own = own_command(own, newest.run_id)
    base = newest if newest.plan_generation else own
    return replace(
        base,
        dead_ranks=own.dead_ranks | newest.dead_ranks,
        suspect_ranks=newest.suspect_ranks or own.suspect_ranks,
        probe=max(own.probe, newest.probe),
        term=max(own.term, newest.term),
    )
