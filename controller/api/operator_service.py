"""The operator service: `OperatorActions` over gRPC."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.api.auth.interceptor import PRINCIPAL
from pacekeeper.controller.api.messages import order_view, proposal_view
from pacekeeper.controller.api.operator_actions import (
    ActionRejectedError,
    OperatorActions,
    RejectReason,
)
from pacekeeper.controller.state.events import Event
from pacekeeper.controller.state.state import State
from pacekeeper.core.incidents.operator_orders import OrderKind
from pacekeeper.protos import operator_pb2, operator_pb2_grpc

_CODES = {
    RejectReason.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    RejectReason.OVER: grpc.StatusCode.FAILED_PRECONDITION,
    RejectReason.FAILED: grpc.StatusCode.INTERNAL,
    RejectReason.STANDBY: grpc.StatusCode.UNAVAILABLE,
}
_KINDS: Mapping[int, OrderKind] = {
    operator_pb2.ORDER_KIND_CORDON_NODE: OrderKind.CORDON_NODE,
    operator_pb2.ORDER_KIND_CORDON_RANK: OrderKind.CORDON_RANK,
    operator_pb2.ORDER_KIND_PAUSE: OrderKind.PAUSE,
    operator_pb2.ORDER_KIND_DRY_RUN: OrderKind.DRY_RUN,
}
Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


@dataclass(kw_only=True)
class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """The gRPC servicer.

    Attributes:
        state: Returns the newest state.
        put: Stores an event and returns when it is stored.
    """

    state: Callable[[], State]
    put: Callable[[Event], Awaitable[None]]

    async def ApproveProposal(self, request: Any, context: Context) -> Any:
        """Approve a waiting proposal."""
        proposal = await self._answered(request, context, is_approved=True)
        return operator_pb2.ApproveProposalResponse(proposal=proposal_view(proposal))

    async def DenyProposal(self, request: Any, context: Context) -> Any:
        """Deny a waiting proposal."""
        proposal = await self._answered(request, context, is_approved=False)
        return operator_pb2.DenyProposalResponse(proposal=proposal_view(proposal))

    async def GiveOrder(self, request: Any, context: Context) -> Any:
        """Give or withdraw an order."""
        if request.kind not in _KINDS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"unknown kind of order {request.kind}"
            )
        try:
            order = await self._actions.order(
                _KINDS[request.kind],
                request.subject,
                is_on=request.is_on,
                operator=request.operator,
                caller=PRINCIPAL.get().name,
                reason=request.reason,
            )
        except ActionRejectedError as error:
            await context.abort(_CODES[error.reason], str(error))
            raise
        return operator_pb2.GiveOrderResponse(order=order_view(order))

    @property
    def _actions(self) -> OperatorActions:
        return OperatorActions(state=self.state, put=self.put)

    async def _answered(self, request: Any, context: Context, *, is_approved: bool) -> Any:
        try:
            return await self._actions.answer(
                request.proposal_id,
                is_approved=is_approved,
                operator=request.operator,
                caller=PRINCIPAL.get().name,
                reason="" if is_approved else request.reason,
            )
        except ActionRejectedError as error:
            await context.abort(_CODES[error.reason], str(error))
            raise
