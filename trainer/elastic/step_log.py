"""A rank's own log of steps and events, for people and tests only: training never waits for it."""

import contextlib
import json
import logging
from pathlib import Path

from pacekeeper.core.errors import HostError

_log = logging.getLogger(__name__)


class StepLog:
    """`steps-RANK.jsonl` below the run's directory, begun anew unless the job was started again.

    Raises HostError if it can not.
    """

    def __init__(self, run_dir: str, rank: int, *, is_continued: bool = False) -> None:
        self._rank = rank
        path = Path(run_dir) / f"steps-{rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if is_continued else "w")
        except OSError as error:
            raise HostError(
                f"can not write {path}: {error.strerror}", remedy="choose another --run-dir"
            ) from None

    def write(self, line: dict[str, object]) -> None:
        """A full disk must not end a step that all have committed: then there is no log."""
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            _log.warning("rank=%d step log given up: %s", self._rank, error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()
