"""What tests left behind: processes that have their temporary folder, and what lies in it."""

import os
import shlex
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # who was killed is not gone at once
# The fork server's socket, which ends with this process, and torch's own cache.
USUAL = ("pymp-", "torchinductor_")


def left_behind(folder: Path) -> list[str]:
    """All of it, in words; what would end by itself is waited for."""
    give_up_s = time.monotonic() + PATIENCE_S
    while (processes := _processes(folder)) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(USUAL)]
    return [*processes, *map(str, files)]


def _processes(folder: Path) -> list[str]:
    servers: Any = forkserver._forkserver
    trackers: Any = resource_tracker._resource_tracker
    known = {os.getpid(), servers._forkserver_pid, trackers._pid}
    mark = b"\0TMPDIR=" + os.fsencode(folder) + b"\0"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in known:
            continue
        try:
            if mark in b"\0" + (process / "environ").read_bytes():
                words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
                found.append(f"process {process.name}: {shlex.join(filter(None, words))}")
        except OSError:
            continue  # it has gone, or is somebody else's
    return found
