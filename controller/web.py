"""The web page: routes to pages, parts of pages, data for scripts, and acts. Decides nothing.

Everything shown is a message of the status service; everything done goes by the desk. No other
origin is ever asked for anything, and the browser is told so (`HEADERS`).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from pacekeeper.controller import web_data
from pacekeeper.controller.access import Action
from pacekeeper.controller.course_views import explanation_view
from pacekeeper.controller.desk import Desk, RefusedError, Why
from pacekeeper.controller.history import History
from pacekeeper.controller.state import State
from pacekeeper.controller.web_door import (
    MOST_BODY_BYTES,
    DeniedError,
    Door,
    Visitor,
    redirect,
)
from pacekeeper.controller.web_words import FILTERS
from pacekeeper.core.layout import Layout
from pacekeeper.core.orders import OrderKind
from pacekeeper.protos.plain import as_dict

HERE = Path(__file__).resolve().parent
FLEET_LIFE_S = 1.0  # what is drawn for all who look is made once
MOST_MADE = 64
SHOWN_RANKS, SHOWN_INCIDENTS = 64, 100
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_STATUS = {Why.UNKNOWN: 404, Why.OVER: 409, Why.FAILED: 500}
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True, eq=False, kw_only=True)
class Web:
    """The application. `state`: the newest; `past_layout`: a stored layout of a job."""

    state: Callable[[], State]
    history: History
    desk: Desk
    door: Door
    past_layout: Callable[[str, int], tuple[Layout, str] | None]
    is_secure: bool = False
    _pages: jinja2.Environment = field(init=False)
    _made: dict[str, tuple[float, Any]] = field(default_factory=dict)
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

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(routes=[*self._open_routes(), *self._routes()])

    def _open_routes(self) -> list[BaseRoute]:
        files = StaticFiles(directory=HERE / "web_static")
        return [
            Mount("/static", app=_with_headers(files)),
            Route("/login", self._answered(self._login), methods=["GET", "POST"]),
            Route("/logout", self._answered(self._logout), methods=["POST"]),
        ]

    def _routes(self) -> list[BaseRoute]:
        pages = {
            "/": self._fleet_page,
            "/jobs/{job}": self._job_page,
            "/jobs/{job}/layout": self._layout_page,
            "/incidents": self._incidents_page,
            "/incidents/{number:int}": self._incident_page,
            "/nodes": self._nodes_page,
            "/part/fleet": self._fleet_part,
            "/part/jobs/{job}": self._job_part,
            "/part/jobs/{job}/head": self._job_head,
            "/part/incidents": self._incidents_part,
            "/part/nodes": self._nodes_part,
            "/data/fleet": self._fleet_data,
            "/data/jobs/{job}": self._job_data,
            "/data/jobs/{job}/layout": self._layout_data,
            "/data/incidents/{number:int}": self._incident_data,
        }
        acts = {"/act/answer": self._act_answer, "/act/order": self._act_order}
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
            except RefusedError as error:
                response = self._wrong(request, _STATUS[error.why], str(error))
            response.headers.update(HEADERS)
            if self.is_secure:
                response.headers["strict-transport-security"] = "max-age=31536000"
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
            return _json({"error": text}, status)
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
            "jobs": await self._once("jobs", web_data.jobs_of),
            "incidents": web_data.incidents_of(state, open_only=True)[:SHOWN_INCIDENTS],
            "num_nodes": len(state.nodes),
            "num_away": sum(not node.is_connected for node in state.nodes.values()),
        }

    async def _once(self, what: str, make: Callable[[State], Any]) -> Any:
        """What is costly is made once for all who look in the same second, beside the loop: of a
        value that nobody changes.
        """
        async with self._making:
            made_s, value = self._made.get(what, (-FLEET_LIFE_S, None))
            if time.monotonic() - made_s >= FLEET_LIFE_S:
                if len(self._made) >= MOST_MADE:
                    self._made.clear()
                value = await asyncio.to_thread(make, self.state())
                self._made[what] = time.monotonic(), value
        return value

    async def _job_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("job.html", request, visitor, **await self._job_values(request))

    async def _job_head(self, request: Request, visitor: Visitor) -> Response:
        return self._page("job_head.html", request, visitor, **await self._job_values(request))

    async def _job_part(self, request: Request, visitor: Visitor) -> Response:
        return self._page("job_part.html", request, visitor, **await self._job_values(request))

    async def _job_values(self, request: Request) -> dict[str, Any]:
        name = self._job(request)
        make = partial(web_data.job_and_ranks, name=name, most=SHOWN_RANKS)
        job, ranks = await self._once(f"job {name}", make)
        if job is None:
            raise RefusedError(Why.UNKNOWN, f"job {name} is over")
        found = web_data.incidents_of(self.state(), job=name)[:SHOWN_INCIDENTS]
        return {"job": job, "ranks": ranks, "incidents": found}

    async def _layout_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("layout.html", request, visitor, job=self._job(request))

    async def _incidents_page(self, request: Request, visitor: Visitor) -> Response:
        found = web_data.incidents_of(self.state())[:SHOWN_INCIDENTS]
        return self._page("incidents.html", request, visitor, incidents=found)

    async def _incidents_part(self, request: Request, visitor: Visitor) -> Response:
        found = web_data.incidents_of(self.state())[:SHOWN_INCIDENTS]
        return self._page("incidents_part.html", request, visitor, incidents=found)

    async def _incident_page(self, request: Request, visitor: Visitor) -> Response:
        return self._page("incident.html", request, visitor, told=self._explained(request))

    async def _nodes_page(self, request: Request, visitor: Visitor) -> Response:
        nodes = web_data.nodes_of(self.state())
        return self._page("nodes.html", request, visitor, nodes=nodes)

    async def _nodes_part(self, request: Request, visitor: Visitor) -> Response:
        nodes = web_data.nodes_of(self.state())
        return self._page("nodes_part.html", request, visitor, nodes=nodes)

    # Data for scripts.

    async def _fleet_data(self, request: Request, visitor: Visitor) -> Response:
        return Response(await self._once("fleet", _fleet_json), media_type="application/json")

    async def _job_data(self, request: Request, visitor: Visitor) -> Response:
        return _json(web_data.job(self.state(), self.history, self._job(request)))

    async def _layout_data(self, request: Request, visitor: Visitor) -> Response:
        name = self._job(request)
        job = self.state().jobs[name]
        text = request.query_params.get("generation", "")
        wanted = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
        found: tuple[Layout, str] | None = None
        if job.layout is not None and wanted in (0, job.layout.generation):
            found = job.layout, job.layout_reason
        elif wanted:
            found = self.past_layout(name, wanted)
        if found is None:
            raise RefusedError(Why.UNKNOWN, f"job {name} has no layout {wanted or ''}".strip())
        return _json(web_data.layout(*found, self.state(), name))

    async def _incident_data(self, request: Request, visitor: Visitor) -> Response:
        return _json(self._explained(request))

    def _explained(self, request: Request) -> dict[str, Any]:
        number = int(request.path_params["number"])
        found = self.history.explain(self.state(), number) if number < 1 << 62 else None
        if found is None:
            raise RefusedError(Why.UNKNOWN, f"no incident {number}")
        return as_dict(explanation_view(self.state(), found))

    def _job(self, request: Request) -> str:
        name, jobs = str(request.path_params["job"]), self.state().jobs
        if name not in jobs:
            known = ", ".join(sorted(jobs)) or "none yet"
            raise RefusedError(Why.UNKNOWN, f"no job {name!r}; there are: {known}")
        return name

    # Acts, and who comes and goes.

    async def _act_answer(self, request: Request) -> Response:
        form = await _form(request)
        visitor = self.door.enter(request, Action.ACT, _in_words(form))
        number = form.get("proposal", "")
        if not (number.isascii() and number.isdigit() and len(number) < 19):
            raise RefusedError(Why.UNKNOWN, f"no proposal {number!r:.40}")
        proposal = await self.desk.answer(
            int(number),
            is_approved=form.get("is_approved") == "1",
            said_by=form.get("said_by") or "web",
            caller=visitor.caller.name,
            reason=form.get("reason", ""),
        )
        return _done(f"proposal {proposal.proposal_id} is {proposal.answer}")

    async def _act_order(self, request: Request) -> Response:
        form = await _form(request)
        visitor = self.door.enter(request, Action.ACT, _in_words(form))
        kinds = {kind.value: kind for kind in OrderKind}
        kind = kinds.get(form.get("kind", ""))
        if kind is None:
            raise RefusedError(Why.UNKNOWN, "no such order")
        is_on = form.get("is_on") == "1"
        order = await self.desk.order(
            kind,
            form.get("subject", ""),
            is_on=is_on,
            said_by=form.get("said_by") or "web",
            caller=visitor.caller.name,
            reason=form.get("reason", ""),
        )
        what = f"{order.kind} {order.subject}".strip()
        return _done(f"{what} stands" if is_on else f"{what} is taken back")

    async def _login(self, request: Request) -> Response:
        if request.method == "GET":
            return self._page("login.html", request, None, text="")
        _refuse_other_origin(request)
        form = await _form(request)
        try:
            visitor = self.door.log_in(request, form.get("token", "").strip())
        except DeniedError as error:
            text = str(error)
            return self._page("login.html", request, None, status=error.status, text=text)
        return self.door.keep(visitor, RedirectResponse("/", status_code=303))

    async def _logout(self, request: Request) -> Response:
        _refuse_other_origin(request)
        self.door.log_out(request)
        return self.door.forget(RedirectResponse("/login", status_code=303))


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form. Raises DeniedError for one that is too large."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise DeniedError(413, f"more than {MOST_BODY_BYTES} bytes")
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=16)
    except ValueError:
        raise DeniedError(400, "no form of ours") from None
    return {name: values[-1] for name, values in fields.items()}


def _fleet_json(state: State) -> bytes:
    return json.dumps(web_data.fleet(state), separators=(",", ":"), allow_nan=False).encode()


def _in_words(form: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in form.items())


def _refuse_other_origin(request: Request) -> None:
    """Raises DeniedError: a form on a page of another site."""
    origin = request.headers.get("origin", "")
    try:
        netloc = urlsplit(origin).netloc
    except ValueError:
        netloc = ""
    if origin and netloc != request.headers.get("host", ""):
        raise DeniedError(403, "the request does not come from our own page")


def _json(value: Any, status: int = 200) -> Response:
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Response(data, status_code=status, media_type="application/json")


def _done(text: str) -> Response:
    """An act was done: the parts of the page load anew."""
    return Response(
        json.dumps({"done": text}),
        media_type="application/json",
        headers={"hx-trigger": "changed"},
    )


def _with_headers(inner: Any) -> Any:
    """Static files with our headers; they may be kept for an hour."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def tell(message: Any) -> None:
            if message["type"] == "http.response.start":
                ours = {**HEADERS, "cache-control": "max-age=3600"}
                more = [(name.encode(), value.encode()) for name, value in ours.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await inner(scope, receive, tell)

    return app
