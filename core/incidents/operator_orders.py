"""What a person has ordered, until it is taken back: cordons, pauses, a dry run. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class OrderKind(StrEnum):
    """What may be ordered; each names its subject in another way."""

    CORDON_NODE = "cordon_node"  # a node by its name: its ranks are to have no work
    CORDON_RANK = "cordon_rank"  # JOB/RANK: the same of one rank, in this life of the job
    PAUSE = "pause"  # a job: findings go on, plans are not made
    DRY_RUN = "dry_run"  # everything: plans are made and told, and none is offered


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOrder:
    """`said_by`: who gave it, in their words, and who they are known to be; `life`: of the job
    whose rank it is about, 0 otherwise.
    """

    kind: OrderKind
    subject: str
    said_by: str
    reason: str
    since_unix_s: float
    life: int = 0

    @property
    def text(self) -> str:
        """For people: who ordered it, and why."""
        why = f": {self.reason}" if self.reason else ""
        return f"by {self.said_by}{why}"


def rank_subject(job: str, rank: int) -> str:
    """How an order names a rank."""
    return f"{job}/{rank}"


def parse_rank_subject(subject: str) -> tuple[str, int] | None:
    """(job, rank) of JOB/RANK; None where it is none."""
    job, _, rank = subject.rpartition("/")
    is_rank = bool(job) and rank.isascii() and rank.isdigit() and len(rank) < 10
    return (job, int(rank)) if is_rank else None
