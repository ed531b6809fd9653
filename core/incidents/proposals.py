"""Plans that wait for an operator's approval, with their state."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.core.incidents.findings import Decision
from pacekeeper.core.layout.layout import Layout


class ProposalState(StrEnum):
    """The state of a proposal; only the first two may still change."""

    WAITING = "waiting"  # for a person
    APPROVED = "approved"  # and not offered yet: it is priced again first
    OFFERED = "offered"  # to the ranks, once
    DENIED = "denied"
    EXPIRED = "expired"  # not answered in time, or too late to be offered
    STALE = "stale"  # what it was made for is over, or it pays no more

    @property
    def is_final(self) -> bool:
        return self not in (ProposalState.WAITING, ProposalState.APPROVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A decision on the layout `base` that is offered only if an operator approves it in time.

    Attributes:
        slow: rank -> slowdown that it was made for.
        incident_ids: the open incidents that it answers.
        operator: who approved or denied it, as given and as authenticated; empty: no answer.
        note: why it was denied or has ended.

    Raises:
        ValueError: the decision has no layout.
    """

    proposal_id: int
    job: str
    decision: Decision
    base: Layout
    slow: Mapping[int, float]
    incident_ids: tuple[int, ...]
    made_unix_s: float
    expires_unix_s: float
    answer: ProposalState = ProposalState.WAITING
    operator: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.decision.layout is None:
            raise ValueError("a proposal is of a plan")

    @property
    def plan(self) -> Layout:
        """The proposed layout."""
        assert self.decision.layout is not None, "checked when it was made"
        return self.decision.layout

    @property
    def is_open(self) -> bool:
        """Whether it may still be offered."""
        return not self.answer.is_final
