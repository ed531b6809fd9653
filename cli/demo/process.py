"""One process of the demo: a `pacekeeper` command that ends when the demo ends.

The kernel sends the signal (PR_SET_PDEATHSIG), so that it also works if the demo is killed.
"""

import contextlib
import ctypes
import os
import signal
import sys

from pacekeeper.cli.main import main

_PR_SET_PDEATHSIG = 1


def command_line(*arguments: str) -> list[str]:
    """Return the command line that runs `pacekeeper ARGUMENTS` as a child bound to this process.

    Start it from a thread that outlives the child: the kernel treats that thread as the parent.
    """
    return [sys.executable, "-m", "pacekeeper.cli.demo.process", str(os.getpid()), *arguments]


def terminate_with_parent(parent: int) -> None:
    """Request SIGTERM at the end of process `parent`; exit at once if it has ended."""
    with contextlib.suppress(OSError, AttributeError):  # not supported by this kernel
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    terminate_with_parent(int(sys.argv[1]))
    main(sys.argv[2:])
