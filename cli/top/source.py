"""What `pacekeeper top` shows and does: one channel that is made anew after trouble."""

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from pacekeeper.cli.common.client import ask, connected
from pacekeeper.cli.operate import overrides, proposals
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.incidents.operator_orders import OrderKind
from pacekeeper.protos import status_pb2, status_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What there is at one moment: all jobs, and of one its incidents and its pace."""

    jobs: tuple[Any, ...]
    incidents: tuple[Any, ...] = ()
    pace: Any = None
    orders: tuple[Any, ...] = ()


class Source:
    """Any thread may ask; one after the other. Everything raises as `client.connected` says."""

    def __init__(self, client: ClientConfig) -> None:
        self._client = client
        self._stack: ExitStack | None = None
        self._stub: Any = None
        self._lock = threading.Lock()

    def look(self, job: str) -> Shown:
        """All jobs; of this one (or else the first one) also what happened."""
        jobs = tuple(self._ask("ListJobs", status_pb2.ListJobsRequest()).jobs)
        orders = tuple(self._ask("ListOrders", status_pb2.ListOrdersRequest()).orders)
        names = [one.name for one in jobs]
        name = job if job in names else names[0] if names else ""
        if not name:
            return Shown(jobs=jobs, orders=orders)
        told = self._ask("ListIncidents", status_pb2.ListIncidentsRequest(job=name))
        pace = self._ask("GetPace", status_pb2.GetPaceRequest(job=name)).pace
        return Shown(jobs=jobs, incidents=tuple(told.incidents), pace=pace, orders=orders)

    def explain(self, incident_id: int) -> Any:
        """All that is kept of an incident."""
        request = status_pb2.GetExplanationRequest(incident_id=incident_id)
        return self._ask("GetExplanation", request).explanation

    def answer(self, proposal_id: int, *, is_approved: bool) -> str:
        """Approve or deny a proposal; what came of it."""
        who = proposals.who()
        if is_approved:
            proposal = proposals.approve(self._client, proposal_id, who)
        else:
            proposal = proposals.deny(self._client, proposal_id, who, "")
        return f"proposal {proposal_id} is {proposal.answer}"

    def order(self, kind: OrderKind, subject: str, *, is_on: bool) -> str:
        """Give an order or take it back; what stands now."""
        given = overrides.order(self._client, kind, subject, is_on=is_on, said_by="")
        return (
            overrides.order_line(given) if is_on else f"taken back: {overrides.order_line(given)}"
        )

    def close(self) -> None:
        """Nothing more is asked."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _ask(self, name: str, request: Any) -> Any:
        with self._lock:
            if self._stack is None:
                stack = ExitStack()
                channel = stack.enter_context(connected(self._client))
                self._stub, self._stack = status_pb2_grpc.StatusServiceStub(channel), stack
            try:
                return ask(getattr(self._stub, name), request)
            except grpc.RpcError as error:
                stack, self._stack = self._stack, None
                stack.__exit__(type(error), error, error.__traceback__)  # says it in our words
                raise
