"""The HTTP server of the web page: uvicorn in the controller's event loop.

`controller/app` builds it with `build_web_server`, which imports starlette and jinja2 only if a
page is configured. Its certificate is read again when it changes.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from pacekeeper.controller.api.web.start import web_tls_context
from pacekeeper.core.addresses import join_address
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import listen_error

CLOSE_WITHIN_S = 2
MAX_REQUESTS = 512  # open at one time; further ones get 503


class _Server(uvicorn.Server):
    """Leaves signals to the controller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WebServer:
    """Serves one application at one address."""

    def __init__(self, app: Any, address: tuple[str, int], tls: TlsConfig) -> None:
        """Bind the port.

        Args:
            app: The ASGI application.
            address: Host and port; port 0 takes any free one.
            tls: Certificate and key; without them it serves plain HTTP.

        Raises:
            ConfigError: The certificate is not usable.
            HostError: The port is taken.
        """
        context = web_tls_context(tls) if tls.cert else None
        self._scheme = "https" if tls.cert else "http"
        self._socket = _bound(*address)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            limit_concurrency=MAX_REQUESTS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=CLOSE_WITHIN_S,
            h11_max_incomplete_event_size=64 << 10,
        )
        config.load()
        config.ssl = context
        self._server = _Server(config)

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        host = str(self._socket.getsockname()[0])
        return f"{self._scheme}://{join_address(host, self.port)}/"

    async def serve(self) -> None:
        """Serve until cancelled or closed."""
        await self._server.serve(sockets=[self._socket])

    async def close(self, task: "asyncio.Task[None]") -> None:
        """Finish the open requests, then stop."""
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(task, 2 * CLOSE_WITHIN_S)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        raise listen_error(
            f"{host}:{port}", error, option="--web", rival="another service"
        ) from None
    return listener
