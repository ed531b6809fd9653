"""What people do on the web page: acts by the desk, and who comes and goes by the door."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pacekeeper.controller.api.auth.rbac import Action
from pacekeeper.controller.api.operator_actions import (
    ActionRejectedError,
    OperatorActions,
    RejectReason,
)
from pacekeeper.controller.api.web.auth import DeniedError, WebAuthenticator
from pacekeeper.controller.api.web.responses import done_response, form_text, read_form
from pacekeeper.core.incidents.operator_orders import OrderKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionEndpoints:
    """Endpoints. `page` makes a page of a template."""

    desk: OperatorActions
    door: WebAuthenticator
    page: Callable[..., Response]

    async def answer(self, request: Request) -> Response:
        """A person's word on a plan that waits."""
        form = await read_form(request)
        visitor = self.door.enter(request, Action.ACT, form_text(form))
        number = form.get("proposal", "")
        if not (number.isascii() and number.isdigit() and len(number) < 19):
            raise ActionRejectedError(RejectReason.UNKNOWN, f"no proposal {number!r:.40}")
        proposal = await self.desk.answer(
            int(number),
            is_approved=form.get("is_approved") == "1",
            said_by=form.get("said_by") or "web",
            caller=visitor.caller.name,
            reason=form.get("reason", ""),
        )
        return done_response(f"proposal {proposal.proposal_id} is {proposal.answer}")

    async def order(self, request: Request) -> Response:
        """An order of a person, or that it is taken back."""
        form = await read_form(request)
        visitor = self.door.enter(request, Action.ACT, form_text(form))
        kinds = {kind.value: kind for kind in OrderKind}
        kind = kinds.get(form.get("kind", ""))
        if kind is None:
            raise ActionRejectedError(RejectReason.UNKNOWN, "no such order")
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
        return done_response(f"{what} stands" if is_on else f"{what} is taken back")

    async def login(self, request: Request) -> Response:
        """The form, and what it sends."""
        if request.method == "GET":
            return self.page("login.html", request, None, text="")
        self.door.refuse_other_origin(request, "login")
        form = await read_form(request)
        try:
            visitor = self.door.log_in(request, form.get("token", "").strip())
        except DeniedError as error:
            text = str(error)
            return self.page("login.html", request, None, status=error.status, text=text)
        return self.door.keep(visitor, RedirectResponse("/", status_code=303))

    async def logout(self, request: Request) -> Response:
        """The session is over."""
        self.door.refuse_other_origin(request, "logout")
        self.door.log_out(request)
        return self.door.forget(RedirectResponse("/login", status_code=303))
