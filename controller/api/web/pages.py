"""The HTML pages and their parts: each endpoint renders one template with values of the state.

A part is the piece of a page that htmx loads again while the page is open. Costly values are made
once per second for all readers (`SharedValues`). Nothing here changes the state.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from pacekeeper.controller.api.messages import explanation_view
from pacekeeper.controller.api.node_sorting import fleet_summary, worst_first
from pacekeeper.controller.api.operator_actions import ActionRejectedError, RejectReason
from pacekeeper.controller.api.staleness import Staleness
from pacekeeper.controller.api.web import queries
from pacekeeper.controller.api.web.auth import Visitor
from pacekeeper.controller.api.web.filters import FILTERS
from pacekeeper.controller.api.web.queries import TableQuery
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.state import State
from pacekeeper.core.incidents.operator_orders import OperatorOrder
from pacekeeper.protos.convert.plain import message_to_dict

SHARED_FOR_S = 1.0
MAX_SHARED = 64
SHOWN_RANKS = 64
Ask = Callable[..., Awaitable[Any]]
_TEMPLATES = Path(__file__).resolve().parent / "web_pages"


class PageRenderer:
    """Renders templates with the values that every page has."""

    def __init__(
        self,
        *,
        state: Callable[[], State],
        asks: bool,
        staleness: Callable[[], Staleness | None] = lambda: None,
    ) -> None:
        """Load the templates.

        Args:
            state: Returns the newest state.
            asks: Whether callers have to log in.
            staleness: Returns how old the state is; None: this controller leads.
        """
        self._state, self._asks, self._staleness = state, asks, staleness
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_TEMPLATES),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(FILTERS)

    def render(
        self, name: str, request: Request, visitor: Visitor | None, status: int = 200, **values: Any
    ) -> Response:
        """Render a template.

        Args:
            name: The template's file.
            request: The request that it answers.
            visitor: The caller; None before a login and for errors.
            status: HTTP status.
            **values: Variables of the template.
        """
        session = None if visitor is None else visitor.session
        stale = self._staleness()
        html = self._templates.get_template(name).render(
            path=request.scope["path"],
            status=status,
            caller="" if visitor is None else visitor.caller.name,
            may_act=visitor is not None and visitor.may_act and stale is None,
            notice="" if stale is None else stale.notice,
            asks=self._asks,
            secret="" if session is None else session.secret,
            orders=[] if visitor is None else self._orders(),
            now_unix_s=time.time(),
            **values,
        )
        return HTMLResponse(html, status_code=status)

    def _orders(self) -> list[dict[str, Any]]:
        return [
            {"kind": o.kind.value, "subject": o.subject, "text": o.text}
            for o in self._state().orders
        ]


@dataclass(slots=True, eq=False, kw_only=True)
class SharedValues:
    """Values that are computed at most once a second, in a thread, for all readers."""

    state: Callable[[], State]
    _found: dict[str, tuple[float, tuple[OperatorOrder, ...], Any]] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def get(self, name: str, compute: Callable[[State], Any]) -> Any:
        """The value of `compute(state)`; new orders of operators make it stale at once."""
        async with self._lock:
            state = self.state()
            computed_s, orders, value = self._found.get(name, (-SHARED_FOR_S, (), None))
            if time.monotonic() - computed_s >= SHARED_FOR_S or orders != state.orders:
                if len(self._found) >= MAX_SHARED:
                    self._found.clear()
                value = await asyncio.to_thread(compute, state)
                self._found[name] = time.monotonic(), state.orders, value
        return value


def job_name(state: State, request: Request) -> str:
    """The job in the path of a request. Raises ActionRejectedError for an unknown one."""
    name = str(request.path_params["job"])
    if name not in state.jobs:
        known = ", ".join(sorted(state.jobs)) or "none yet"
        text = f"unknown job {name!r}; known jobs: {known}"
        raise ActionRejectedError(RejectReason.UNKNOWN, text)
    return name


async def explanation(
    state: State, history: TimelineWriter, ask: Ask, request: Request
) -> dict[str, Any]:
    """The explanation of the incident in the path. Raises ActionRejectedError."""
    number = int(request.path_params["number"])
    found = await ask(history.explain, state, number) if number < 1 << 62 else None
    if found is None:
        raise ActionRejectedError(RejectReason.UNKNOWN, f"unknown incident {number}")
    return message_to_dict(explanation_view(state, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPages:
    """Pages of all jobs, of one job and of incidents."""

    state: Callable[[], State]
    history: TimelineWriter
    ask: Ask
    shared: SharedValues
    render: Callable[..., Response]

    async def fleet(self, request: Request, visitor: Visitor) -> Response:
        return self.render("fleet.html", request, visitor, **await self._fleet())

    async def fleet_part(self, request: Request, visitor: Visitor) -> Response:
        return self.render("fleet_part.html", request, visitor, **await self._fleet())

    async def job(self, request: Request, visitor: Visitor) -> Response:
        return self.render("job.html", request, visitor, **await self._job(request))

    async def job_head(self, request: Request, visitor: Visitor) -> Response:
        return self.render("job_head.html", request, visitor, **await self._job(request))

    async def job_part(self, request: Request, visitor: Visitor) -> Response:
        return self.render("job_part.html", request, visitor, **await self._job(request))

    async def layout(self, request: Request, visitor: Visitor) -> Response:
        return self.render("layout.html", request, visitor, job=job_name(self.state(), request))

    async def incidents(self, request: Request, visitor: Visitor) -> Response:
        return self.render("incidents.html", request, visitor, **await self._incidents(request))

    async def incidents_part(self, request: Request, visitor: Visitor) -> Response:
        found = await self._incidents(request)
        return self.render("incidents_part.html", request, visitor, **found)

    async def incident(self, request: Request, visitor: Visitor) -> Response:
        found = await explanation(self.state(), self.history, self.ask, request)
        return self.render("incident.html", request, visitor, explanation=found)

    async def _fleet(self) -> dict[str, Any]:
        state = self.state()
        return {
            "jobs": await self.shared.get("jobs", queries.jobs_of),
            "incidents": queries.incidents_of(state, TableQuery(open_only=True)),
            "num_nodes": len(state.nodes),
            "num_disconnected": sum(not node.is_connected for node in state.nodes.values()),
        }

    async def _job(self, request: Request) -> dict[str, Any]:
        name = job_name(self.state(), request)
        compute = partial(queries.job_and_ranks, name=name, most=SHOWN_RANKS)
        job, ranks = await self.shared.get(f"job {name}", compute)
        if job is None:
            raise ActionRejectedError(RejectReason.UNKNOWN, f"job {name} has ended")
        found = queries.incidents_of(self.state(), TableQuery(), job=name)
        return {"job": job, "ranks": ranks, "incidents": found}

    async def _incidents(self, request: Request) -> dict[str, Any]:
        query = TableQuery.of(request.query_params)
        return {"shown": await asyncio.to_thread(queries.incidents_of, self.state(), query)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePages:
    """Pages of nodes and of the history of their devices."""

    state: Callable[[], State]
    shared: SharedValues
    render: Callable[..., Response]

    async def nodes(self, request: Request, visitor: Visitor) -> Response:
        return self.render("nodes.html", request, visitor, **await self._nodes(request))

    async def nodes_part(self, request: Request, visitor: Visitor) -> Response:
        return self.render("nodes_part.html", request, visitor, **await self._nodes(request))

    async def strikes(self, request: Request, visitor: Visitor) -> Response:
        return self.render("strikes.html", request, visitor, **await self._strikes(request))

    async def strikes_part(self, request: Request, visitor: Visitor) -> Response:
        return self.render("strikes_part.html", request, visitor, **await self._strikes(request))

    async def node(self, request: Request, visitor: Visitor) -> Response:
        name = str(request.path_params["node"])
        found = next((one for one in await self._all() if one.name == name), None)
        if found is None:
            raise ActionRejectedError(RejectReason.UNKNOWN, f"unknown node {name!r:.80}")
        return self.render("node.html", request, visitor, node=queries.node_and_devices(found))

    async def _nodes(self, request: Request) -> dict[str, Any]:
        nodes = [one for one in await self._all() if one.name in self.state().nodes]
        query = TableQuery.of(request.query_params)
        shown = queries.nodes_shown(queries.disconnected_first(nodes), query)
        return {"shown": shown, "overview": fleet_summary(nodes)}

    async def _strikes(self, request: Request) -> dict[str, Any]:
        nodes = await self._all()
        query = TableQuery.of(request.query_params)
        shown = queries.nodes_shown(worst_first(nodes, with_well=False), query)
        return {"shown": shown, "overview": fleet_summary(nodes)}

    async def _all(self) -> list[Any]:
        """All nodes, also those that are known by their history only."""
        found: list[Any] = await self.shared.get("nodes", queries.nodes_of)
        return found
