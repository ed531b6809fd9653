"""Shared lock on a ring file, held until its writer has ended or detached.

The kernel releases the lock when the process ends, however it ends. The agent tries the exclusive
lock without waiting; only a change that it observed (held at opening, free now) counts as an end,
and only where the run's supervisor has ended too. The record then has the exit code `EXIT_UNSEEN`.
A forked child that keeps the descriptor delays the report, never advances it. The electorate of
`trainer/elastic/quorum.py` does not use this.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from pacekeeper.core.errors import PacekeeperError
from pacekeeper.core.telemetry import shm_ring

_OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_AGENT_LOOKS_S = 0.01  # more than the agent holds the lock for, when it looks who lives


def writer_of(path: Path) -> int:
    """The pid in the header of a ring that somebody still writes; 0 where nobody does."""
    with contextlib.suppress(OSError, ValueError, PacekeeperError):
        descriptor = os.open(path, _OPENED)
        try:
            if _is_locked(descriptor):
                time.sleep(_AGENT_LOOKS_S)
                if _is_locked(descriptor):
                    pid = shm_ring.decode_header(os.pread(descriptor, shm_ring.SLOTS_OFFSET, 0)).pid
                    os.kill(pid, 0)  # OSError where it has ended: a child of its has the lock
                    return pid
        finally:
            os.close(descriptor)
    return 0


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
