"""Actions of operators, over gRPC and on the web page: each one becomes one event.

The state machine decides; the result or the rejection is read from the state afterwards.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.controller.mitigation import overrides
from pacekeeper.controller.mitigation.approvals import find_proposal
from pacekeeper.controller.state.events import Event, OrderGiven, ProposalAnswered
from pacekeeper.controller.state.state import State
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.text import one_line


class RejectReason(StrEnum):
    """Why an action was rejected."""

    UNKNOWN = "unknown"  # its object does not exist
    OVER = "over"  # the proposal is answered, expired or stale
    FAILED = "failed"  # an internal error, which is in the log
    STANDBY = "standby"  # another controller leads


class ActionRejectedError(Exception):
    """An action was rejected, with a code and a text for people."""

    def __init__(self, reason: RejectReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(kw_only=True)
class OperatorActions:
    """Executes actions of operators.

    Attributes:
        state: Returns the newest state.
        put: Stores an event and returns when it is stored.
    """

    state: Callable[[], State]
    put: Callable[[Event], Awaitable[None]]

    async def answer(
        self, number: int, *, is_approved: bool, operator: str, caller: str, reason: str = ""
    ) -> Proposal:
        """Approve or deny a waiting proposal.

        Args:
            number: The proposal.
            is_approved: Whether it is approved.
            operator: The operator's name, as given.
            caller: The authenticated principal.
            reason: Why it is denied.

        Returns:
            The proposal afterwards.

        Raises:
            ActionRejectedError: It is unknown, or was answered otherwise before.
        """
        before = find_proposal(self.state(), number)
        if before is None:
            open_now = (job.plan.open_proposal for job in self.state().jobs.values())
            waiting = sorted(proposal.proposal_id for proposal in open_now if proposal is not None)
            known = ", ".join(map(str, waiting)) or "none"
            raise ActionRejectedError(
                RejectReason.UNKNOWN, f"unknown proposal {number}; open proposals: {known}"
            )
        who = f"{one_line(operator).strip() or 'unnamed'} ({caller})"
        if before.answer is ProposalState.WAITING:
            await self.put(
                ProposalAnswered(
                    proposal_id=number,
                    is_approved=is_approved,
                    operator=who,
                    reason="" if is_approved else one_line(reason).strip(),
                )
            )
        after = find_proposal(self.state(), number) or before
        # The approval may already have led to an offer.
        meant = (
            (ProposalState.APPROVED, ProposalState.OFFERED)
            if is_approved
            else (ProposalState.DENIED,)
        )
        if after.answer is ProposalState.WAITING:
            raise ActionRejectedError(RejectReason.FAILED, _NOT_APPLIED)
        if after.operator != who or after.answer not in meant:
            raise ActionRejectedError(RejectReason.OVER, _outcome(after))
        return after

    async def order(
        self,
        kind: OrderKind,
        subject: str,
        *,
        is_on: bool,
        operator: str,
        caller: str,
        reason: str = "",
    ) -> OperatorOrder:
        """Give or withdraw an operator order.

        Args:
            kind: The kind of order.
            subject: Node, rank or job; empty for an order about everything.
            is_on: Whether it is given, and not withdrawn.
            operator: The operator's name, as given.
            caller: The authenticated principal.
            reason: Why it is given.

        Returns:
            The order as it is in effect, or was.

        Raises:
            ActionRejectedError: Its subject is unknown, or no such order is in effect.
        """
        before = overrides.find_order(self.state(), kind, subject)
        if is_on and before is None:
            why = overrides.subject_error(self.state(), kind, subject)
            if why is not None:
                raise ActionRejectedError(RejectReason.UNKNOWN, why)
        if not is_on and before is None:
            raise ActionRejectedError(
                RejectReason.UNKNOWN, f"no order {kind} for {subject or 'everything'} is in effect"
            )
        who = f"{one_line(operator).strip() or 'unnamed'} ({caller})"
        await self.put(
            OrderGiven(
                kind=kind,
                subject=subject,
                is_on=is_on,
                operator=who,
                reason=one_line(reason).strip(),
            )
        )
        after = overrides.find_order(self.state(), kind, subject)
        if (after is not None) != is_on:
            raise ActionRejectedError(RejectReason.FAILED, _NOT_APPLIED)
        order = after or before
        assert order is not None, "an order was given or withdrawn"
        return order


def _outcome(proposal: Proposal) -> str:
    by = f" by {proposal.operator}" if proposal.operator else ""
    note = f": {proposal.note}" if proposal.note else ""
    return f"proposal {proposal.proposal_id} is {proposal.answer}{by}{note}"


_NOT_APPLIED = "the controller did not apply it; its log has the error"
