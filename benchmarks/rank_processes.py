"""Processes that benchmarks start: none of them outlives the benchmark, however it ends.

`exit_on_stop_signals` lets `with` and `finally` blocks run at SIGTERM. Where they cannot run, the
kernel ends what is bound: `run_processes` runs a function in bound processes, `bound` returns the
command line of one, `end_with_parent` binds the process that calls it.
`python -m benchmarks.rank_processes PARENT COMMAND ...` is what `bound` returns.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from pacekeeper.cli.demo.command import install_signal_handlers

_PR_SET_PDEATHSIG = 1


def exit_on_stop_signals() -> None:
    """End through every `with` and `finally` block at SIGTERM, SIGHUP and Ctrl-C."""
    install_signal_handlers()


def end_with_parent(parent: int = 0) -> None:
    """Ask the kernel for SIGKILL, which frozen processes obey too, when the parent ends.

    Args:
        parent: Exit at once if this is no longer the parent; 0: whoever is.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        sys.exit(128 + signal.SIGKILL)


def bound(*command: str) -> list[str]:
    """Return the command line of a process that is killed when this process ends."""
    return [sys.executable, "-m", "benchmarks.rank_processes", str(os.getpid()), *command]


def run_processes(main: Callable[..., None], count: int, *given: Any) -> None:
    """Run `main(rank, *given)` in `count` fresh processes; if one fails, end the others.

    Raises:
        RuntimeError: A process failed; its error is on the terminal.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(os.getpid(), main, rank, *given))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        running: dict[Any, Any] = {process.sentinel: process for process in processes}
        while running:
            for sentinel in wait(list(running)):
                ended = running.pop(sentinel)
                if ended.exitcode:
                    raise RuntimeError(f"a rank ended with {ended.exitcode}")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(parent: int, main: Callable[..., None], rank: int, *given: Any) -> None:
    end_with_parent(parent)
    main(rank, *given)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
