"""Orders of operators that stand until they are revoked: cordons, pauses, a dry run."""

from dataclasses import dataclass
from enum import StrEnum


class OrderKind(StrEnum):
    """The kinds of orders; each has a subject of its own form."""

    CORDON_NODE = "cordon_node"  # a node by its name: its ranks are to have no work
    CORDON_RANK = "cordon_rank"  # JOB/RANK: the same of one rank, in this run of the job
    PAUSE = "pause"  # a job: findings go on, plans are not made
    DRY_RUN = "dry_run"  # everything: plans are made and told, and none is offered


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOrder:
    """One order.

    `operator`: the operator, as given and as authenticated; `run_id`: of the job whose rank is the
    subject, 0 otherwise.
    """

    kind: OrderKind
    subject: str
    operator: str
    reason: str
    since_unix_s: float
    run_id: int = 0

    @property
    def text(self) -> str:
        """The operator and the reason, for display."""
        why = f": {self.reason}" if self.reason else ""
        return f"by {self.operator}{why}"


def rank_subject(job: str, rank: int) -> str:
    """The subject of an order about one rank."""
    return f"{job}/{rank}"


def parse_rank_subject(subject: str) -> tuple[str, int] | None:
    """(job, rank) of JOB/RANK, or None for any other text."""
    job, _, rank = subject.rpartition("/")
    is_rank = bool(job) and rank.isascii() and rank.isdigit() and len(rank) < 10
    return (job, int(rank)) if is_rank else None
