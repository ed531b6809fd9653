"""The web application: routes, access control of each request, and errors as pages or JSON.

All values shown are messages of the status service, all changes go through `OperatorActions`. The
page loads nothing from other origins, which its headers enforce (`responses.HEADERS`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from pacekeeper.controller.api.auth.rbac import Action
from pacekeeper.controller.api.operator_actions import (
    ActionRejectedError,
    OperatorActions,
    RejectReason,
)
from pacekeeper.controller.api.staleness import Staleness
from pacekeeper.controller.api.web.actions import ActionEndpoints
from pacekeeper.controller.api.web.auth import DeniedError, Visitor, WebAuthenticator, redirect
from pacekeeper.controller.api.web.data import DataEndpoints
from pacekeeper.controller.api.web.pages import (
    Ask,
    FleetPages,
    NodePages,
    PageRenderer,
    SharedValues,
)
from pacekeeper.controller.api.web.responses import (
    HEADERS,
    HSTS_HEADERS,
    STATIC_HEADERS,
    json_response,
    with_headers,
)
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.state import State
from pacekeeper.core.errors import HostError
from pacekeeper.core.layout.layout import Layout

_STATIC = Path(__file__).resolve().parent / "web_static"
_STATUS = {
    RejectReason.UNKNOWN: 404,
    RejectReason.OVER: 409,
    RejectReason.FAILED: 500,
    RejectReason.STANDBY: 503,
}
Endpoint = Callable[[Request], Awaitable[Response]]
PageEndpoint = Callable[[Request, Visitor], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebApp:
    """Builds the ASGI application.

    Attributes:
        state: Returns the newest state.
        history: Explanations of incidents and timelines of jobs.
        ask: Calls a function in the thread of the store.
        actions: Executes what operators ask for.
        authenticator: Admits requests.
        past_layout: Returns a stored layout of a job with its reason.
        is_secure: Whether it is served over TLS.
        staleness: Returns how old the state is; None: this controller leads.
    """

    state: Callable[[], State]
    history: TimelineWriter
    ask: Ask
    actions: OperatorActions
    authenticator: WebAuthenticator
    past_layout: Callable[[str, int], tuple[Layout, str] | None]
    is_secure: bool = False
    staleness: Callable[[], Staleness | None] = lambda: None

    def app(self) -> Any:
        """The ASGI application."""
        renderer = PageRenderer(
            state=self.state, asks=self.authenticator.is_required, staleness=self.staleness
        )
        requests = _Requests(self.authenticator, renderer, self.staleness)
        actions = ActionEndpoints(
            actions=self.actions, authenticator=self.authenticator, render=renderer.render
        )
        files = StaticFiles(directory=_STATIC)
        routes: list[BaseRoute] = [
            Mount("/static", app=with_headers(files, STATIC_HEADERS)),
            Route("/login", requests.answered(actions.login), methods=["GET", "POST"]),
            Route("/logout", requests.answered(actions.logout), methods=["POST"]),
            Route("/act/answer", requests.answered(actions.answer), methods=["POST"]),
            Route("/act/order", requests.answered(actions.order), methods=["POST"]),
        ]
        routes += [
            Route(path, requests.read(endpoint), methods=["GET"])
            for path, endpoint in self._read_endpoints(renderer).items()
        ]
        headers = {**HEADERS, **(HSTS_HEADERS if self.is_secure else {})}
        return with_headers(Starlette(routes=routes), headers)

    def _read_endpoints(self, renderer: PageRenderer) -> dict[str, PageEndpoint]:
        shared = SharedValues(state=self.state)
        render = renderer.render
        pages = FleetPages(
            state=self.state, history=self.history, ask=self.ask, shared=shared, render=render
        )
        nodes = NodePages(state=self.state, shared=shared, render=render)
        data = DataEndpoints(
            state=self.state,
            history=self.history,
            ask=self.ask,
            shared=shared,
            past_layout=self.past_layout,
        )
        return {
            "/": pages.fleet,
            "/jobs/{job}": pages.job,
            "/jobs/{job}/layout": pages.layout,
            "/incidents": pages.incidents,
            "/incidents/{number:int}": pages.incident,
            "/nodes": nodes.nodes,
            "/nodes/{node:path}": nodes.node,
            "/strikes": nodes.strikes,
            "/part/fleet": pages.fleet_part,
            "/part/jobs/{job}": pages.job_part,
            "/part/jobs/{job}/head": pages.job_head,
            "/part/incidents": pages.incidents_part,
            "/part/nodes": nodes.nodes_part,
            "/part/strikes": nodes.strikes_part,
            "/data/fleet": data.fleet,
            "/data/jobs/{job}": data.job,
            "/data/jobs/{job}/layout": data.layout,
            "/data/incidents/{number:int}": data.incident,
        }


@dataclass(frozen=True, slots=True)
class _Requests:
    """Admits requests and answers rejections."""

    authenticator: WebAuthenticator
    renderer: PageRenderer
    staleness: Callable[[], Staleness | None]

    def answered(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint with rejections and errors as a page for people, or JSON for programs."""

        async def answer(request: Request) -> Response:
            try:
                if not request.scope["query_string"].isascii():
                    raise DeniedError(400, "the query string is not ASCII")
                response = await endpoint(request)
            except DeniedError as error:
                response = redirect(error) or self._error(request, error.status, str(error))
            except ActionRejectedError as error:
                response = self._error(request, _STATUS[error.reason], str(error))
            except HostError as error:  # the store is damaged there
                response = self._error(request, _STATUS[RejectReason.FAILED], str(error))
            return response

        return answer

    def read(self, endpoint: PageEndpoint) -> Endpoint:
        """The endpoint behind the check that the caller may read."""

        async def read(request: Request) -> Response:
            visitor = self.authenticator.admit(request, Action.READ)
            response = await endpoint(request, visitor)
            if (stale := self.staleness()) is not None and stale.is_readable:
                response.headers["age"] = f"{stale.age_s:.0f}"
            return self.authenticator.set_cookie(visitor, response)

        return self.answered(read)

    def _error(self, request: Request, status: int, text: str) -> Response:
        is_page = "text/html" in request.headers.get("accept", "") and request.method == "GET"
        if not is_page:
            return json_response({"error": text}, status)
        return self.renderer.render("wrong.html", request, None, status=status, text=text)
