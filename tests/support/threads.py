"""Native threads of this process, which `threading` does not list."""

import os
import time


def num_threads() -> int:
    """Number of threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


def until_ended(count: int, patience_s: float = 20.0) -> None:
    """Wait until at most `count` threads run: the kernel lists a joined one for a moment."""
    give_up_s = time.monotonic() + patience_s
    while num_threads() > count:
        assert time.monotonic() < give_up_s, f"{num_threads()} threads run, {count} are expected"
        time.sleep(0.01)
