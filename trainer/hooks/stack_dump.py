"""Lets the node's agent ask this process for its stacks: `faulthandler` on a signal of its own.

The handler is C code that takes no lock and needs no interpreter: it also answers where all threads
are blocked. It writes to a file beside the ring. PACEKEEPER_STACK_DUMPS=0 leaves it out, and so
does a handler that the trainer has set for the signal.
"""

import contextlib
import faulthandler
import logging
import os
import signal
from pathlib import Path

from pacekeeper.core.telemetry.shm_ring import stack_file_name
from pacekeeper.trainer.hooks.ring_writer import Ring

VARIABLE = "PACEKEEPER_STACK_DUMPS"
SIGNAL = signal.SIGRTMIN + 13  # of the real-time signals, which launchers and schedulers leave free
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_registered: list[int] = []  # descriptor of the file that this process dumps to, if any
_log = logging.getLogger(__name__)


def register_stack_dump(ring: Ring) -> None:
    """Register the dump of this process and publish its signal; an error is logged, not raised.

    Args:
        ring: Of the rank. Of several in one process the newest has the dump.
    """
    if ring.path is None or os.environ.get(VARIABLE) == "0":
        return
    path = ring.path.with_name(stack_file_name(ring.path.name))
    try:
        if not _registered and is_taken(SIGNAL):
            return
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        descriptor = os.open(path, _FLAGS, 0o644)
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
        for former in _registered:
            os.close(former)
        _registered[:] = [descriptor]
        ring.publish_dump_signal(SIGNAL)
    except (OSError, RuntimeError, ValueError) as error:
        _log.info("ring=%s: no stack dump on a signal: %s", ring.path, error)


def is_taken(number: int) -> bool:
    """Whether this process handles, ignores or blocks the signal already."""
    masks = {
        name: int(value, 16)
        for name, _, value in (
            line.partition(":") for line in Path("/proc/self/status").read_text().splitlines()
        )
        if name in ("SigBlk", "SigIgn", "SigCgt")
    }
    return any(mask >> (number - 1) & 1 for mask in masks.values())
