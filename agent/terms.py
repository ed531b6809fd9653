"""The highest term of any controller that this node has obeyed; nothing of an earlier one counts.

It outlives the agent in a file beside the rings, and in the command slots of those: a leader that
was frozen must not find an agent that has forgotten who came after it.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.agent.job_files import write_whole

FILE_NAME = "controller-term"
_MOST_BYTES = 32
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Terms:
    """`path` None: kept in memory only."""

    path: Path | None = None
    seen: int = 0

    def load(self) -> None:
        """What an earlier life of the agent has left."""
        if self.path is None:
            return
        try:
            with self.path.open("rb") as file:
                self.seen = max(self.seen, int(file.read(_MOST_BYTES)))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.warning("%s: %s; the command slots of rings know the term, too", self.path, error)

    def take(self, term: int) -> bool:
        """Does what is said in this term count? A later one than any before is kept first."""
        if term <= self.seen:
            return term == self.seen
        self.seen = term
        if self.path is not None:
            try:
                write_whole(self.path, str(term).encode())
            except OSError as error:
                _log.warning("%s: term %d is not kept: %s", self.path, term, error.strerror)
        return True
