"""Settings of commands that call a controller, table `[client]`: its address and credentials."""

from dataclasses import dataclass, field

from pacekeeper.core.addresses import GRPC_PORT, split_addresses
from pacekeeper.core.config.security import TlsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Address and credentials for calls to a controller."""

    # host:port of the controller; of several, with commas between: the one that leads is asked.
    controller: str = f"127.0.0.1:{GRPC_PORT}"
    # File with the bearer token to show it; empty: the environment's PACEKEEPER_TOKEN, or none.
    token_file: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)

    def __post_init__(self) -> None:
        try:
            split_addresses(self.controller)
        except ValueError as error:
            raise ValueError(f"controller: {error}") from None
