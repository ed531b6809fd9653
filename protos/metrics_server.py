"""The HTTP server that Prometheus scrapes, and the series of certificate expiry dates.

Agent and controller start one `MetricsServer` each. It is the threaded WSGI server of
`prometheus_client`; this module adds what that one lacks: a bearer token, certificates that rotate
while it runs, time limits, and a limit of connections. A client that sends nothing is disconnected
after `TIMEOUT_S` and blocks no other client before.
"""

import hmac
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer

from pacekeeper.core.addresses import join_address
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.errors import PacekeeperError, listen_error
from pacekeeper.core.prometheus_text import CONTENT_TYPE, MetricFamily, MetricsPage
from pacekeeper.protos import tls

PATH = "/metrics"
MAX_CONNECTIONS = 256  # at one time; Prometheus opens one
TIMEOUT_S = 10.0  # of one read or write, the handshake included; Prometheus' own default
_UNAUTHORIZED = ("401 Unauthorized", [("WWW-Authenticate", 'Bearer realm="pacekeeper"')])
_NOT_FOUND: tuple[str, list[tuple[str, str]]] = ("404 Not Found", [])
_OK = ("200 OK", [("Content-Type", CONTENT_TYPE)])
_EXPIRY = MetricFamily(
    "pacekeeper_certificate_expiry_timestamp_seconds",
    "Expiry time of the certificate in use, Unix seconds; 0 if its file cannot be read.",
    "use",
)


class MetricsServer:
    """Serves one page at /metrics in a background thread until it is closed."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        render: Callable[[], bytes],
        config: MetricsConfig,
        rival: str,
    ) -> None:
        """Bind the port and start serving.

        Args:
            host: Address to listen on.
            port: TCP port; 0 takes any free one (`server_port`).
            render: Returns the page in Prometheus' text format; called in any thread.
            config: Certificate, authorities and token; the files are read again when they change.
            rival: Names the likely owner of the port in the error about a port in use.

        Raises:
            HostError: The port is taken, the address is not local, or a file is missing.
            ConfigError: A certificate, key or token file is not usable.
        """
        self._render = render
        self._token_file = config.token_file
        tls.read_token(config.token_file)
        contexts = tls.ServerContexts(config.tls) if config.cert else None
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            kind: type[_Server] = type("_Server", (_Server,), {"address_family": family})
            self._server = make_server(host, port, self._answer, kind, _RequestHandler)
        except OSError as error:
            raise listen_error(
                join_address(host, port), error, option="--metrics-listen", rival=rival
            ) from None
        if contexts is not None:
            # The handshake is left to the connection's thread: `accept` must not wait for a client.
            self._server.socket = contexts.for_listener().wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.server_port = self._server.server_port
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.1,), name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: Mapping[str, Any], start_response: Any) -> Iterable[bytes]:
        """The WSGI application."""
        body = b""
        if not self._is_authorized(environ.get("HTTP_AUTHORIZATION", "")):
            head = _UNAUTHORIZED
        elif environ["PATH_INFO"] != PATH:
            head = _NOT_FOUND
        else:
            head, body = _OK, self._render()
        status, headers = head
        start_response(status, list(headers))
        return [body]

    def _is_authorized(self, header: str) -> bool:
        """Whether the request carries the token; no request does while its file is unreadable."""
        try:
            token = tls.read_token(self._token_file)
        except PacekeeperError:
            return False
        return not token or hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


class _Server(ThreadingWSGIServer):
    """One thread per connection; at the limit a new connection is closed at once."""

    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread left
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _RequestHandler(WSGIRequestHandler):
    """Serves one connection in its own thread; a broken or silent one ends without a log line."""

    timeout = TIMEOUT_S

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Log nothing: the client sees its own status."""


def write_expiry(page: MetricsPage, files: Mapping[str, str]) -> None:
    """Add the expiry date of each certificate to a page.

    Args:
        page: The page of this scrape.
        files: Certificate file by its use; an empty path is left out. Files are read at each
            scrape, because they rotate.
    """
    for use, path in files.items():
        if path:
            page.add(_EXPIRY, _end_unix_s(path), use)


def _end_unix_s(path: str) -> float:
    """0 for an unreadable file: the alert on expiring certificates then fires as well."""
    try:
        return tls.certificate_end_unix_s(path)
    except PacekeeperError:
        return 0.0
