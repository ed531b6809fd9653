"""The node's ring directory: claiming it, listing jobs and files, reading and writing files.

All users may write to the directory and the agent often runs as root, so no symbolic link is
followed.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pacekeeper.core.errors import HostError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import is_job_name

_WORLD_WRITABLE = 0o1777
_log = logging.getLogger(__name__)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def claim(directory: Path) -> int:
    """Create the directory if missing and lock it against other agents.

    Returns:
        Descriptor of the directory; closing it releases the lock.

    Raises:
        HostError: It cannot be created or written, or another agent holds it.
    """
    remedy = "make it writable for this user, or name another with --ring-dir"
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True)
            directory.chmod(_WORLD_WRITABLE)  # ranks of other users create their job's directory
        elif directory.is_symlink() and directory.lstat().st_uid not in (0, os.geteuid()):
            raise HostError(
                f"ring directory {directory}: a symbolic link of another user", remedy=remedy
            )
        _take_ownership(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
        lock = os.open(directory, _DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileExistsError:
        raise HostError(f"ring directory {directory}: is not a directory", remedy=remedy) from None
    except BlockingIOError:
        os.close(lock)
        raise HostError(
            f"ring directory {directory}: another agent reads it",
            remedy="stop that agent, or name another directory with --ring-dir",
        ) from None
    except OSError as error:
        raise HostError(f"ring directory {directory}: {error.strerror}", remedy=remedy) from None
    return lock


def _take_ownership(directory: Path) -> None:
    """Make root the owner of a directory that a rank has created: its owner may delete files."""
    if os.geteuid() != 0:
        return
    descriptor = os.open(directory, _DIRECTORY)
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != 0:
            os.fchown(descriptor, 0, -1)
            os.fchmod(descriptor, _WORLD_WRITABLE)
            _log.warning(
                "rings=%s was created by user %d and is now owned by root", directory, owner
            )
    except PermissionError:  # root without CAP_CHOWN, as in a container
        _log.warning(
            "rings=%s stays owned by user %d, who can delete the agent's files there",
            directory,
            owner,
        )
    finally:
        os.close(descriptor)


def list_jobs(directory: Path) -> tuple[dict[str, int | None], list[str]]:
    """List the jobs of a ring directory.

    Returns:
        mtime_ns by job directory, None if it cannot be read (the job is polled all the same); and
        the symbolic links with the name of a job.

    Raises:
        OSError: The ring directory cannot be read.
    """
    found: dict[str, int | None] = {}
    links: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not is_job_name(entry.name):
                continue
            try:
                if entry.is_symlink():
                    links.append(entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError:
                found[entry.name] = None
    return found, links


@contextlib.contextmanager
def open_directory(directory: Path) -> Iterator[int]:
    """Open a job's directory; a symbolic link in its place is an OSError."""
    descriptor = os.open(directory, _DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


MAX_LAYOUT_BYTES = 16 * 1024 * 1024


def list_files(directory: Path) -> dict[str, os.stat_result]:
    """Rings, layouts and plans by name. Raises OSError if the directory cannot be read."""
    found = {}
    with open_directory(directory) as at, os.scandir(at) as entries:
        for entry in entries:
            if entry.name.endswith((".ring", ".json")) and entry.name[0] != ".":
                with contextlib.suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False)
    return found


def read_layout(path: Path) -> bytes:
    """The bytes of a layout file. Raises OSError; ValueError if it is not a file of that size."""
    # As with rings: do not follow symbolic links, do not block on pipes.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open_directory(path.parent) as at:

        def open_here(name: str, _: int) -> int:
            return os.open(name, flags, dir_fd=at)

        with open(path.name, "rb", opener=open_here) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            if status.st_size > MAX_LAYOUT_BYTES:
                raise ValueError(f"{status.st_size} bytes, a layout has at most {MAX_LAYOUT_BYTES}")
            return file.read(MAX_LAYOUT_BYTES)


def remove_plans(directory: Path, names: Iterable[str], before: int) -> None:
    """Delete plan files of generations below `before`. Raises OSError at the first failure."""
    past = [name for name in names if _is_plan_before(name, before)]
    if not past:
        return
    with open_directory(directory) as at:
        for name in past:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)


def _is_plan_before(name: str, before: int) -> bool:
    generation = shm_ring.parse_plan_file_name(name)
    return generation is not None and generation < before


def write_atomically(target: Path, data: bytes) -> None:
    """Write a file by rename, readable for all users. Raises OSError."""
    fresh = f".{target.name}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_directory(target.parent) as at:
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
