"""Settings of commands that call a controller, table `[client]`: its address and credentials."""

from dataclasses import field

from pacekeeper.core.addresses import GRPC_PORT
from pacekeeper.core.config.base import Addresses, settings
from pacekeeper.core.config.security import TlsConfig


@settings
class ClientConfig:
    """Address and credentials for calls to a controller."""

    # host:port of the controller; of several, with commas between: the one that leads is asked.
    controller: Addresses = f"127.0.0.1:{GRPC_PORT}"
    # File with the bearer token to show it; empty: the environment's PACEKEEPER_TOKEN, or none.
    token_file: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)
