"""A plan that waits for a person's word: what it is, who said what, and how it ended. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.core.incidents.findings import Decision
from pacekeeper.core.layout.layout import Layout


class ProposalState(StrEnum):
    """What became of a proposal; only the first two may still change."""

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
    """A decision on the layout `base` that is offered if a person approves it in time, else never.

    `slow`: rank -> slowdown, as it was made for; `incident_ids`: the open incidents it answers.
    `said_by`: who approved or denied it, in their words, and who they are known to be; empty:
    nobody.
    `note`: why it was denied, or is over. Raises ValueError for a decision without a layout.
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
    said_by: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.decision.layout is None:
            raise ValueError("a proposal is of a plan")

    @property
    def plan(self) -> Layout:
        """The layout that is proposed."""
        assert self.decision.layout is not None, "checked when it was made"
        return self.decision.layout

    @property
    def is_open(self) -> bool:
        """May it still be offered?"""
        return not self.answer.is_final
