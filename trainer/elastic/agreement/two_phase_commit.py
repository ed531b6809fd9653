"""When does a step count? The vote before a commit, and who commits after a failure. Pure.

Every step and every move is one transaction with a number, its ticket. A rank is in phase PRE while
its part is incomplete, in VOTE once its part is complete (all gradients summed, all blocks staged),
and commits when the vote came through; then it is in PRE of the next ticket. The vote needs a
message from every rank, so if anyone committed, everybody had reached VOTE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from pacekeeper.trainer.elastic.agreement.quorum import Count
from pacekeeper.trainer.plans.offers import PlanVote, agreed_generation


class Phase(IntEnum):
    PRE = 0
    VOTE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank is: it has committed all tickets below `ticket`."""

    ticket: Count
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One rank's word before a commit.

    `ready_generation` is the newest plan this rank has read and checked (0: none), `ready_crc`
    names its content; `ready_probe` is the newest probe it was asked for and has not run (0: none).
    `is_storing`: it still writes its part of a checkpoint. `is_awaited`: it knows of nodes that
    wait to join, which only the leader does. `is_copying`: its snapshot is still on its way.
    """

    ticket: int
    generation: int
    is_finite: bool
    is_stopping: bool
    ready_generation: int
    ready_crc: int
    ready_probe: int = 0
    is_storing: bool = False
    is_awaited: bool = False
    is_copying: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What all ranks conclude from the same votes, in rank order; the first is the leader's."""

    votes: tuple[Vote, ...]

    def __post_init__(self) -> None:
        same = {(vote.ticket, vote.generation) for vote in self.votes}
        assert len(same) == 1, f"ranks vote on different transactions: {sorted(same)}"

    @property
    def is_applied(self) -> bool:
        """Gradients are finite everywhere: all apply the update, or none."""
        return all(vote.is_finite for vote in self.votes)

    @property
    def is_stopping(self) -> bool:
        """Somebody was asked to end: all end after this step."""
        return any(vote.is_stopping for vote in self.votes)

    @property
    def is_storing(self) -> bool:
        """Somebody still writes a checkpoint: all leave out the next one, or none does."""
        return any(vote.is_storing for vote in self.votes)

    @property
    def is_copying(self) -> bool:
        """Somebody's snapshot is still on its way: all leave out the next one, or none does."""
        return any(vote.is_copying for vote in self.votes)

    @property
    def agreed_generation(self) -> int | None:
        """The leader's plan, if every rank has read and checked the same one."""
        ready = [PlanVote(vote.ready_generation, vote.ready_crc) for vote in self.votes]
        return agreed_generation(ready, self.votes[0].generation)

    @property
    def opens(self) -> bool:
        """Nodes wait: all leave the group after this step, and form the next one with them."""
        return any(vote.is_awaited for vote in self.votes)

    @property
    def agreed_probe(self) -> int | None:
        """The probe that every rank was asked for and none has run."""
        wanted = {vote.ready_probe for vote in self.votes}
        return wanted.pop() if len(wanted) == 1 and wanted != {0} else None


def resolve(progress: Mapping[int, Progress]) -> frozenset[int]:
    """The survivors that must commit their open ticket before they go on; the others redo theirs.

    If anyone committed a ticket, those that are still voting on it commit, too: their part is
    complete. Otherwise nobody does, and all do the ticket again. Afterwards all ranks stand at the
    same ticket. Raises ValueError for reports no run of this protocol can give.
    """
    furthest = max(p.ticket for p in progress.values())
    behind = {rank for rank, p in progress.items() if p.ticket < furthest}
    for rank in behind:
        report = progress[rank]
        if report.ticket != furthest - 1 or report.phase is not Phase.VOTE:
            raise ValueError(
                f"rank {rank} is at ticket {report.ticket} ({report.phase.name}) while another "
                f"committed {furthest - 1}: a commit without everybody's vote"
            )
    return frozenset(behind)
