"""Logs of a rank and of the job, for people and tests only: training never waits for them."""

import contextlib
import logging
from collections import deque
from dataclasses import replace
from pathlib import Path

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import HostError
from pacekeeper.trainer.engine.run_log import RunLog, StepRecord, json_line

_MOST_RECORDS = 4  # kept for the log of the job
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
            self._file.write(json_line(line))
            self._file.flush()
        except OSError as error:
            _log.warning("rank=%d step log given up: %s", self._rank, error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()


class JobLog:
    """The log of the job: the leader writes it, and every rank has the newest steps at hand.

    Whoever leads after a loss writes the steps that the log lacks.

    Args:
        config: Of the job.
        run_dir: Folder of `steps.jsonl`.
    """

    def __init__(self, config: EngineConfig, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._records: deque[StepRecord] = deque(maxlen=_MOST_RECORDS)
        self._log: RunLog | None = None
        self.has_evaluation = False

    def lead(self, first_step: int) -> None:
        """Write the log from now on; `first_step` comes next. Raises HostError."""
        if self._log is None:
            self._log = RunLog(
                self._run_dir,
                tensorboard_dir=self._config.tensorboard_dir,
                log_period_steps=self._config.log_period_steps,
                num_steps=self._config.steps,
                first_step=first_step,
            )

    def add(self, record: StepRecord) -> None:
        """Add a committed step."""
        self._records.append(record)

    def add_evaluation(self, loss: float) -> None:
        """Add the evaluation after the newest step."""
        self._records[-1] = replace(self._records[-1], evaluation_loss=loss)

    @property
    def has_last_step(self) -> bool:
        """Whether the newest step is the last of the run."""
        return bool(self._records) and self._records[-1].step == self._config.steps - 1

    @property
    def awaits_evaluation(self) -> bool:
        """Whether the newest step is the last of the run, and its evaluation is missing."""
        is_due = self.has_evaluation and self.has_last_step
        return is_due and self._records[-1].evaluation_loss is None

    def write(self) -> None:
        """Write the steps that the log lacks, as its leader."""
        if self._log is None:
            return
        num_written = len(self._records) - self.awaits_evaluation
        for record in list(self._records)[:num_written]:
            if record.step > self._log.last_step:
                self._log.write(record)

    def go_back(self, step: int) -> None:
        """Forget this step and later ones: training went back."""
        self._records.clear()
        if self._log is not None:
            self._log.go_back(step)

    def close(self) -> None:
        """End the files."""
        if self._log is not None:
            self._log.close()
