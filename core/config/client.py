"""Settings of commands that call a controller, table `[client]`: its address and credentials."""

from dataclasses import field

from pacekeeper.core.addresses import API_PORT
from pacekeeper.core.config.base import Addresses, settings
from pacekeeper.core.config.security import TlsConfig


@settings
class ClientConfig:
    """Address and credentials for calls to a controller."""

    # host:port of the controller for commands; of several, with commas: that of the leader.
    controller: Addresses = f"127.0.0.1:{API_PORT}"
    # File with the bearer token to show it; empty: the environment's PACEKEEPER_TOKEN, or none.
    token_file: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)
