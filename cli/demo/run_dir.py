"""The demo's run directory: one demo at a time, and nothing is cleared that no demo made."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pacekeeper.core.errors import ConfigError, HostError

MARKER = ".pacekeeper-demo"  # who made the directory; its lock: who uses it
FOLDERS = ("faults", "train", "logs", "traces")
FILES = ("controller.sqlite*", "report.html", "demo.png")
RINGS = ".rings"  # where the rings lie: a demo that was killed leaves them, on tmpfs
RINGS_PREFIX = "pacekeeper-demo-"


@contextmanager
def claimed(run_dir: Path) -> Iterator[Path]:
    """The directory, ours alone and without an earlier demo's files, until the `with` ends.

    Raises ConfigError where it has files and no demo made it, and HostError where another demo
    runs in it or the system refuses, now or within the `with`: a full disk, say.
    """
    try:
        lock = _lock(run_dir)
    except BlockingIOError:
        raise HostError(
            f"run directory {run_dir}: another demo runs there", remedy="choose another --run-dir"
        ) from None
    except OSError as error:
        raise _refused(run_dir, error) from None
    try:
        _clear(run_dir)
        yield run_dir
    except BrokenPipeError:
        raise  # of whoever read what the demo said: no matter of the directory
    except OSError as error:
        raise _refused(run_dir, error) from None
    finally:
        os.close(lock)


def remember_rings(run_dir: Path, ring_root: Path) -> None:
    """The next demo in this directory removes `ring_root`, should this one be killed."""
    (run_dir / RINGS).write_text(str(ring_root))


def _lock(run_dir: Path) -> int:
    """The open marker. Raises BlockingIOError where another holds it, OSError or ConfigError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in run_dir.iterdir()}
    if there and MARKER not in there:
        raise ConfigError(
            f"run directory {run_dir}: has files, and no demo made it",
            remedy="choose another --run-dir, or empty it yourself",
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


def _refused(run_dir: Path, error: OSError) -> HostError:
    where = f" ({error.filename})" if error.filename else ""
    return HostError(
        f"run directory {run_dir}: {error.strerror}{where}",
        remedy="choose another --run-dir, or make room",
    )
