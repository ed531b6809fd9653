"""What the agent knows of one job here: its rings, its present life, who of it has ended."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pacekeeper.agent.rings.reader import RingReader
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import EXIT_UNKNOWN, RankExitRecord
from pacekeeper.core.telemetry.shm_ring import CommandSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedRing:
    """A ring read to its end and let go: which file it was, and whose."""

    inode: int
    ctime_ns: int
    attachment: Attachment


@dataclass(slots=True, kw_only=True)
class JobState:
    """One job: its rings, what its ranks should know, layout files already told.

    `life` is the newest one seen, `told` what this agent was told to say to it. Where lives have no
    number, `earlier_pids` and `earlier_layouts` belong to one before the present. `exits` are the
    ranks of the present life whose process has ended, `in_force` the newest generation they ran,
    `news_s` when they last had anything to say. `read` are rings let go of.
    """

    life: int = 0
    rings: dict[str, RingReader] = field(default_factory=dict)
    command: shm_ring.CommandSlot = field(default_factory=shm_ring.CommandSlot)
    layouts: dict[str, int] = field(default_factory=dict)  # file name -> mtime_ns
    previous_pids: frozenset[int] = frozenset()
    previous_layouts: dict[str, int] = field(default_factory=dict)
    exits: dict[tuple[int, int], RankExitRecord] = field(default_factory=dict)  # by rank and pid
    active_generation: int = 0
    last_record_s: float = 0.0
    drained: dict[str, DrainedRing] = field(default_factory=dict)
    stamps_ns: tuple[int | None, int | None] = (None, None)  # of the directory, at two looks

    @property
    def current_ranks(self) -> list[RingReader]:
        return [
            reader
            for reader in self.rings.values()
            if reader.is_rank and self.is_current(reader.attachment)
        ]

    @property
    def suspects(self) -> frozenset[int]:
        """Ranks of the present life here on which the controller has a finding."""
        return self.command.suspect_ranks & {r.attachment.rank for r in self.current_ranks}

    @property
    def has_ended(self) -> bool:
        """Has every rank that is here ended, by the supervisor's word or after it?

        Nothing else tells: a pid may be of another name space, and silence is no end.
        """
        ranks = [r.attachment for r in self.rings.values() if r.is_rank]
        return bool(self.rings and self.exits) and all((r.rank, r.pid) in self.exits for r in ranks)

    def orphans(self) -> list[RingReader]:
        """Ranks of the present life whose process has ended, and the one that watched them too.

        While a supervisor lives, its word is waited for: it knows how they ended. Where there is
        none, nobody could tell a death from a clean end.
        """
        supervisor = self.rings.get(shm_ring.SUPERVISOR_RING)
        if supervisor is None or supervisor.attachment.life != self.life:
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
        """The ends of `orphans` that the supervisor's last words, read meanwhile, do not tell."""
        ranks = [reader.attachment for reader in orphans]
        return [
            RankExitRecord(
                rank=a.rank, pid=a.pid, exit_code=EXIT_UNKNOWN, signal=0, detected_mono_s=now_s
            )
            for a in ranks
            if self.is_current(a) and (a.rank, a.pid) not in self.exits
        ]

    def is_current(self, attachment: Attachment) -> bool:
        """Is this one of the job's present life?"""
        return attachment.life == self.life and attachment.pid not in self.previous_pids

    def start_life(self, life: int) -> None:
        """The job was started again, under the same name: the dead of before are no one's dead."""
        attachments = [r.attachment for r in self.rings.values()]
        attachments += [r.attachment for r in self.drained.values()]
        self.previous_pids = frozenset(() if life else (a.pid for a in attachments))
        self.previous_layouts = {} if life else dict(self.layouts)
        self.life = life
        self.command = shm_ring.CommandSlot(life=life)
        self.exits, self.active_generation = {}, 0

    def apply_records(self, records: Iterable[object], now_s: float) -> None:
        """What the records of the present life say of its end and of the layout in force."""
        for record in records:
            self.last_record_s = now_s
            if isinstance(record, RankExitRecord):
                self.exits[record.rank, record.pid] = record
            else:
                self.active_generation = max(
                    self.active_generation, getattr(record, "generation", 0)
                )


def own_command(command: CommandSlot, life: int) -> CommandSlot:
    """What a ring of this life says already; words that were meant for another one are dropped."""
    is_meant = command.life in (0, life)
    return replace(command, life=life) if is_meant else CommandSlot(life=life)


def merge_commands(own: CommandSlot, command: CommandSlot) -> CommandSlot:
    """What a ring just opened must say: its own words, and what was told since."""
    own = own_command(own, command.life)
    newest = command if command.plan_generation else own
    return replace(
        newest,
        dead_ranks=own.dead_ranks | command.dead_ranks,
        suspect_ranks=command.suspect_ranks or own.suspect_ranks,
        probe=max(own.probe, command.probe),
        term=max(own.term, command.term),
    )
