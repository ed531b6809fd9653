"""Puts the web page together where the settings ask for it; only then its packages are imported."""

import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from pacekeeper.controller.api.auth.listeners import ListenerSetup
from pacekeeper.controller.api.operator_actions import OperatorActions
from pacekeeper.controller.observability.timeline_writer import History
from pacekeeper.controller.state.events import Event
from pacekeeper.controller.state.state import State
from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout

if TYPE_CHECKING:
    from pacekeeper.controller.api.web.server import WebServer


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

    Raises HostError (the port is taken), ConfigError, and ModuleNotFoundError without
    pacekeeper[web].
    """
    if not config.web:
        return None
    check_web_access(config)
    from pacekeeper.controller.api.web.app import WebApp
    from pacekeeper.controller.api.web.auth import WebAuthenticator
    from pacekeeper.controller.api.web.server import WebServer

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
