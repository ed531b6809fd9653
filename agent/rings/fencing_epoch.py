"""The highest term of any controller that this node has obeyed; nothing of an earlier one counts.

It outlives the agent in a file beside the rings, and in the command slots of those: a leader that
was frozen must not find an agent that has forgotten who came after it. The directory is written by
others, too: what another user has put there counts for nothing, or it would lock leaders out.
"""

import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.agent.rings.directory import write_atomically

FILE_NAME = "controller-term"
MAX_TERM = 1 << 53  # as in the controllers' record
_MAX_BYTES = 32
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class FencingEpoch:
    """`path` None: kept in memory only."""

    path: Path | None = None
    highest: int = 0

    def load(self) -> None:
        """What an earlier life of the agent has left."""
        if self.path is None:
            return
        try:
            self.highest = max(self.highest, _read(self.path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.warning("%s: %s; the command slots of rings know the term, too", self.path, error)

    def accept(self, term: int) -> bool:
        """Does what is said in this term count? A later one than any before is kept first."""
        if term <= self.highest:
            return term == self.highest
        self.highest = term
        if self.path is not None:
            try:
                write_atomically(self.path, str(term).encode())
            except OSError as error:
                _log.warning("%s: term %d is not kept: %s", self.path, term, error.strerror)
        return True


def _read(path: Path) -> int:
    """Raises OSError, and ValueError for what is no term of an agent's."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise ValueError(f"of user {status.st_uid}, who is no agent")
        term = int(file.read(_MAX_BYTES))
    if not 0 <= term <= MAX_TERM:
        raise ValueError(f"{term} is no term")
    return term
