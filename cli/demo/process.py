"""One process of the demo: the command an operator would type, which ends when the demo does.

However the demo ends: a SIGKILL leaves it no time to end its fleet, so the kernel tells each part.
"""

import contextlib
import ctypes
import os
import signal
import sys

from pacekeeper.cli.main import main

_PR_SET_PDEATHSIG = 1


def command_line(*arguments: str) -> list[str]:
    """How this process starts `pacekeeper ARGUMENTS` as a part of itself.

    From a thread that lives as long as the part shall: in the kernel's eyes that one is the parent.
    """
    return [sys.executable, "-m", "pacekeeper.cli.demo.process", str(os.getpid()), *arguments]


def end_with(parent: int) -> None:
    """SIGTERM to this process when process `parent` ends, or at once where it has."""
    with contextlib.suppress(OSError, AttributeError):  # a kernel without it: as before
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    main(sys.argv[2:])
