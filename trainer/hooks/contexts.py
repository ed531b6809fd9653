"""The `with` blocks of the seam: a step, a micro-batch, a wait for others, a wait for input.

Standard library only: part of the seam. Classes and not generators: `contextlib` runs some hundred
lines of Python around each, and after a trainer's own work every line is cold. What a timer raises
- it may be a device's or the trainer's own - is counted by the ring and stops nobody.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from pacekeeper.core.telemetry.expert_row_features import rows_over
from pacekeeper.trainer.hooks.compute_timers import ComputeTime, SegmentClock
from pacekeeper.trainer.hooks.ring_writer import Ring

# Of a micro-batch: tokens, tokens^2, expert rows, active experts, rows over the knots, documents,
# tokens at the head, tensor share.
Work = tuple[int, int, int, int, Sequence[int], int, int, float]


class Moments(Protocol):
    """What a block tells of its beginning and its end: `hooks.Hooks`."""

    ring: Ring
    timer: SegmentClock
    input_s: float | None

    def step_began(self, step: int) -> None:
        """Moment 2."""

    def told(self, compute: ComputeTime | None, work: Work) -> None:
        """Moment 3."""

    def step_ended(
        self, *, tokens: int, loss: float | None = None, sum_len_squared: int = 0
    ) -> None:
        """Moment 4."""


class StepResult:
    """What a step came to: tokens, squared lengths and loss of the global batch; 0 and None where
    nobody says.
    """

    __slots__ = ("_moments", "_step", "loss", "sum_len_squared", "tokens")

    def __init__(self, moments: Moments, step: int, tokens: int, sum_len_squared: int) -> None:
        self._moments = moments
        self._step = step
        self.tokens = tokens
        self.sum_len_squared = sum_len_squared
        self.loss: float | None = None

    def __enter__(self) -> "StepResult":
        self._moments.step_began(self._step)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._moments.step_ended(
                tokens=self.tokens, loss=self.loss, sum_len_squared=self.sum_len_squared
            )


class MicroBatchTimer:
    """Measures what runs in it. A micro-batch that raises is not told.

    What is known only inside, such as the rows that its experts got, is told to what it hands out.
    """

    __slots__ = ("_moments", "_work")

    def __init__(self, moments: Moments, work: Work) -> None:
        self._moments = moments
        self._work = work

    def __enter__(self) -> "MicroBatchTimer":
        try:
            self._moments.timer.begin()
        except Exception as error:
            self._moments.ring.count_error(error)
        return self

    def adds_rows(self, rows: Sequence[int] | int) -> None:
        """In it, a layer computes so many rows at each expert of this rank; one number where only
        the device knows which has how many. Once for each layer, not again where it is recomputed.
        """
        try:
            tokens, squared, known, active, over, documents, head, share = self._work
            if isinstance(rows, int):
                known += rows
            else:
                known += sum(rows)
                active += sum(n > 0 for n in rows)
                over = [a + b for a, b in zip(over, rows_over(rows), strict=True)]
            self._work = (tokens, squared, known, active, over, documents, head, share)
        except Exception as error:
            self._moments.ring.count_error(error)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            moments, compute = self._moments, None
            try:
                compute = moments.timer.end()
            except Exception as trouble:
                moments.ring.count_error(trouble)
            moments.told(compute, self._work)


class Waiting:
    """What runs in it does not count as compute. It holds nothing, so one is enough."""

    __slots__ = ("_ring", "_timer")

    def __init__(self, timer: SegmentClock, ring: Ring) -> None:
        self._timer = timer
        self._ring = ring

    def __enter__(self) -> None:
        try:
            self._timer.pause()
        except Exception as error:
            self._ring.count_error(error)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._timer.resume()
        except Exception as trouble:
            self._ring.count_error(trouble)


class Loading:
    """What runs in it is the wait for input."""

    __slots__ = ("_began_s", "_moments")

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        moments = self._moments
        moments.input_s = (moments.input_s or 0.0) + time.monotonic() - self._began_s
