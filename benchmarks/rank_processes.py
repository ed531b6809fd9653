"""Runs ranks of a job as processes of this machine."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any


def run_processes(main: Callable[..., None], count: int, *given: Any) -> None:
    """Run `main(rank, *given)` in `count` fresh processes; if one fails, end the others.

    Raises:
        RuntimeError: A process failed; its error is on the terminal.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=main, args=(rank, *given)) for rank in range(count)]
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
