"""The status service: answers from the immutable state, and streams what changes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.events import StepSummary
from pacekeeper.controller.state import JobState, State
from pacekeeper.controller.views import incident_view, job_view, node_view, step_view
from pacekeeper.core.findings import Incident
from pacekeeper.core.layout import Layout
from pacekeeper.core.layout_codec import encode_layout
from pacekeeper.protos import status_pb2, status_pb2_grpc

WATCH_QUEUE = 1024  # per watcher; a slow one loses the oldest, it never stalls the controller

Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


@dataclass(kw_only=True)
class Status(status_pb2_grpc.StatusServiceServicer):
    """The servicer. `state` gives the newest state, `past_layout` a stored layout."""

    state: Callable[[], State]
    past_layout: Callable[[str, int], tuple[Layout, str] | None]
    _step_watchers: dict[asyncio.Queue[StepSummary], str] = field(default_factory=dict)
    _incident_watchers: dict[asyncio.Queue[Incident], str] = field(default_factory=dict)

    def publish_step(self, summary: StepSummary) -> None:
        """Tell those who watch steps."""
        _publish(self._step_watchers, summary.job, summary)

    def publish_incident(self, incident: Incident) -> None:
        """Tell those who watch incidents."""
        _publish(self._incident_watchers, incident.job, incident)

    async def ListJobs(self, request: Any, context: Context) -> Any:
        """All jobs, by name."""
        jobs = self.state().jobs
        return status_pb2.ListJobsResponse(jobs=[job_view(jobs[name]) for name in sorted(jobs)])

    async def GetJob(self, request: Any, context: Context) -> Any:
        """One job."""
        return status_pb2.GetJobResponse(job=job_view(await self._job(request.job, context)))

    async def ListNodes(self, request: Any, context: Context) -> Any:
        """All nodes, by name."""
        state = self.state()
        nodes = [node_view(state, state.nodes[name]) for name in sorted(state.nodes)]
        return status_pb2.ListNodesResponse(nodes=nodes)

    async def ListIncidents(self, request: Any, context: Context) -> Any:
        """Incidents by number, of one job or of all."""
        state = self.state()
        incidents = [
            incident_view(state, incident)
            for incident in _incidents(state, request.job)
            if incident.is_open or not request.open_only
        ]
        return status_pb2.ListIncidentsResponse(incidents=incidents)

    async def WatchIncidents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """All known incidents, then every change."""
        queue: asyncio.Queue[Incident] = asyncio.Queue(WATCH_QUEUE)
        self._incident_watchers[queue] = request.job
        try:
            for incident in _incidents(self.state(), request.job):
                view = incident_view(self.state(), incident)
                yield status_pb2.WatchIncidentsResponse(incident=view)
            while True:
                view = incident_view(self.state(), await queue.get())
                yield status_pb2.WatchIncidentsResponse(incident=view)
        finally:
            del self._incident_watchers[queue]

    async def WatchSteps(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Every complete step from now on."""
        queue: asyncio.Queue[StepSummary] = asyncio.Queue(WATCH_QUEUE)
        self._step_watchers[queue] = request.job
        try:
            while True:
                yield step_view(await queue.get())
        finally:
            del self._step_watchers[queue]

    async def GetLayout(self, request: Any, context: Context) -> Any:
        """The layout in use (generation 0), or one of the past."""
        job = await self._job(request.job, context)
        found: tuple[Layout, str] | None = None
        present = job.layout
        if present is not None and request.generation in (0, present.generation):
            found = (present, job.layout_reason)
        elif request.generation:
            found = self.past_layout(request.job, request.generation)
        if found is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"job {job.name} has no layout of generation {request.generation}",
            )
        assert found is not None, "abort raises"
        layout, reason = found
        return status_pb2.GetLayoutResponse(
            generation=layout.generation, layout_json=encode_layout(layout), reason=reason
        )

    async def _job(self, name: str, context: Context) -> JobState:
        jobs = self.state().jobs
        if name not in jobs:
            known = ", ".join(sorted(jobs)) or "none yet"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no job {name!r}; there are: {known}")
        return jobs[name]


def _incidents(state: State, job: str) -> list[Incident]:
    found = [i for j in state.jobs.values() for i in j.incidents if job in ("", j.name)]
    return sorted(found, key=lambda incident: incident.incident_id)


def _publish(watchers: dict[asyncio.Queue[Any], str], job: str, value: object) -> None:
    for queue, wanted in watchers.items():
        if wanted in ("", job):
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(value)
