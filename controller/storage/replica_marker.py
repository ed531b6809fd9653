"""The mark beside a store that is a standby's copy: what is damaged there a leader still has whole.

`STORE.standby` bears the copy's name. It is written before a snapshot takes the store's place and
goes before the store is led, so whoever is killed in between has a mark too many for a store that
can be read, which the other name in it tells, or one too few, which keeps what is damaged.
"""

import contextlib
import os
from pathlib import Path

from pacekeeper.core.errors import HostError

MARK = ".standby"


def read_marker(path: Path) -> str | None:
    """The name of the copy that stands, or stood, at `path`; None: no copy. Raises HostError."""
    try:
        return Path(f"{path}{MARK}").read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from None


def write_marker(path: Path, name: str) -> None:
    """What stands at `path` from now on is a leader's copy of this name. Raises OSError."""
    descriptor = os.open(f"{path}{MARK}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(descriptor)
    make_durable(path.parent)


def remove_marker(path: Path) -> None:
    """It is no copy of anybody's any more, whatever happens next. Raises HostError."""
    try:
        os.unlink(f"{path}{MARK}")
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(path, error) from None
    make_durable(path.parent)


def make_durable(folder: Path) -> None:
    """The names in it, too. Some network file systems refuse that: there they are at once."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _unusable(path: Path, error: OSError) -> HostError:
    return HostError(
        f"{path}{MARK}: {error.strerror or error}", remedy="let this user read and delete it"
    )
