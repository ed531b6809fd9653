"""Builds the web server for `controller/app`: checks its settings before anything is imported.

uvicorn, starlette and jinja2 are imported only if a page is configured: they are an extra of the
package.
"""

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pacekeeper.controller.api.auth.listeners import ListenerSetup
from pacekeeper.controller.api.operator_actions import OperatorActions
from pacekeeper.controller.api.staleness import Staleness
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.events import Event
from pacekeeper.controller.state.state import State
from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.protos import tls as secure

if TYPE_CHECKING:
    from pacekeeper.controller.api.web.server import WebServer


def web_tls_context(tls: TlsConfig) -> ssl.SSLContext:
    """A context whose certificate is read again when its files change. Raises ConfigError."""
    # Browsers are not asked for a certificate.
    return secure.ServerContexts(replace(tls, ca="")).for_listener()


def build_web_server(
    config: ControllerConfig,
    *,
    state: Callable[[], State],
    put: Callable[[Event], Awaitable[None]],
    history: TimelineWriter,
    ask: Callable[..., Awaitable[Any]],
    listener_setup: ListenerSetup,
    past_layout: Callable[[str, int], tuple[Layout, str] | None],
    staleness: Callable[[], Staleness | None] = lambda: None,
) -> "WebServer | None":
    """Build the web server and bind its port; None if no page is configured.

    Args:
        config: The controller's configuration.
        state: Returns the newest state.
        put: Stores an event and returns when it is stored.
        history: Explanations of incidents and timelines of jobs.
        ask: Calls a function in the thread of the store.
        listener_setup: Authenticator and audit log, shared with gRPC.
        past_layout: Returns a stored layout of a job with its reason.
        staleness: Returns how old the state is; None: this controller leads.

    Raises:
        HostError: The port is taken.
        ConfigError: The certificate is not usable, or no browser could log in.
        ModuleNotFoundError: pacekeeper[web] is not installed.
    """
    if not config.web:
        return None
    check_web_access(config)
    from pacekeeper.controller.api.web.app import WebApp
    from pacekeeper.controller.api.web.auth import WebAuthenticator
    from pacekeeper.controller.api.web.server import WebServer

    is_secure = bool(config.tls.cert)
    authenticator = WebAuthenticator(
        authenticator=listener_setup.authenticator,
        is_secure=is_secure,
        limits=config.limits,
        audit=listener_setup.audit,
    )
    web = WebApp(
        state=state,
        history=history,
        ask=ask,
        actions=OperatorActions(state=state, put=put),
        authenticator=authenticator,
        past_layout=past_layout,
        is_secure=is_secure,
        staleness=staleness,
    )
    return WebServer(web.app(), split_address(config.web, first_port=0), config.tls)


def check_web_access(config: ControllerConfig) -> None:
    """Raises ConfigError if no browser could log in."""
    if config.tls.ca and not config.access.tokens:
        raise ConfigError(
            "[access] tokens: the web page requires tokens, because browsers send no certificate",
            remedy="create tokens with `pacekeeper tokens add`, or omit --web",
        )
