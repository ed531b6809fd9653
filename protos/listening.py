"""Opens the ports of gRPC servers, and says why that fails, which gRPC does not report.

Used by the controller and its standbys, and by `pacekeeper doctor`.
"""

import socket

import grpc.aio

from pacekeeper.core.addresses import join_address, split_address
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import listen_error
from pacekeeper.protos import tls as secure

RIVAL = "another controller"


async def start_server(server: grpc.aio.Server, address: str, tls: TlsConfig, option: str) -> str:
    """Open a gRPC server's port and start it.

    Args:
        server: Has its services.
        address: HOST:PORT; port 0: any free one.
        tls: Its certificate; without one it is not encrypted.
        option: The command line option of the address.

    Returns:
        HOST:PORT that clients connect to.

    Raises:
        HostError: The port is taken.
        ConfigError: The certificate is not usable.
    """
    try:
        if tls.cert:
            port = server.add_secure_port(address, secure.server_credentials(tls))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        why = bind_error(address) or OSError("gRPC rejects the address")
        raise listen_error(address, why, option=option, rival=RIVAL)
    await server.start()
    return join_address(split_address(address, first_port=0)[0], port)


def bind_error(listen: str) -> OSError | None:
    """Why this user cannot listen on HOST:PORT; None: nothing is in the way."""
    host, port = split_address(listen, first_port=0)
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None
