"""Ports of loopback for servers that tests start."""

import random
import socket

FIRST, LAST = 12_000, 28_000  # below those that systems give to whoever asks for any
_draw = random.SystemRandom()


def free_port() -> int:
    """A port that is free now, and that nobody gets who asks for any: tests run side by side."""
    while True:
        port = _draw.randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
