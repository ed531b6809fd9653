"""Data source of `pacekeeper top`: one channel, reopened after an error."""

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from pacekeeper.cli.common.client import call, open_channel
from pacekeeper.cli.operate import overrides, proposals
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.incidents.operator_orders import OrderKind
from pacekeeper.protos import status_pb2, status_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Answers of one refresh: all jobs and orders, incidents and throughput of one job."""

    jobs: tuple[Any, ...]
    incidents: tuple[Any, ...] = ()
    pace: Any = None
    orders: tuple[Any, ...] = ()


class ControllerSource:
    """Queries and acts for the screen; thread-safe. Methods raise as `client.open_channel`."""

    def __init__(self, client: ClientConfig) -> None:
        self._client = client
        self._stack: ExitStack | None = None
        self._stub: Any = None
        self._lock = threading.Lock()

    def fetch(self, job: str) -> Snapshot:
        """Query all jobs, and incidents and throughput of `job` (default: the first job)."""
        jobs = tuple(self._query("ListJobs", status_pb2.ListJobsRequest()).jobs)
        orders = tuple(self._query("ListOrders", status_pb2.ListOrdersRequest()).orders)
        names = [one.name for one in jobs]
        name = job if job in names else names[0] if names else ""
        if not name:
            return Snapshot(jobs=jobs, orders=orders)
        answer = self._query("ListIncidents", status_pb2.ListIncidentsRequest(job=name))
        pace = self._query("GetPace", status_pb2.GetPaceRequest(job=name)).pace
        return Snapshot(jobs=jobs, incidents=tuple(answer.incidents), pace=pace, orders=orders)

    def explain(self, incident_id: int) -> Any:
        """Query the explanation of an incident."""
        request = status_pb2.GetExplanationRequest(incident_id=incident_id)
        return self._query("GetExplanation", request).explanation

    def answer(self, proposal_id: int, *, is_approved: bool) -> str:
        """Approve or deny a proposal; return the resulting state as text."""
        user = proposals.current_user()
        if is_approved:
            proposal = proposals.approve_proposal(self._client, proposal_id, user)
        else:
            proposal = proposals.deny_proposal(self._client, proposal_id, user, "")
        return f"proposal {proposal_id} is {proposal.answer}"

    def order(self, kind: OrderKind, subject: str, *, is_on: bool) -> str:
        """Give or cancel an order; return it as text."""
        given = overrides.set_order(self._client, kind, subject, is_on=is_on, operator="")
        return overrides.order_text(given, is_on=is_on)

    def close(self) -> None:
        """Close the channel."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _query(self, name: str, request: Any) -> Any:
        with self._lock:
            if self._stack is None:
                stack = ExitStack()
                channel = stack.enter_context(open_channel(self._client))
                self._stub, self._stack = status_pb2_grpc.StatusServiceStub(channel), stack
            try:
                return call(getattr(self._stub, name), request)
            except grpc.RpcError as error:
                stack, self._stack = self._stack, None
                stack.__exit__(
                    type(error), error, error.__traceback__
                )  # raises the error class of the status
                raise
