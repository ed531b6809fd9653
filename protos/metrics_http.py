"""The HTTP endpoint that Prometheus asks: one page, over TLS and for known askers where so set.

Each request has a thread of its own and a time limit, few are answered at once, and a handshake is
made in that thread: who connects and says nothing holds up nobody, and is turned out for others.
Certificate and token files are looked at when somebody connects, so they may rotate.
"""

import hmac
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pacekeeper.core.addresses import joined
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.errors import PacekeeperError, listen_error
from pacekeeper.core.prometheus_text import CONTENT_TYPE
from pacekeeper.protos import tls as secure

AT_ONCE = 8  # connections; Prometheus makes one
TURN_OUT_S = 1.0
TIMEOUT_S = 10.0  # of one read or write; what Prometheus waits by default
_log = logging.getLogger(__name__)


class MetricsServer(ThreadingHTTPServer):
    """Answers GET /metrics with what `render` returns, until it is closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        *,
        render: Callable[[], bytes],
        config: MetricsConfig,
        rival: str,
    ) -> None:
        """Port 0: any free one. Raises HostError where it can not be had, or as `check_files`."""
        self._files = _Files(config)
        self._free = threading.BoundedSemaphore(AT_ONCE)
        self._silent: dict[socket.socket, None] = {}  # no request has come yet, the oldest first
        self._changing = threading.Lock()
        self.render = render
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Request)
        except OSError as error:
            raise listen_error(
                joined(host, port), error, option="--metrics-listen", rival=rival
            ) from None
        serve = self.serve_forever
        threading.Thread(target=serve, args=(0.1,), name="metrics", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self.shutdown()
        self.server_close()

    def is_known(self, shown: str) -> bool:
        """May who shows this `Authorization` be answered? While the token is unreadable: nobody."""
        try:
            token = self._files.token()
        except PacekeeperError:
            return False
        return not token or hmac.compare_digest(shown.encode(), f"Bearer {token}".encode())

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, unless too many are at it."""
        if not self._free.acquire(blocking=False):
            self._turn_out()
            if not self._free.acquire(timeout=TURN_OUT_S):
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be had
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The handshake, and the answer."""
        try:
            request.settimeout(TIMEOUT_S)
            context = self._files.context()
            with suppress(OSError):  # of the other side, who hears of it
                if context is not None:
                    request = context.wrap_socket(
                        request, server_side=True, do_handshake_on_connect=False
                    )
                with self._changing:
                    self._silent[request] = None
                if context is not None:
                    request.do_handshake()
                self.finish_request(request, client_address)
        finally:
            self.heard(request)
            self._free.release()
            self.shutdown_request(request)

    def heard(self, request: socket.socket) -> None:
        """Its request has come, or it has gone."""
        with self._changing:
            self._silent.pop(request, None)

    def _turn_out(self) -> None:
        """Whoever has said nothing for longest makes room."""
        with self._changing:
            oldest = next(iter(self._silent), None)
            if oldest is not None:
                del self._silent[oldest]
                with suppress(OSError):
                    # Its thread reads the end. Not of the TLS object, which that thread is using.
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    """One question."""

    server: MetricsServer
    server_version, sys_version = "pacekeeper", ""

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        self.server.heard(self.request)
        return is_whole

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """Nothing: the one who asks hears it."""

    def _answer(self, *, with_body: bool) -> None:
        body, status = b"", HTTPStatus.OK
        if not self.server.is_known(self.headers.get("Authorization", "")):
            status = HTTPStatus.UNAUTHORIZED
        elif self.path.partition("?")[0] != "/metrics":
            status = HTTPStatus.NOT_FOUND
        else:
            body = self.server.render()
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Bearer realm="pacekeeper"')
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


class _Files:
    """Certificate, key, authorities and token, read again when they change."""

    def __init__(self, config: MetricsConfig) -> None:
        """Raises ConfigError or HostError where they are of no use, or not there."""
        self._config = config
        self._lock = threading.Lock()
        self._stamp = self._stamps()
        self._context = self._new_context()
        self.token()

    def token(self) -> str:
        """The token as it is now. Raises likewise."""
        return secure.read_token(self._config.token_file)

    def context(self) -> ssl.SSLContext | None:
        """Of files that are no good any more: the one before them."""
        with self._lock:
            stamp = self._stamps()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._context = self._new_context()
                    _log.info("metrics certificate=%s read again", self._config.cert)
                except PacekeeperError as error:
                    _log.error("metrics keep their certificate: %s", error)
            return self._context

    def _new_context(self) -> ssl.SSLContext | None:
        return secure.server_context(self._config.tls) if self._config.cert else None

    def _stamps(self) -> tuple[object, ...]:
        tls = self._config.tls
        return tuple(secure.file_stamp(path) for path in (tls.cert, tls.key, tls.ca))
