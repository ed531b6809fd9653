"""The HTTP server of the web page, in the controller's event loop; its certificate may rotate."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from pacekeeper.controller.api.auth.listeners import ListenerSetup
from pacekeeper.controller.api.operator_actions import OperatorActions
from pacekeeper.controller.observability.timeline_writer import History
from pacekeeper.controller.state.events import Event
from pacekeeper.controller.state.state import State
from pacekeeper.core.addresses import join_address, split_address
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError, HostError, listen_error
from pacekeeper.core.layout.layout import Layout


def web_tls_context(tls: TlsConfig) -> ssl.SSLContext:
    """Raises ConfigError for files that are no pair, or not there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise ConfigError(f"{tls.cert}, {tls.key}: no certificate with its key: {why}") from None
    return context


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


def build_web_server(
    config: ControllerConfig,
    *,
    state: Callable[[], State],
    put: Callable[[Event], Awaitable[None]],
    history: History,
    listener_setup: ListenerSetup,
    past_layout: Callable[[str, int], tuple[Layout, str] | None],
) -> "WebServer | None":
    """The server of the page, bound to its port; None where none is wanted.

    Raises HostError (a package is missing, the port is taken) and ConfigError.
    """
    if not config.web:
        return None
    check_web_access(config)
    try:
        from pacekeeper.controller.api.web.app import WebApp
        from pacekeeper.controller.api.web.auth import WebAuthenticator
    except ModuleNotFoundError as error:
        raise HostError(
            f"{error.name} is not installed here", remedy="install pacekeeper[web]"
        ) from None
    is_secure = bool(config.tls.cert)
    door = WebAuthenticator(
        asks=listener_setup.tokens is not None,
        is_secure=is_secure,
        tokens=listener_setup.tokens,
        limits=config.limits,
        audit=listener_setup.audit,
    )
    web = WebApp(
        state=state,
        history=history,
        desk=OperatorActions(state=state, put=put),
        door=door,
        past_layout=past_layout,
        is_secure=is_secure,
    )
    return WebServer(web.app(), split_address(config.web, first_port=0), config.tls)


def check_web_access(config: ControllerConfig) -> None:
    """Raises ConfigError where nobody could come in to the page."""
    if config.tls.ca and not config.access.tokens:
        raise ConfigError(
            "[access] tokens: the web page knows people by tokens, browsers are asked for no "
            "certificate",
            remedy="make some with `pacekeeper tokens add`, or leave --web out",
        )
