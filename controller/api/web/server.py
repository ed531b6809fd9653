"""The HTTP server of the web page, in the controller's event loop; its certificate may rotate."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from pacekeeper.controller.api.web.start import web_tls_context
from pacekeeper.core.addresses import join_address
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError, listen_error

CLOSE_WITHIN_S = 2
_log = logging.getLogger(__name__)
Stamp = tuple[tuple[int, int], ...]


class _Server(uvicorn.Server):
    """Signals are the controller's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WebServer:
    """Serves one application at one address."""

    def __init__(self, app: Any, address: tuple[str, int], tls: TlsConfig) -> None:
        """Raises ConfigError (certificate) and HostError (the port is taken)."""
        self._tls = tls
        self._context = web_tls_context(tls) if tls.cert else None
        self._stamp = _stamp(tls)
        self._socket = _bound(*address)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            limit_concurrency=512,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=CLOSE_WITHIN_S,
            h11_max_incomplete_event_size=64 << 10,
        )
        config.load()
        config.ssl = self._context
        self._server = _Server(config)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """What to type into a browser."""
        host = str(self._socket.getsockname()[0])
        return f"{'https' if self._tls.cert else 'http'}://{join_address(host, self.port)}/"

    async def serve(self) -> None:
        """Until it is cancelled or told to end."""
        await self._server.serve(sockets=[self._socket])

    async def close(self, task: "asyncio.Task[None]") -> None:
        """End what is being answered, then all."""
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(task, 2 * CLOSE_WITHIN_S)

    def reload_certificate(self) -> None:
        """Read the certificate again if its files changed; bad ones leave it as it was."""
        stamp = _stamp(self._tls)
        if self._context is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            web_tls_context(self._tls)  # first into one that nobody uses
            self._context.load_cert_chain(self._tls.cert, self._tls.key, password="")
        except (ConfigError, OSError) as error:
            _log.error("the web page's certificate stays as it was: %s", error)
        else:
            _log.info("certificate=%s read again for the web page", self._tls.cert)


def _stamp(tls: TlsConfig) -> Stamp:
    found = []
    for path in filter(None, (tls.cert, tls.key)):
        try:
            status = Path(path).stat()
        except OSError:
            found.append((0, 0))
        else:
            found.append((status.st_ino, status.st_mtime_ns))
    return tuple(found)


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
