"""State of a rank's process from /proc: its letter, CPU time and where it sleeps.

A rank's own pid may be of another namespace, and a pid may be given again: the process of a ring is
the one that holds its lock, as `/proc/locks` names it in the agent's namespace.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One look at a process.

    Attributes:
        letter: Of its state (proc(5)): R running, S sleeping, D uninterruptible, T stopped.
        cpu_s: CPU time of all its threads since its start.
        kernel_wait: Kernel function in which its main thread sleeps; empty: none, not readable.
    """

    letter: str
    cpu_s: float
    kernel_wait: str = ""


def lock_holder(status: os.stat_result) -> int:
    """Return the process that locked a file, in this process's namespace; 0: none is visible."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == device and int(words[4]) > 0:
            return int(words[4])
    return 0


def read_process(pid: int) -> ProcessState | None:
    """Return the state of a process; None: it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name is in brackets and may contain any character.
    fields = stat[stat.rindex(")") + 2 :].split()
    kernel_wait = ""
    with contextlib.suppress(OSError):
        kernel_wait = Path(f"/proc/{pid}/wchan").read_text()
    return ProcessState(
        letter=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        kernel_wait="" if kernel_wait == "0" else kernel_wait[:64],
    )


def catches_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, so that it does not end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.partition(":")[2], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)
