"""What answers and questions of the web page have in common: headers, forms, JSON, files."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

from starlette.requests import Request
from starlette.responses import Response

from pacekeeper.controller.api.web.auth import MOST_BODY_BYTES, DeniedError

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # "no-referrer" would make browsers say of our own login's form that it comes from nowhere.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
FOR_A_YEAR = {"strict-transport-security": "max-age=31536000"}
ASKED_FOR = {"cache-control": "no-cache"}  # a browser asks whether its copy still is the newest


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form, with what a person answered when htmx asked for a reason.

    Raises DeniedError for one that is too large.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise DeniedError(413, f"more than {MOST_BODY_BYTES} bytes")
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=16)
    except ValueError:
        raise DeniedError(400, "no form of ours") from None
    said = request.headers.get("hx-prompt", "")
    if request.headers.get("hx-prompt-uri-autoencoded") == "true":  # beyond Latin-1
        said = unquote(said)
    asked = {"reason": said} if said else {}
    return asked | {name: values[-1] for name, values in fields.items()}


def form_text(form: Mapping[str, str]) -> str:
    """For the audit log."""
    return " ".join(f"{name}={value}" for name, value in form.items())


def json_response(value: Any, status: int = 200) -> Response:
    """A value for a program."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Response(data, status_code=status, media_type="application/json")


def done_response(text: str) -> Response:
    """An act was done: the parts of the page load anew."""
    return Response(
        json.dumps({"done": text}),
        media_type="application/json",
        headers={"hx-trigger": "changed"},
    )


def with_headers(inner: Any, more: Mapping[str, str]) -> Any:
    """The ASGI application `inner` with these in each answer that says nothing else of them.

    Also in those that no page of ours makes: an address that is none, a mistake of ours.
    """
    told = [(name.encode(), value.encode()) for name, value in more.items()]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def tell(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = message["headers"]
                names = {name.lower() for name, _ in own}
                added = [one for one in told if one[0] not in names]
                message = {**message, "headers": [*own, *added]}
            await send(message)

        await inner(scope, receive, tell)

    return app
