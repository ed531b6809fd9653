"""What a run writes: lines on the console, `steps.jsonl`, and TensorBoard events where asked for.

Called on one rank of a job, with values that are in host memory already.
"""

import contextlib
import json
import logging
import math
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pacekeeper.core.errors import HostError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of `steps.jsonl`.

    Attributes:
        step: From 0 on.
        loss: Mean over the targets of the global batch, in nats.
        grad_norm: L2 norm of all gradients before clipping.
        learning_rate: Of this step.
        tokens: Of the global batch.
        seconds: From the end of the step before to the end of this one, evaluation included.
        generation: Of the layout.
        evaluation_loss: Mean loss of the evaluation after this step; None: there was none.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    generation: int
    evaluation_loss: float | None = None


class RunLog:
    """The output of one run.

    Attributes:
        last_step: The newest step in `steps.jsonl`; -1: none.

    Args:
        run_dir: Folder of `steps.jsonl`.
        tensorboard_dir: Folder of TensorBoard events; "": none.
        log_period_steps: Steps between two lines on the console.
        num_steps: Steps of the run: the last one is shown, too.
        first_step: The step that comes next: earlier ones of the file stay, others are removed.
        show: Prints a line of the console.

    Raises:
        HostError: The folder cannot be written, or TensorBoard is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard_dir: str = "",
        log_period_steps: int = 1,
        num_steps: int = 0,
        first_step: int = 0,
        show: Callable[[str], None] = _log.info,
    ) -> None:
        self._period, self._num_steps, self._show = log_period_steps, num_steps, show
        self._tokens, self._seconds = 0, 0.0
        self._board = _summary_writer(tensorboard_dir) if tensorboard_dir else None
        path = run_dir / "steps.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b" if first_step else "w+b")
            self.last_step = _cut(self._file, first_step) if first_step else -1
        except OSError as error:
            raise HostError(
                f"cannot write {path}: {error.strerror}", remedy="choose another --run-dir"
            ) from None

    def close(self) -> None:
        """End the files."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._board is not None:
            self._board.close()

    def go_back(self, step: int) -> None:
        """Remove this step and later ones: they are done again."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self.last_step = _cut(self._file, step)

    def write(self, record: StepRecord) -> None:
        """Write a step; a full disk ends the file, not the training."""
        self.last_step = record.step
        values = {name: value for name, value in asdict(record).items() if value is not None}
        if not self._file.closed:
            try:
                self._file.write(json_line(values).encode())
                self._file.flush()
            except OSError as error:
                _log.warning("steps.jsonl ends at step %d: %s", record.step, error.strerror)
                with contextlib.suppress(OSError):
                    self._file.close()
        if self._board is not None:
            for name in ("loss", "grad_norm", "learning_rate", "evaluation_loss"):
                if name in values:
                    self._board.add_scalar(f"train/{name}", values[name], record.step)
        self._tokens += record.tokens
        self._seconds += record.seconds
        done = record.step + 1
        if done % self._period == 0 or done == self._num_steps:
            rate = self._tokens / max(self._seconds, 1e-9)
            self._show(
                f"step {done} loss {record.loss:.4f} learning rate {record.learning_rate:.3g} "
                f"gradient norm {record.grad_norm:.3g} {rate:,.0f} tokens/s"
            )
            self._tokens, self._seconds = 0, 0.0
        if record.evaluation_loss is not None:
            self._show(f"step {done} evaluation loss {record.evaluation_loss:.4f}")


def json_line(values: Mapping[str, object]) -> str:
    """Return one line of JSON; numbers that are not finite, as of a skipped step, become null."""
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return json.dumps(known, allow_nan=False) + "\n"


def _cut(file: BinaryIO, step: int) -> int:
    """Remove a step and what follows it; return the last step that stays, -1 if none does.

    Lines are read from the end on: few go, of many.
    """
    last, end = -1, file.seek(0, os.SEEK_END)
    if end:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            while end:
                first = lines.rfind(b"\n", 0, end - 1) + 1
                last = _step_of(lines[first:end])
                if 0 <= last < step:
                    break
                last, end = -1, first
    file.seek(end)
    file.truncate()
    return last


def _step_of(line: bytes) -> int:
    """The step of a line; -1 for one that is damaged, or was not ended."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else -1
    return -1


def _summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise HostError(
            "tensorboard_dir is set, and the package tensorboard is not installed here",
            remedy="run `pip install tensorboard`, or leave tensorboard_dir out",
        ) from None
    try:
        return SummaryWriter(folder)
    except OSError as error:
        raise HostError(
            f"cannot write {folder}: {error.strerror}", remedy="choose another tensorboard_dir"
        ) from None
