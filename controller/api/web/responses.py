"""HTTP helpers of the web page: response headers, forms, JSON."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

from starlette.requests import Request
from starlette.responses import Response

from pacekeeper.controller.api.web.auth import MAX_BODY_BYTES, DeniedError

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With "no-referrer" browsers would send the login form with the origin "null".
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
HSTS_HEADERS = {"strict-transport-security": "max-age=31536000"}
STATIC_HEADERS = {"cache-control": "no-cache"}  # the browser revalidates its copy


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form; the answer to an htmx prompt becomes `reason`.

    Raises:
        DeniedError: The form is too large or malformed.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise DeniedError(413, f"the form has more than {MAX_BODY_BYTES} bytes")
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=16)
    except ValueError:
        raise DeniedError(400, "the form has too many fields") from None
    prompt = request.headers.get("hx-prompt", "")
    if request.headers.get("hx-prompt-uri-autoencoded") == "true":  # beyond Latin-1
        prompt = unquote(prompt)
    asked = {"reason": prompt} if prompt else {}
    return asked | {name: values[-1] for name, values in fields.items()}


def form_text(form: Mapping[str, str]) -> str:
    """The form on one line, for the audit log."""
    return " ".join(f"{name}={value}" for name, value in form.items())


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON response."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Response(data, status_code=status, media_type="application/json")


def done_response(text: str) -> Response:
    """The response to an action: htmx then loads the parts of the page again."""
    return Response(
        json.dumps({"done": text}),
        media_type="application/json",
        headers={"hx-trigger": "changed"},
    )


def with_headers(inner: Any, more: Mapping[str, str]) -> Any:
    """Add default headers to every response of an ASGI application, errors included.

    Args:
        inner: The application.
        more: Headers; those that a response sets itself are kept.
    """
    defaults = [(name.encode(), value.encode()) for name, value in more.items()]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = message["headers"]
                names = {name.lower() for name, _ in own}
                added = [one for one in defaults if one[0] not in names]
                message = {**message, "headers": [*own, *added]}
            await send(message)

        await inner(scope, receive, send_with_headers)

    return app
