"""A gloo group that can be left while it forms: a thread connects it, and may be left with it.

Nothing interrupts gloo in that, and a member that dies in the middle would be waited for until
gloo's own time-out. Torch is told of a group once its members are connected.
"""

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions

GLOO_TO_LEAVE = "gloo_to_leave"  # the name of the back end
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What is to be done while members connect: `is_aborted` is asked every `tick_s`; who gives up
    calls `cut_store`, so that the thread writes nothing there later and waits for nothing.
    """

    is_aborted: Callable[[], bool]
    tick_s: float
    cut_store: Callable[[], None]


def gloo_connect(
    store: Store, rank: int, size: int, timeout_s: float, waiting: Waiting
) -> dist.ProcessGroupGloo:
    """Connect the members; `rank` is the place among them. Raises RuntimeError: what gloo says, or
    why it was left.
    """
    made: SimpleQueue[dist.ProcessGroupGloo | RuntimeError] = SimpleQueue()

    def connect() -> None:
        try:
            made.put(dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout_s)))
        except RuntimeError as error:
            made.put(error)

    thread = threading.Thread(target=connect, daemon=True, name="gloo")
    thread.start()
    began_s = looked_s = time.monotonic()
    while True:
        try:
            found = made.get(timeout=_POLL_S)
        except Empty:
            now_s = time.monotonic()
            if now_s - began_s >= timeout_s:
                waiting.cut_store()
                raise RuntimeError("a member does not connect") from None
            if now_s - looked_s >= waiting.tick_s:
                looked_s = now_s
                if waiting.is_aborted():
                    waiting.cut_store()
                    raise RuntimeError("a member is dead") from None
            continue
        thread.join()
        if isinstance(found, RuntimeError):
            raise found
        return found


def _for_torch(wanted: _DistributedBackendOptions, waiting: Waiting) -> dist.ProcessGroupGloo:
    timeout_s = wanted.timeout.total_seconds()
    return gloo_connect(wanted.store, wanted.group_rank, wanted.group_size, timeout_s, waiting)


dist.Backend.register_backend(GLOO_TO_LEAVE, _for_torch, extended_api=True, devices=["cpu"])


Wire = tuple[int, int]  # (descriptor, inode): the inode tells a re-used descriptor


def open_sockets() -> set[Wire]:
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


def shutdown_sockets(wires: Iterable[Wire]) -> None:
    """Shut the connections among `wires` down, for both ends."""
    # A descriptor that was closed meanwhile may be another connection's by now.
    for descriptor, _ in set(wires) & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.getpeername()  # a listening socket has none: gloo dies if that one is cut
            copy.shutdown(socket.SHUT_RDWR)
