"""One request with JSON in it and in its answer, within a time; nothing is tried again here."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from pacekeeper.core.errors import ConfigError

MOST_BYTES = 1 << 20


class AwayError(Exception):
    """No answer, or none that can be read: what was asked for may have been done, or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The HTTP status and what came with it; an object of JSON, empty for anything else."""

    status: int
    body: Mapping[str, Any]


def exchange(
    method: str,
    url: str,
    body: Mapping[str, Any] | None,
    *,
    timeout_s: float,
    context: ssl.SSLContext | None = None,
    token: str = "",
) -> Answer:
    """Any status is an answer. Raises AwayError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    request.add_header("Content-Type", "application/json")
    request.add_header("Accept", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler({}),  # what leads out of the private network is not ours
        NoRedirect(),
    ]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
                return Answer(status=answer.status, body=_object(answer.read(MOST_BYTES)))
        except urllib.error.HTTPError as error:
            with error:  # what is read of it may break as well
                return Answer(status=error.code, body=_object(error.read(MOST_BYTES)))
    except (OSError, ValueError, HTTPException) as error:
        raise AwayError(f"{url}: {getattr(error, 'reason', None) or error}") from None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token, or what is signed for one place, goes where it was meant to go."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def tls_context(ca: str, cert: str, key: str) -> ssl.SSLContext:
    """What believes just this authority. Raises ConfigError for files of no use."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"[lease] ca {ca}, cert {cert}, key {key}: {why}") from None
    return context


def read_token(path: Path) -> str:
    """A token that others rotate: read anew for each request. Raises AwayError."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AwayError(f"{path}: {error}") from None
