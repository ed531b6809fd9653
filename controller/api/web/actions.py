"""Endpoints of the web page that change something: actions of operators, login and logout."""

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
    """The POST endpoints and the login page.

    Attributes:
        actions: Executes what operators ask for.
        authenticator: Admits requests, opens and ends sessions.
        render: Renders a template (`PageRenderer.render`).
    """

    actions: OperatorActions
    authenticator: WebAuthenticator
    render: Callable[..., Response]

    async def answer(self, request: Request) -> Response:
        """Approve or deny a proposal."""
        form = await read_form(request)
        visitor = self.authenticator.admit(request, Action.ACT, form_text(form))
        number = form.get("proposal", "")
        if not (number.isascii() and number.isdigit() and len(number) < 19):
            raise ActionRejectedError(RejectReason.UNKNOWN, f"unknown proposal {number!r:.40}")
        proposal = await self.actions.answer(
            int(number),
            is_approved=form.get("is_approved") == "1",
            operator=form.get("operator") or "web",
            caller=visitor.caller.name,
            reason=form.get("reason", ""),
        )
        return done_response(f"proposal {proposal.proposal_id} is {proposal.answer}")

    async def order(self, request: Request) -> Response:
        """Give or withdraw an operator order."""
        form = await read_form(request)
        visitor = self.authenticator.admit(request, Action.ACT, form_text(form))
        kinds = {kind.value: kind for kind in OrderKind}
        kind = kinds.get(form.get("kind", ""))
        if kind is None:
            raise ActionRejectedError(RejectReason.UNKNOWN, "unknown kind of order")
        is_on = form.get("is_on") == "1"
        order = await self.actions.order(
            kind,
            form.get("subject", ""),
            is_on=is_on,
            operator=form.get("operator") or "web",
            caller=visitor.caller.name,
            reason=form.get("reason", ""),
        )
        what = f"{order.kind} {order.subject}".strip()
        return done_response(f"{what} is in effect" if is_on else f"{what} is withdrawn")

    async def login(self, request: Request) -> Response:
        """Show the login form, or log in."""
        if request.method == "GET":
            return self.render("login.html", request, None, text="")
        self.authenticator.check_origin(request, "login")
        form = await read_form(request)
        try:
            visitor = self.authenticator.log_in(request, form.get("token", "").strip())
        except DeniedError as error:
            text = str(error)
            return self.render("login.html", request, None, status=error.status, text=text)
        return self.authenticator.set_cookie(visitor, RedirectResponse("/", status_code=303))

    async def logout(self, request: Request) -> Response:
        """Log out."""
        self.authenticator.check_origin(request, "logout")
        self.authenticator.log_out(request)
        return self.authenticator.delete_cookie(RedirectResponse("/login", status_code=303))
