"""Parses and formats HOST:PORT addresses, and holds the default ports.

All settings and commands that listen or connect use these rules. Nothing here opens a socket or
resolves a name.
"""

import ipaddress

# Below 32768: an outgoing connection never gets one of these as its own port.
AGENT_PORT = 7443
API_PORT = 7444
METRICS_PORT = 9464


def split_address(address: str, *, first_port: int = 1) -> tuple[str, int]:
    """Parse HOST:PORT or [HOST]:PORT.

    gRPC cannot do this: it uses port 443 for a missing one and wraps one that is too large.

    Args:
        address: the text.
        first_port: the lowest valid port; 0 for listeners, where it means any free port.

    Raises:
        ValueError: the text is anything else.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or "," in host or not is_number or not first_port <= int(port) <= 65535:
        raise ValueError(
            f"expected HOST:PORT with a port from {first_port} to 65535, got {address!r}"
        )
    return host, int(port)


def split_addresses(addresses: str, *, first_port: int = 1) -> tuple[str, ...]:
    """The addresses in HOST:PORT,HOST:PORT; a listener (`first_port=0`) has exactly one.

    Raises:
        ValueError: one of them is not an address.
    """
    found = tuple(one.strip() for one in addresses.split(",")) if first_port else (addresses,)
    for one in found:
        split_address(one, first_port=first_port)
    return found


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is certain to stay within this machine: a loopback address or "localhost".

    Raises:
        ValueError: the text is not an address.
    """
    host, _ = split_address(address, first_port=0)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may lead anywhere
