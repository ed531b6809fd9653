"""What people may do, whichever way they come: their word becomes an event, and what came of it an
answer.

It decides nothing: the machine does, and a refusal says what the machine found.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.controller.mitigation import overrides
from pacekeeper.controller.mitigation.approvals import found
from pacekeeper.controller.state.events import Event, OrderGiven, ProposalAnswered
from pacekeeper.controller.state.state import State
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.text import one_line


class RejectReason(StrEnum):
    """Why something was not done."""

    UNKNOWN = "unknown"  # nobody knows what it names
    OVER = "over"  # answered already, expired or stale
    FAILED = "failed"  # our mistake: the log says which


class ActionRejectedError(Exception):
    """Nothing was done; the text says why."""

    def __init__(self, why: RejectReason, text: str) -> None:
        super().__init__(text)
        self.why = why


@dataclass(kw_only=True)
class OperatorActions:
    """`state` gives the newest state; `put` returns when an event is stored."""

    state: Callable[[], State]
    put: Callable[[Event], Awaitable[None]]

    async def answer(
        self, number: int, *, is_approved: bool, said_by: str, caller: str, reason: str = ""
    ) -> Proposal:
        """Approve or deny a proposal that waits; it as it is then. Raises RefusedError."""
        before = found(self.state(), number)
        if before is None:
            open_now = (job.plan.open_proposal for job in self.state().jobs.values())
            waiting = sorted(proposal.proposal_id for proposal in open_now if proposal is not None)
            known = ", ".join(map(str, waiting)) or "none"
            raise ActionRejectedError(
                RejectReason.UNKNOWN, f"no proposal {number}; open are: {known}"
            )
        who = f"{one_line(said_by).strip() or 'somebody'} ({caller})"
        if before.answer is ProposalState.WAITING:
            await self.put(
                ProposalAnswered(
                    proposal_id=number,
                    is_approved=is_approved,
                    said_by=who,
                    reason="" if is_approved else one_line(reason).strip(),
                )
            )
        after = found(self.state(), number) or before
        # It may have been priced again by now.
        meant = (
            (ProposalState.APPROVED, ProposalState.OFFERED)
            if is_approved
            else (ProposalState.DENIED,)
        )
        if after.answer is ProposalState.WAITING:
            raise ActionRejectedError(RejectReason.FAILED, _UNHEARD)
        if after.said_by != who or after.answer not in meant:
            raise ActionRejectedError(RejectReason.OVER, _why_not(after))
        return after

    async def order(
        self,
        kind: OrderKind,
        subject: str,
        *,
        is_on: bool,
        said_by: str,
        caller: str,
        reason: str = "",
    ) -> OperatorOrder:
        """Give an order or take it back; it as it stands, or stood. Raises RefusedError."""
        before = overrides.found(self.state(), kind, subject)
        if is_on and before is None and (why := overrides.why_unknown(self.state(), kind, subject)):
            raise ActionRejectedError(RejectReason.UNKNOWN, why)
        if not is_on and before is None:
            raise ActionRejectedError(
                RejectReason.UNKNOWN, f"no order {kind} of {subject or 'everything'} stands"
            )
        who = f"{one_line(said_by).strip() or 'somebody'} ({caller})"
        await self.put(
            OrderGiven(
                kind=kind,
                subject=subject,
                is_on=is_on,
                said_by=who,
                reason=one_line(reason).strip(),
            )
        )
        after = overrides.found(self.state(), kind, subject)
        if (after is not None) != is_on:
            raise ActionRejectedError(RejectReason.FAILED, _UNHEARD)
        order = after or before
        assert order is not None, "one of both stands"
        return order


def _why_not(proposal: Proposal) -> str:
    by = f" by {proposal.said_by}" if proposal.said_by else ""
    note = f": {proposal.note}" if proposal.note else ""
    return f"proposal {proposal.proposal_id} is {proposal.answer}{by}{note}"


_UNHEARD = "it was not taken in: the controller's log says why"
