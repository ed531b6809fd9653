"""The highest leadership term accepted by this node: the fence against former leaders.

The term survives restarts of the agent in a file of the ring directory and in the rings' command
slots. Other users may write to the directory, so a file of another user is ignored: a forged term
would lock all controllers out.
"""

import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.agent.rings.directory import write_atomically

FILE_NAME = "controller-term"
MAX_TERM = 1 << 53  # as in the controllers' lease
_MAX_BYTES = 32
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class FencingEpoch:
    """The highest accepted term. `path` None: kept in memory only."""

    path: Path | None = None
    highest: int = 0

    def load(self) -> None:
        """Read the term left by an earlier run of the agent."""
        if self.path is None:
            return
        try:
            self.highest = max(self.highest, _read(self.path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.warning(
                "%s ignored: %s; the term is read from the rings instead", self.path, error
            )

    def accept(self, term: int) -> bool:
        """Whether a message of this term is valid; a higher term is stored first."""
        if term <= self.highest:
            return term == self.highest
        self.highest = term
        if self.path is not None:
            try:
                write_atomically(self.path, str(term).encode())
            except OSError as error:
                _log.warning("%s: term %d cannot be stored: %s", self.path, term, error.strerror)
        return True


def _read(path: Path) -> int:
    """Read the file. Raises OSError; ValueError if its owner or content is not valid."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise ValueError(f"owned by user {status.st_uid}")
        term = int(file.read(_MAX_BYTES))
    if not 0 <= term <= MAX_TERM:
        raise ValueError(f"{term} is not a term")
    return term
