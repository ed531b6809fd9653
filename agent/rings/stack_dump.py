"""Dumps the stacks of one rank's process, within limits of size and time.

A process that has registered a handler (`trainer/hooks/stack_dump.py`) writes its stacks to a file
in its ring's directory when it receives the signal. If the process is stopped or has no handler,
`py-spy` reads its stacks, where that is installed. A dump blocks for seconds, so the agent runs it
in a separate thread.
"""

import contextlib
import os
import shutil
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.agent.host.process_state import catches_signal, read_process
from pacekeeper.core.telemetry.shm_ring import stack_file_name
from pacekeeper.core.telemetry.sign_of_life import (
    MAX_STACK_BYTES,
    STOPPED,
    UNINTERRUPTIBLE,
    RankStack,
)

SIGNAL_S = 2.0  # for the first line of a process that handles the signal
SETTLED_S = 0.1  # without further lines: the dump is whole
PY_SPY_S = 10.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpTarget:
    """The process of a rank. `pid`: 0: not visible to the agent; `signal`: 0: no handler."""

    rank: int
    ring: Path
    pid: int
    signal: int


def take_dump(target: DumpTarget) -> RankStack:
    """Dump the stacks of a rank's process; without a dump the text is the reason."""
    rank, pid = target.rank, target.pid
    process = read_process(pid) if pid else None
    if process is None:
        why = "the agent cannot see its process: it needs the pid namespace of the node"
        return RankStack(rank=rank, source="", text=why)
    why = "its process has no handler for a dump"
    if process.letter in STOPPED:
        why = "its process is stopped"
    elif process.letter == UNINTERRUPTIBLE:
        why = "its process is in uninterruptible sleep"
    elif target.signal and catches_signal(pid, target.signal):
        if text := _by_signal(target):
            return RankStack(rank=rank, source="faulthandler", text=text)
        why = f"its process did not answer the signal within {SIGNAL_S:g} s"
    text, trouble = _by_py_spy(pid)
    if text:
        return RankStack(rank=rank, source="py-spy", text=text)
    if kernel := _kernel_stack(pid):
        return RankStack(rank=rank, source="kernel", text=kernel)
    return RankStack(rank=rank, source="", text=f"{why}, and {trouble}")


def _by_signal(target: DumpTarget) -> str:
    """Send the signal and return what the process then wrote; empty: nothing, in time."""
    path = target.ring.with_name(stack_file_name(target.ring.name))
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        before = size = os.fstat(descriptor).st_size
        os.kill(target.pid, target.signal)
        end_s = time.monotonic() + SIGNAL_S
        grown_s = time.monotonic()
        while time.monotonic() < end_s:
            time.sleep(_POLL_S)
            if (now := os.fstat(descriptor).st_size) != size:
                size, grown_s = now, time.monotonic()
            elif size > before and time.monotonic() - grown_s > SETTLED_S:
                break
        data = os.pread(descriptor, MAX_STACK_BYTES, before)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return data.decode(errors="replace").strip()


def _by_py_spy(pid: int) -> tuple[str, str]:
    """Return a dump by py-spy, which only reads, or ("", why there is none)."""
    program = shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed for the agent"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, timeout=PY_SPY_S, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode == 0 and done.stdout:
            return done.stdout[:MAX_STACK_BYTES].decode(errors="replace").strip(), ""
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return "", f"py-spy failed: {said[0] if said else done.returncode}"
    return "", f"py-spy did not end within {PY_SPY_S:g} s"


def _kernel_stack(pid: int) -> str:
    """Return the kernel's stack of the main thread; empty: not readable (root only)."""
    try:
        return Path(f"/proc/{pid}/stack").read_text()[:MAX_STACK_BYTES].strip()
    except OSError:
        return ""
