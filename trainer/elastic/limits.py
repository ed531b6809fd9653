"""What this node can start: asked before anything is started, refused with a number and a remedy.

An estimate from below: who passes may still be too big, who is refused would have failed.
"""

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.core.errors import HostError

RANK_BYTES = 128 << 20  # of its own, beside torch itself: 135 to 143 MB with the smallest models
_OTHER_FILES = 32  # a rank's open files beside one connection to each other rank


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """None: this system does not tell."""

    memory_bytes: int | None
    open_files: int | None


def node_limits(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> NodeLimits:
    """Of this node and this process, as they are now."""
    free = [_available(proc), _cgroup_free(cgroup)]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeLimits(
        memory_bytes=min((b for b in free if b is not None), default=None),
        open_files=None if soft == resource.RLIM_INFINITY else soft,
    )


def check_startable(ranks_per_node: int, world_size: int, limits: NodeLimits) -> None:
    """Raises HostError where so many ranks can not run here."""
    needed = ranks_per_node * RANK_BYTES
    if limits.memory_bytes is not None and needed > limits.memory_bytes:
        raise HostError(
            f"{ranks_per_node} ranks need {needed / 2**30:.1f} GiB of memory at the least, "
            f"{limits.memory_bytes / 2**30:.1f} GiB are available",
            remedy=f"at most {limits.memory_bytes // RANK_BYTES} with --ranks-per-node",
        )
    files = world_size + _OTHER_FILES
    if limits.open_files is not None and files > limits.open_files:
        raise HostError(
            f"each of {world_size} ranks needs {files} open files, {limits.open_files} are allowed",
            remedy=f"raise the limit with `ulimit -n {files}`, or start fewer ranks",
        )


def _available(proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_free(cgroup: Path) -> int | None:
    """Room below the limit of this process's memory group, where there is one (containers)."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())
        return max(0, limit - int((cgroup / "memory.current").read_text()))
    return None
