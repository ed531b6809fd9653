"""The operator service: what people say of proposals becomes events; what came of it, an answer.

It decides nothing: the machine does, and the error says what the machine found.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.events import Event, ProposalAnswered
from pacekeeper.controller.gate import CALLER
from pacekeeper.controller.proposals import found
from pacekeeper.controller.state import State
from pacekeeper.controller.views import proposal_view
from pacekeeper.core.proposals import Answer, Proposal
from pacekeeper.protos import operator_pb2, operator_pb2_grpc

MOST_CHARACTERS = 500  # of a name or a reason

Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


@dataclass(kw_only=True)
class Operator(operator_pb2_grpc.OperatorServiceServicer):
    """The servicer. `state` gives the newest state; `put` returns when an event is stored."""

    state: Callable[[], State]
    put: Callable[[Event], Awaitable[None]]

    async def ApproveProposal(self, request: Any, context: Context) -> Any:
        """Approve a proposal that waits."""
        proposal = await self._answer(request, context, is_approved=True, reason="")
        return operator_pb2.ApproveProposalResponse(proposal=proposal_view(proposal))

    async def DenyProposal(self, request: Any, context: Context) -> Any:
        """Deny a proposal that waits."""
        proposal = await self._answer(
            request, context, is_approved=False, reason=_line(request.reason)
        )
        return operator_pb2.DenyProposalResponse(proposal=proposal_view(proposal))

    async def _answer(
        self, request: Any, context: Context, *, is_approved: bool, reason: str
    ) -> Proposal:
        number = request.proposal_id
        before = found(self.state(), number)
        if before is None:
            open_now = (job.open_proposal for job in self.state().jobs.values())
            waiting = sorted(proposal.proposal_id for proposal in open_now if proposal is not None)
            known = ", ".join(map(str, waiting)) or "none"
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no proposal {number}; open are: {known}"
            )
        assert before is not None, "abort raises"
        said_by = f"{_line(request.said_by) or 'somebody'} ({CALLER.get().name})"
        if before.answer is Answer.WAITING:
            await self.put(
                ProposalAnswered(
                    proposal_id=number, is_approved=is_approved, said_by=said_by, reason=reason
                )
            )
        after = found(self.state(), number) or before
        # It may have been priced again by now.
        meant = (Answer.APPROVED, Answer.OFFERED) if is_approved else (Answer.DENIED,)
        if after.answer is Answer.WAITING:
            await context.abort(
                grpc.StatusCode.INTERNAL,
                "the answer was not taken in: the controller's log says why",
            )
        if after.said_by != said_by or after.answer not in meant:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _why_not(after))
        return after


def _line(text: str) -> str:
    """One line of bounded length: it goes into logs and onto terminals."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_CHARACTERS]).strip()


def _why_not(proposal: Proposal) -> str:
    by = f" by {proposal.said_by}" if proposal.said_by else ""
    note = f": {proposal.note}" if proposal.note else ""
    return f"proposal {proposal.proposal_id} is {proposal.answer}{by}{note}"
