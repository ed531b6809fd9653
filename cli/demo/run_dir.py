"""Run directory of the demo: one demo at a time; only files of earlier demos are removed."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pacekeeper.core.errors import ConfigError, HostError

MARKER = ".pacekeeper-demo"  # marks a directory of the demo; locked while a demo runs
FOLDERS = ("faults", "job", "train", "logs", "traces")
FILES = ("controller.sqlite*", "report.html", "demo.png")
RINGS = ".rings"  # path of the rings, which a killed demo leaves on tmpfs
RINGS_PREFIX = "pacekeeper-demo-"


@contextmanager
def claim_run_dir(run_dir: Path) -> Iterator[Path]:
    """Lock the run directory and remove an earlier demo's files; unlocked after the `with` block.

    Raises:
        ConfigError: the directory has files and is not one of the demo.
        HostError: another demo runs in it, or the system refuses, also within the `with` block.
    """
    try:
        lock = _lock(run_dir)
    except BlockingIOError:
        raise HostError(
            f"run directory {run_dir}: another demo is running in it",
            remedy="choose another --run-dir",
        ) from None
    except OSError as error:
        raise _host_error(run_dir, error) from None
    try:
        _clear(run_dir)
        yield run_dir
    except BrokenPipeError:
        raise  # the reader of the output ended; not an error of the directory
    except OSError as error:
        raise _host_error(run_dir, error) from None
    finally:
        os.close(lock)


def record_ring_root(run_dir: Path, ring_root: Path) -> None:
    """Record the ring directory, so that the next demo removes it if this one is killed."""
    (run_dir / RINGS).write_text(str(ring_root))


def _lock(run_dir: Path) -> int:
    """Open and lock the marker. Raises BlockingIOError, OSError or ConfigError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in run_dir.iterdir()}
    if there and MARKER not in there:
        raise ConfigError(
            f"run directory {run_dir}: not empty, and not a run directory of the demo",
            remedy="choose another --run-dir, or empty the directory",
        )
    lock = os.open(run_dir / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _clear(run_dir: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        rings = Path((run_dir / RINGS).read_text())
        if rings.name.startswith(RINGS_PREFIX):
            shutil.rmtree(rings, ignore_errors=True)
    for name in FOLDERS:
        shutil.rmtree(run_dir / name, ignore_errors=True)
        (run_dir / name).mkdir()
    for pattern in FILES:
        for stale in run_dir.glob(pattern):
            stale.unlink()


def _host_error(run_dir: Path, error: OSError) -> HostError:
    where = f" ({error.filename})" if error.filename else ""
    return HostError(
        f"run directory {run_dir}: {error.strerror}{where}",
        remedy="choose another --run-dir, or free disk space",
    )
