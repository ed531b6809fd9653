"""Sockets that libraries keep to themselves: known by being new, ended by shutting them down.

Whoever waits in such a library, without a deadline or a way to be interrupted, gets its error.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterable

Wire = tuple[int, int]  # (descriptor, inode): the inode tells a re-used descriptor


def open_wires() -> set[Wire]:
    """All sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def leads_to(wire: Wire, port: int, host: str = "") -> bool:
    """Is it connected to a peer's `port`? `host`: and to this numeric address."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(wire[0])) as copy:
        peer = copy.getpeername()
        if isinstance(peer, tuple) and peer[1] == port:
            return host in ("", peer[0], peer[0].removeprefix("::ffff:"))  # IPv4 as IPv6 writes it
    return False


def peer_port(wire: Wire) -> int | None:
    """The port that it is connected to; None where it is not, or to no network."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(wire[0])) as copy:
        peer = copy.getpeername()
        return int(peer[1]) if isinstance(peer, tuple) else None
    return None


def cut(wires: Iterable[Wire]) -> None:
    """Shut the connections among `wires` down, for both ends."""
    # A descriptor that was closed meanwhile may be another connection's by now.
    for descriptor, _ in set(wires) & open_wires():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.getpeername()  # a listening socket has none: gloo dies if that one is cut
            copy.shutdown(socket.SHUT_RDWR)
