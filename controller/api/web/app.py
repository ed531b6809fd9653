"""The web page: routes to pages, parts of pages, data for scripts, and acts. Decides nothing.

Everything shown is a message of the status service; everything done goes by the desk. No other
origin is ever asked for anything, and the browser is told so (`HEADERS`).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from pacekeeper.controller.api.auth.rbac import Action
from pacekeeper.controller.api.messages import explanation_view
from pacekeeper.controller.api.node_sorting import fleet_summary, worst_first
from pacekeeper.controller.api.operator_actions import (
    ActionRejectedError,
    OperatorActions,
    RejectReason,
)
from pacekeeper.controller.api.web import queries
from pacekeeper.controller.api.web.actions import ActionEndpoints
from pacekeeper.controller.api.web.auth import (
    DeniedError,
    Visitor,
    WebAuthenticator,
    redirect,
)
from pacekeeper.controller.api.web.filters import FILTERS
from pacekeeper.controller.api.web.queries import TableQuery
from pacekeeper.controller.api.web.responses import (
    ASKED_FOR,
    FOR_A_YEAR,
    HEADERS,
    json_response,
    with_headers,
)
from pacekeeper.controller.observability.timeline_writer import History
from pacekeeper.controller.state.state import State
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.operator_orders import OperatorOrder
from pacekeeper.core.layout.layout import Layout
from pacekeeper.protos.convert.json import message_to_dict

HERE = Path(__file__).resolve().parent
FLEET_LIFE_S = 1.0  # what is drawn for all who look is made once
MOST_MADE = 64
SHOWN_RANKS = 64
_STATUS = {RejectReason.UNKNOWN: 404, RejectReason.OVER: 409, RejectReason.FAILED: 500}
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True, eq=False, kw_only=True)
class WebApp:
    """The application. `state`: the newest; `past_layout`: a stored layout of a job."""

    state: Callable[[], State]
    history: History
    desk: OperatorActions
    door: WebAuthenticator
    past_layout: Callable[[str, int], tuple[Layout, str] | None]
    is_secure: bool = False
    _pages: jinja2.Environment = field(init=False)
    _acts: ActionEndpoints = field(init=False)
    _made: dict[str, tuple[float, tuple[OperatorOrder, ...], Any]] = field(default_factory=dict)
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._pages = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "web_pages"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._pages.filters.update(FILTERS)
        self._acts = ActionEndpoints(desk=self.desk, door=self.door, page=self._page)

    def app(self) -> Any:
        """The ASGI application."""
        own = Starlette(routes=[*self._open_routes(), *self._routes()])
        return with_headers(own, {**HEADERS, **(FOR_A_YEAR if self.is_secure else {})})

    def _open_routes(self) -> list[BaseRoute]:
        files = StaticFiles(directory=HERE / "web_static")
        return [
            Mount("/static", app=with_headers(files, ASKED_FOR)),
            Route("/login", self._answered(self._acts.login), methods=["GET", "POST"]),
            Route("/logout", self._answered(self._acts.logout), methods=["POST"]),
        ]

    def _routes(self) -> list[BaseRoute]:
        pages = {
            "/": self._fleet_page,
            "/jobs/{job}": self._job_page,
            "/jobs/{job}/layout": self._layout_page,
            "/incidents": self._incidents_page,
            "/incidents/{number:int}": self._incident_page,
            "/nodes": self._nodes_page,
            "/nodes/{node:path}": self._node_page,
            "/strikes": self._strikes_page,
            "/part/fleet": self._fleet_part,
            "/part/jobs/{job}": self._job_part,
            "/part/jobs/{job}/head": self._job_head,
            "/part/incidents": self._incidents_part,
            "/part/nodes": self._nodes_part,
            "/part/strikes": self._strikes_part,
            "/data/fleet": self._fleet_data,
            "/data/jobs/{job}": self._job_data,
            "/data/jobs/{job}/layout": self._layout_data,
            "/data/incidents/{number:int}": self._incident_data,
        }
        acts = {"/act/answer": self._acts.answer, "/act/order": self._acts.order}
        return [
            *(Route(path, self._read(page), methods=["GET"]) for path, page in pages.items()),
            *(Route(path, self._answered(act), methods=["POST"]) for path, act in acts.items()),
        ]

    def _answered(self, endpoint: Endpoint) -> Endpoint:
        """What is denied or not there is answered in words, for people or for programs."""

        async def answer(request: Request) -> Response:
            try:
                if not request.scope["query_string"].isascii():
                    raise DeniedError(400, "no address of ours")
                response = await endpoint(request)
            except DeniedError as error:
                response = redirect(error) or self._wrong(request, error.status, str(error))
            except ActionRejectedError as error:
                response = self._wrong(request, _STATUS[error.why], str(error))
            except HostError as error:  # the store is damaged there
                response = self._wrong(request, _STATUS[RejectReason.FAILED], str(error))
            return response

        return answer

    def _read(self, page: Callable[[Request, Visitor], Awaitable[Response]]) -> Endpoint:
        async def read(request: Request) -> Response:
            visitor = self.door.enter(request, Action.READ)
            return self.door.keep(visitor, await page(request, visitor))

        return self._answered(read)

    def _wrong(self, request: Request, status: int, text: str) -> Response:
        is_page = "text/html" in request.headers.get("accept", "") and request.method == "GET"
        if not is_page:
            return json_response({"error": text}, status)
        return self._page("wrong.html", request, None, status=status, text=text)

    def _page(
        self, name: str, request: Request, visitor: Visitor | None, status: int = 200, **values: Any
    ) -> Response:
        session = None if visitor is None else visitor.session
        html = self._pages.get_template(name).render(
            path=request.scope["path"],
            status=status,
            caller="" if visitor is None else visitor.caller.name,
            may_act=visitor is not None and visitor.may_act,
            asks=self.door.asks,
            secret="" if session is None else session.secret,
            orders=[] if visitor is None else self._orders(),
            now_unix_s=time.time(),
            **values,
        )
        return HTMLResponse(html, status_code=status)

    def _orders(self) -> list[dict[str, Any]]:
        return [
            {"kind": o.kind.value, "subject": o.subject, "text": o.text}
            for o in self.state().orders
        ]

    # Pages and their parts.

    async def _fleet_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("fleet.html", request, visitor, **await self._fleet_values())

    async def _fleet_part(self, request: Request, visitor: Visitor) -> Response:
        return self._page("fleet_part.html", request, visitor, **await self._fleet_values())

    async def _fleet_values(self) -> dict[str, Any]:
        state = self.state()
        return {
            "jobs": await self._once("jobs", queries.jobs_of),
            "incidents": queries.incidents_of(state, TableQuery(open_only=True)),
            "num_nodes": len(state.nodes),
            "num_away": sum(not node.is_connected for node in state.nodes.values()),
        }

    async def _once(self, what: str, make: Callable[[State], Any]) -> Any:
        """What is costly is made once for all who look in the same second, beside the loop: of a
        value that nobody changes. Who has just given an order sees it.
        """
        async with self._making:
            state = self.state()
            made_s, orders, value = self._made.get(what, (-FLEET_LIFE_S, (), None))
            if time.monotonic() - made_s >= FLEET_LIFE_S or orders != state.orders:
                if len(self._made) >= MOST_MADE:
                    self._made.clear()
                value = await asyncio.to_thread(make, state)
                self._made[what] = time.monotonic(), state.orders, value
        return value

    async def _job_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("job.html", request, visitor, **await self._job_values(request))

    async def _job_head(self, request: Request, visitor: Visitor) -> Response:
        return self._page("job_head.html", request, visitor, **await self._job_values(request))

    async def _job_part(self, request: Request, visitor: Visitor) -> Response:
        return self._page("job_part.html", request, visitor, **await self._job_values(request))

    async def _job_values(self, request: Request) -> dict[str, Any]:
        name = self._job(request)
        make = partial(queries.job_and_ranks, name=name, most=SHOWN_RANKS)
        job, ranks = await self._once(f"job {name}", make)
        if job is None:
            raise ActionRejectedError(RejectReason.UNKNOWN, f"job {name} is over")
        found = queries.incidents_of(self.state(), TableQuery(), job=name)
        return {"job": job, "ranks": ranks, "incidents": found}

    async def _layout_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("layout.html", request, visitor, job=self._job(request))

    async def _incidents_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("incidents.html", request, visitor, **self._incidents_values(request))

    async def _incidents_part(self, request: Request, visitor: Visitor) -> Response:
        values = self._incidents_values(request)
        return self._page("incidents_part.html", request, visitor, **values)

    def _incidents_values(self, request: Request) -> dict[str, Any]:
        return {"shown": queries.incidents_of(self.state(), TableQuery.of(request.query_params))}

    async def _incident_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("incident.html", request, visitor, told=self._explained(request))

    async def _nodes_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("nodes.html", request, visitor, **await self._nodes_values(request))

    async def _nodes_part(self, request: Request, visitor: Visitor) -> Response:
        return self._page("nodes_part.html", request, visitor, **await self._nodes_values(request))

    async def _nodes_values(self, request: Request) -> dict[str, Any]:
        nodes = [one for one in await self._nodes() if one.name in self.state().nodes]
        shown = queries.nodes_shown(
            queries.disconnected_first(nodes), TableQuery.of(request.query_params)
        )
        return {"shown": shown, "overview": fleet_summary(nodes)}

    async def _strikes_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("strikes.html", request, visitor, **await self._strikes_values(request))

    async def _strikes_part(self, request: Request, visitor: Visitor) -> Response:
        values = await self._strikes_values(request)
        return self._page("strikes_part.html", request, visitor, **values)

    async def _strikes_values(self, request: Request) -> dict[str, Any]:
        nodes = await self._nodes()
        found = worst_first(nodes, with_well=False)
        shown = queries.nodes_shown(found, TableQuery.of(request.query_params))
        return {"shown": shown, "overview": fleet_summary(nodes)}

    async def _node_page(self, request: Request, visitor: Visitor) -> Response:
        name = str(request.path_params["node"])
        found = next((one for one in await self._nodes() if one.name == name), None)
        if found is None:
            raise ActionRejectedError(RejectReason.UNKNOWN, f"no node {name!r:.80}")
        node = queries.node_and_devices(found)
        return self._page("node.html", request, visitor, node=node)

    async def _nodes(self) -> list[Any]:
        """All nodes, those known for their past only among them."""
        found: list[Any] = await self._once("nodes", queries.nodes_of)
        return found

    # Data for scripts.

    async def _fleet_data(self, request: Request, visitor: Visitor) -> Response:
        return Response(await self._once("fleet", _fleet_json), media_type="application/json")

    async def _job_data(self, request: Request, visitor: Visitor) -> Response:
        return json_response(queries.job(self.state(), self.history, self._job(request)))

    async def _layout_data(self, request: Request, visitor: Visitor) -> Response:
        name = self._job(request)
        job = self.state().jobs[name]
        text = request.query_params.get("generation", "")
        wanted = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
        found: tuple[Layout, str] | None = None
        if job.layouts.current is not None and wanted in (0, job.layouts.current.generation):
            found = job.layouts.current, job.layouts.reason
        elif wanted:
            found = self.past_layout(name, wanted)
        if found is None:
            raise ActionRejectedError(
                RejectReason.UNKNOWN, f"job {name} has no layout {wanted or ''}".strip()
            )
        return json_response(queries.layout(*found, self.state(), name))

    async def _incident_data(self, request: Request, visitor: Visitor) -> Response:
        return json_response(self._explained(request))

    def _explained(self, request: Request) -> dict[str, Any]:
        number = int(request.path_params["number"])
        found = self.history.explain(self.state(), number) if number < 1 << 62 else None
        if found is None:
            raise ActionRejectedError(RejectReason.UNKNOWN, f"no incident {number}")
        return message_to_dict(explanation_view(self.state(), found))

    def _job(self, request: Request) -> str:
        name, jobs = str(request.path_params["job"]), self.state().jobs
        if name not in jobs:
            known = ", ".join(sorted(jobs)) or "none yet"
            raise ActionRejectedError(RejectReason.UNKNOWN, f"no job {name!r}; there are: {known}")
        return name


def _fleet_json(state: State) -> bytes:
    return json.dumps(queries.fleet(state), separators=(",", ":"), allow_nan=False).encode()
