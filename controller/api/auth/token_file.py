"""The file of bearer tokens: for its owner only, replaced whole, read again when it changes.

While it can not be read, no token counts.
"""

import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pacekeeper.controller.api.auth.tokens import TokenRecord, decode_tokens, encode_tokens
from pacekeeper.core.errors import ConfigError, HostError

MAX_BYTES = 16 << 20
_log = logging.getLogger(__name__)
Records = tuple[TokenRecord, ...]


class TokenFile:
    """A controller's view of the file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where it can not be read now."""
        self.path = path
        self._stamp = _stamp(path)
        self._records = read_tokens(path)

    def records(self) -> Records:
        """The tokens as they are now."""
        stamp = _stamp(self.path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._records = read_tokens(self.path)
                _log.info("tokens=%s read again: %d tokens", self.path, len(self._records))
            except ConfigError as error:
                self._records = ()
                _log.error("no token counts: %s", error)
        return self._records


def read_tokens(path: Path) -> Records:
    """The tokens in a file. Raises ConfigError, saying what is wrong with it."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise ConfigError(f"{path}: no file of tokens")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path}: others than its owner may use it", remedy=f"chmod 600 {path}"
                )
            return decode_tokens(file.read(MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def change_tokens(path: Path, change: Callable[[Records], Records]) -> None:
    """Put the changed tokens in the place of those that are there; a file that is not is empty.

    Raises ConfigError for a file that is none of ours, HostError where it can not be written.
    """
    try:
        with _alone(path.parent):
            before = read_tokens(path) if path.exists() else ()
            _replace(path, encode_tokens(change(before)))
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from None


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Nobody else changes a file of tokens in this directory meanwhile."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode
