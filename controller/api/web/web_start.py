"""Puts the web page together, where it is wanted: its parts are imported only then."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from pacekeeper.controller.api.auth.listeners import Entrance
from pacekeeper.controller.api.operator_actions import Desk
from pacekeeper.controller.observability.timeline_writer import History
from pacekeeper.controller.state_machine.events import Event
from pacekeeper.controller.state_machine.state import State
from pacekeeper.core.addresses import host_and_port
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.core.layout.layout import Layout

if TYPE_CHECKING:
    from pacekeeper.controller.api.web.server import WebServer


def web_server(
    config: ControllerConfig,
    *,
    state: Callable[[], State],
    put: Callable[[Event], Awaitable[None]],
    history: History,
    entrance: Entrance,
    past_layout: Callable[[str, int], tuple[Layout, str] | None],
) -> "WebServer | None":
    """The server of the page, bound to its port; None where none is wanted.

    Raises HostError (a package is missing, the port is taken) and ConfigError.
    """
    if not config.web:
        return None
    refuse_page(config)
    try:
        from pacekeeper.controller.api.web.app import Web
        from pacekeeper.controller.api.web.auth import Door
        from pacekeeper.controller.api.web.server import WebServer
    except ModuleNotFoundError as error:
        raise HostError(
            f"{error.name} is not installed here", remedy="install pacekeeper[web]"
        ) from None
    is_secure = bool(config.tls.cert)
    door = Door(
        asks=entrance.tokens is not None,
        is_secure=is_secure,
        tokens=entrance.tokens,
        limits=config.limits,
        audit=entrance.audit,
    )
    web = Web(
        state=state,
        history=history,
        desk=Desk(state=state, put=put),
        door=door,
        past_layout=past_layout,
        is_secure=is_secure,
    )
    return WebServer(web.app(), host_and_port(config.web, first_port=0), config.tls)


def refuse_page(config: ControllerConfig) -> None:
    """Raises ConfigError where nobody could come in to the page."""
    if config.tls.ca and not config.access.tokens:
        raise ConfigError(
            "[access] tokens: the web page knows people by tokens, browsers are asked for no "
            "certificate",
            remedy="make some with `pacekeeper tokens add`, or leave --web out",
        )
