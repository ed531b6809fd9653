"""The JSON endpoints that the web page's scripts draw from. They change nothing."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from pacekeeper.controller.api.operator_actions import ActionRejectedError, RejectReason
from pacekeeper.controller.api.web import queries
from pacekeeper.controller.api.web.auth import Visitor
from pacekeeper.controller.api.web.pages import Ask, SharedValues, explanation, job_name
from pacekeeper.controller.api.web.responses import json_response
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.state import State
from pacekeeper.core.layout.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEndpoints:
    """Data of the fleet, of a job, its layout, and an incident."""

    state: Callable[[], State]
    history: TimelineWriter
    ask: Ask
    shared: SharedValues
    past_layout: Callable[[str, int], tuple[Layout, str] | None]

    async def fleet(self, request: Request, visitor: Visitor) -> Response:
        """Every rank of every job."""
        return Response(await self.shared.get("fleet", _fleet_json), media_type="application/json")

    async def job(self, request: Request, visitor: Visitor) -> Response:
        """The timeline and the incidents of a job."""
        name = job_name(self.state(), request)
        rows = await self.ask(self.history.job_timeline, name)
        return json_response(queries.job(self.state(), rows, name))

    async def layout(self, request: Request, visitor: Visitor) -> Response:
        """A layout of a job: the present one, or that of `?generation=`."""
        name = job_name(self.state(), request)
        job = self.state().jobs[name]
        text = request.query_params.get("generation", "")
        wanted = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
        found: tuple[Layout, str] | None = None
        if job.layouts.current is not None and wanted in (0, job.layouts.current.generation):
            found = job.layouts.current, job.layouts.reason
        elif wanted:
            found = await self.ask(self.past_layout, name, wanted)
        if found is None:
            which = f"layout of generation {wanted}" if wanted else "layout"
            raise ActionRejectedError(RejectReason.UNKNOWN, f"job {name} has no {which}")
        return json_response(queries.layout(*found, self.state(), name))

    async def incident(self, request: Request, visitor: Visitor) -> Response:
        """The explanation of an incident."""
        return json_response(await explanation(self.state(), self.history, self.ask, request))


def _fleet_json(state: State) -> bytes:
    return json.dumps(queries.fleet(state), separators=(",", ":"), allow_nan=False).encode()
