"""Ports of loopback for servers that tests start."""

import os
import random
import socket
from collections.abc import Iterator

FIRST, LAST = 12_000, 28_000  # below those that systems give to whoever asks for any
MOST_WORKERS = 16  # that run tests side by side: each looks at ports of its own


def _turns(first: int, last: int, each: int) -> Iterator[int]:
    """Every `each`th port from any of them on, so that none comes twice in a long time."""
    ports = range(first, last, each)
    at = random.SystemRandom().randrange(len(ports))
    while True:
        yield ports[at % len(ports)]
        at += 1


_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS
_ports = _turns(FIRST + _worker, LAST, MOST_WORKERS)


def free_port() -> int:
    """A port that is free now, and that nobody gets who asks for any: tests run side by side."""
    while True:
        port = next(_ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
