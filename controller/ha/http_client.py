"""One request with JSON in it and in its answer, within a time; nothing is tried again here.

The time is one for all of it: a server that answers byte by byte is away as one that does not.
"""

import io
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from pacekeeper.core.errors import ConfigError
from pacekeeper.protos.tls import NoRedirect

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
    """Any status is an answer. Raises AwayError.

    Names are looked up, and each address of one is tried, in times of their own.
    """
    until_s = time.monotonic() + timeout_s
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    request.add_header("Content-Type", "application/json")
    request.add_header("Accept", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler({}),  # what leads out of the private network is not ours
        NoRedirect(),
        _Plain(until_s),
    ]
    if context is not None:
        handlers.append(_Secure(until_s, context))
    try:
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
                return Answer(status=answer.status, body=_object(answer.read(MOST_BYTES)))
        except urllib.error.HTTPError as error:
            with error:  # what is read of it may break as well
                return Answer(status=error.code, body=_object(error.read(MOST_BYTES)))
    except (OSError, ValueError, HTTPException) as error:
        raise AwayError(f"{url}: {getattr(error, 'reason', None) or error}") from None


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, until_s: float) -> None:
        super().__init__()
        self._until_s = until_s

    def http_open(self, req: urllib.request.Request) -> Any:
        kind: Any = TimedConnection
        return self.do_open(kind, req, until_s=self._until_s)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, until_s: float, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._until_s, self._tls = until_s, context

    def https_open(self, req: urllib.request.Request) -> Any:
        kind: Any = TimedHttpsConnection
        return self.do_open(kind, req, context=self._tls, until_s=self._until_s)


class TimedConnection(HTTPConnection):
    """All that is said and heard by it ends at a time."""

    def __init__(self, *place: Any, until_s: float, **values: Any) -> None:
        super().__init__(*place, **values)
        self._until_s = until_s

    def connect(self) -> None:
        """As any, and timed from then on."""
        self.timeout = _left_s(self._until_s)
        super().connect()
        timed: Any = _TimedSocket(self.sock, self._until_s)
        self.sock = timed


class TimedHttpsConnection(TimedConnection, HTTPSConnection):
    """Likewise, behind TLS."""


class _TimedSocket:
    """As much of a socket as http.client needs: a socket's own time begins anew with each byte."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self._sock, self._until_s = sock, until_s
        self._is_read = False  # by an answer, which then closes it

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left_s(self._until_s))
        self._sock.sendall(data)

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader:
        self._is_read = True
        return io.BufferedReader(_TimedReader(self._sock, self._until_s))

    def close(self) -> None:
        if not self._is_read:
            self._sock.close()


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self._sock, self._until_s = sock, until_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left_s(self._until_s))
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        self._sock.close()
        super().close()


def _left_s(until_s: float) -> float:
    """Raises TimeoutError where it is over: 0 would mean not to wait, and None for ever."""
    left_s = until_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError("no whole answer in time")
    return left_s


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
