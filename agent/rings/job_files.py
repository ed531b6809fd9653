"""Files of one job's directory: list them, write plans atomically, remove plans of the past.

The writer of a file deletes it. Plans are the agent's: a plan goes when a later generation is in
force, all of them with the end of the job. Rings and layouts are the trainer's: the agent never
deletes them. A launch clears what an earlier launch of its job left; a scheduler's epilogue removes
directories of names that are not used again. The agent unmaps the rings of a job whose supervisor
reported the end of each rank, a minute after the last record, once the controller has acknowledged
everything. Rings without a supervisor are kept until their files are gone: silence is no end.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from pacekeeper.agent.rings.directory import opened
from pacekeeper.core.telemetry import shm_ring

MAX_LAYOUT_BYTES = 16 * 1024 * 1024


def list_files(directory: Path) -> dict[str, os.stat_result]:
    """Rings, layouts and plans by name. Raises OSError where the directory can not be read."""
    found = {}
    with opened(directory) as at, os.scandir(at) as entries:
        for entry in entries:
            if entry.name.endswith((".ring", ".json")) and entry.name[0] != ".":
                with contextlib.suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False)
    return found


def read_layout(path: Path) -> bytes:
    """A layout's bytes. Raises OSError, or ValueError for what can not be a layout's file."""
    # As with rings: neither a link nor a pipe of another's making is followed or waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with opened(path.parent) as at:

        def open_here(name: str, _: int) -> int:
            return os.open(name, flags, dir_fd=at)

        with open(path.name, "rb", opener=open_here) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            if status.st_size > MAX_LAYOUT_BYTES:
                raise ValueError(f"{status.st_size} bytes are no layout")
            return file.read(MAX_LAYOUT_BYTES)


def remove_plans(directory: Path, names: Iterable[str], before: int) -> None:
    """Delete plan files of generations below `before`. Raises OSError for the first that stays."""
    past = [name for name in names if _is_plan_before(name, before)]
    if not past:
        return
    with opened(directory) as at:
        for name in past:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)


def _is_plan_before(name: str, before: int) -> bool:
    generation = shm_ring.parse_plan_file_name(name)
    return generation is not None and generation < before


def write_whole(target: Path, data: bytes) -> None:
    """A file that appears whole or not at all, readable for ranks of any user. Raises OSError."""
    fresh = f".{target.name}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(target.parent) as at:
        descriptor = os.open(fresh, flags, mode=0o600, dir_fd=at)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                os.fchmod(descriptor, 0o644)
            os.rename(fresh, target.name, src_dir_fd=at, dst_dir_fd=at)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(fresh, dir_fd=at)
            raise
