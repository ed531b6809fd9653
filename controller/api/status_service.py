"""The status service: answers from the immutable state, and streams changes to watchers.

Readers cannot slow the controller down: a watcher that does not keep up loses the oldest changes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from pacekeeper.controller.api.messages import (
    explanation_view,
    gone_nodes,
    incident_view,
    job_timeline_view,
    job_view,
    node_views,
    order_view,
    proposal_view,
    step_view,
)
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.events import StepSummary
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store_thread import call_here
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.findings import Incident
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.protos import status_pb2, status_pb2_grpc

WATCH_QUEUE = 1024  # changes per watcher; a slow one loses the oldest

T = TypeVar("T")
Watchers = dict[asyncio.Queue[T | None], str]
"""Each watcher's queue and the job it watches (empty: all); None ends the watch."""

Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


@dataclass(kw_only=True)
class StatusService(status_pb2_grpc.StatusServiceServicer):
    """The gRPC servicer.

    Attributes:
        state: Returns the newest state.
        past_layout: Returns a stored layout of a job and generation with its reason.
        history: Explanations of incidents and timelines of jobs.
        ask: Calls a function in the thread of the store.
    """

    state: Callable[[], State]
    past_layout: Callable[[str, int], tuple[Layout, str] | None]
    history: TimelineWriter | None = None
    ask: Callable[..., Awaitable[Any]] = call_here
    _step_watchers: Watchers[StepSummary] = field(default_factory=dict)
    _incident_watchers: Watchers[Incident] = field(default_factory=dict)

    def publish_step(self, summary: StepSummary) -> None:
        """Send a step to its watchers."""
        _publish(self._step_watchers, summary.job, summary)

    def publish_incident(self, incident: Incident) -> None:
        """Send an incident to its watchers."""
        _publish(self._incident_watchers, incident.job, incident)

    def end_all(self) -> None:
        """End all watches, because the service is shutting down."""
        for steps in self._step_watchers:
            _put(steps, None)
        for incidents in self._incident_watchers:
            _put(incidents, None)

    async def ListJobs(self, request: Any, context: Context) -> Any:
        """All jobs, by name."""
        state = self.state()
        jobs = [job_view(state, state.jobs[name]) for name in sorted(state.jobs)]
        return status_pb2.ListJobsResponse(jobs=jobs)

    async def GetJob(self, request: Any, context: Context) -> Any:
        """One job."""
        job = await self._job(request.job, context)
        return status_pb2.GetJobResponse(job=job_view(self.state(), job))

    async def ListNodes(self, request: Any, context: Context) -> Any:
        """All nodes, by name."""
        state = self.state()
        nodes = [state.nodes[name] for name in sorted(state.nodes)]
        if request.include_removed:
            nodes += gone_nodes(state)
        return status_pb2.ListNodesResponse(nodes=node_views(state, nodes))

    async def ListIncidents(self, request: Any, context: Context) -> Any:
        """Incidents by number, of one job or of all."""
        if request.job:
            await self._job(
                request.job, context
            )  # a misspelt name must not look like a job without incidents
        state = self.state()
        incidents = [
            incident_view(state, incident)
            for incident in _incidents(state, request.job)
            if incident.is_open or not request.open_only
        ]
        return status_pb2.ListIncidentsResponse(incidents=incidents)

    async def ListProposals(self, request: Any, context: Context) -> Any:
        """The newest proposals by number, of one job or of all."""
        if request.job:
            await self._job(request.job, context)
        found = [
            proposal
            for job in self.state().jobs.values()
            for proposal in job.plan.proposals
            if request.job in ("", job.name) and (proposal.is_open or not request.open_only)
        ]
        found.sort(key=lambda proposal: proposal.proposal_id)
        return status_pb2.ListProposalsResponse(proposals=map(proposal_view, found))

    async def WatchIncidents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """All known incidents, then every change."""
        queue: asyncio.Queue[Incident | None] = asyncio.Queue(WATCH_QUEUE)
        self._incident_watchers[queue] = (
            request.job
        )  # before the known ones are sent, so that no change is missed
        try:
            for incident in _incidents(self.state(), request.job):
                view = incident_view(self.state(), incident)
                yield status_pb2.WatchIncidentsResponse(incident=view)
            while (change := await queue.get()) is not None:
                view = incident_view(self.state(), change)
                yield status_pb2.WatchIncidentsResponse(incident=view)
            await _abort_watch(context)
        finally:
            del self._incident_watchers[queue]

    async def WatchSteps(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Every complete step from now on."""
        queue: asyncio.Queue[StepSummary | None] = asyncio.Queue(WATCH_QUEUE)
        self._step_watchers[queue] = request.job
        try:
            while (summary := await queue.get()) is not None:
                yield step_view(summary)
            await _abort_watch(context)
        finally:
            del self._step_watchers[queue]

    async def GetLayout(self, request: Any, context: Context) -> Any:
        """The layout in use (generation 0), or one of the past."""
        job = await self._job(request.job, context)
        found: tuple[Layout, str] | None = None
        present = job.layouts.current
        if present is not None and request.generation in (0, present.generation):
            found = (present, job.layouts.reason)
        elif request.generation:
            found = await self._read(context, self.past_layout, request.job, request.generation)
        if found is None:
            which = f"layout of generation {request.generation}" if request.generation else "layout"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"job {job.name} has no {which}")
        assert found is not None, "abort raises"
        layout, reason = found
        return status_pb2.GetLayoutResponse(
            generation=layout.generation, layout_json=encode_layout(layout), reason=reason
        )

    async def GetExplanation(self, request: Any, context: Context) -> Any:
        """The explanation of an incident."""
        assert self.history is not None, "a serving controller has one"
        found = await self._read(context, self.history.explain, self.state(), request.incident_id)
        if found is None:
            what = f"unknown incident {request.incident_id}"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{what}; see `pacekeeper incidents`")
        assert found is not None, "abort raises"
        view = explanation_view(self.state(), found)
        return status_pb2.GetExplanationResponse(explanation=view)

    async def GetPace(self, request: Any, context: Context) -> Any:
        """The timeline of a job."""
        assert self.history is not None, "a serving controller has one"
        job = await self._job(request.job, context)
        rows = await self._read(context, self.history.job_timeline, job.name)
        return status_pb2.GetPaceResponse(pace=job_timeline_view(rows))

    async def ListOrders(self, request: Any, context: Context) -> Any:
        """The operator orders in effect."""
        orders = [order_view(order) for order in self.state().orders]
        return status_pb2.ListOrdersResponse(orders=orders)

    async def _job(self, name: str, context: Context) -> JobState:
        jobs = self.state().jobs
        if name not in jobs:
            known = ", ".join(sorted(jobs)) or "none yet"
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"unknown job {name!r}; known jobs: {known}"
            )
        return jobs[name]

    async def _read(self, context: Context, question: Callable[..., T], *values: Any) -> T:
        """Read from the store; damage ends this call with DATA_LOSS, and nothing else."""
        try:
            found: T = await self.ask(question, *values)
            return found
        except HostError as error:
            code = grpc.StatusCode.DATA_LOSS
            if not isinstance(error, DamagedError):
                code = grpc.StatusCode.UNAVAILABLE
            await context.abort(code, str(error))
            raise AssertionError("abort raises") from None


def _incidents(state: State, job: str) -> list[Incident]:
    found = [i for j in state.jobs.values() for i in j.incidents if job in ("", j.name)]
    return sorted(found, key=lambda incident: incident.incident_id)


async def _abort_watch(context: Context) -> None:
    """End a watch with UNAVAILABLE, so that the watcher knows that changes are no longer sent."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the controller is shutting down")


def _publish(watchers: Watchers[T], job: str, value: T) -> None:
    for queue, wanted in watchers.items():
        if wanted in ("", job):
            _put(queue, value)


def _put(queue: asyncio.Queue[T | None], value: T | None) -> None:
    while queue.full():
        queue.get_nowait()
    queue.put_nowait(value)
