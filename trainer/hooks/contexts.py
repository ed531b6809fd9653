"""`with` blocks of the hooks: a step, a micro-batch, waits for ranks and for input, other phases.

Needs the standard library only. The blocks are classes, since `contextlib` runs about a hundred
lines of Python around each generator. The ring counts exceptions of the timer (it may be the
trainer's own); they never reach the training loop.
"""

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from pacekeeper.core.telemetry.expert_row_features import rows_over
from pacekeeper.core.telemetry.sign_of_life import COMPUTING, LOADING, STEPPING, WAITING
from pacekeeper.trainer.hooks.compute_timers import ComputeTime, SegmentClock
from pacekeeper.trainer.hooks.ring_writer import Ring

# tokens, sum of squared lengths, expert rows, active experts, rows over the knots, documents,
# tokens at the head, tensor share
MicrobatchFeatures = tuple[int, int, int, int, Sequence[int], int, int, float]


class HookCalls(Protocol):
    """The part of `hooks.Hooks` that the blocks call."""

    ring: Ring
    timer: SegmentClock
    input_s: float | None

    def begin_step(self, step: int) -> None:
        """Start a step."""

    def on_microbatch_end(self, compute: ComputeTime | None, features: MicrobatchFeatures) -> None:
        """Report a micro-batch."""

    def end_step(self, *, tokens: int, loss: float | None = None, sum_len_squared: int = 0) -> None:
        """Report the end of a step."""


class StepResult:
    """Result of a step, set inside its block: tokens, squared lengths and loss of the global batch.

    Values that are not set stay 0 and None.
    """

    __slots__ = ("_calls", "_step", "loss", "sum_len_squared", "tokens")

    def __init__(self, calls: HookCalls, step: int, tokens: int, sum_len_squared: int) -> None:
        self._calls = calls
        self._step = step
        self.tokens = tokens
        self.sum_len_squared = sum_len_squared
        self.loss: float | None = None

    def __enter__(self) -> "StepResult":
        self._calls.begin_step(self._step)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._calls.end_step(
                tokens=self.tokens, loss=self.loss, sum_len_squared=self.sum_len_squared
            )


class MicrobatchTimer:
    """Times its body as a micro-batch; if the body raises, nothing is reported.

    Features known only inside, such as the rows of the experts, are added to the object it yields.
    """

    __slots__ = ("_calls", "_features")

    def __init__(self, calls: HookCalls, features: MicrobatchFeatures) -> None:
        self._calls = calls
        self._features = features

    def __enter__(self) -> "MicrobatchTimer":
        calls = self._calls
        try:
            calls.ring.enter_phase(COMPUTING)
            calls.timer.begin()
        except Exception as error:
            calls.ring.count_error(error)
        return self

    def add_expert_rows(self, rows: Sequence[int] | int) -> None:
        """Add the rows that a layer computes on this rank's experts.

        Args:
            rows: Rows of each local expert, or their sum if the counts are on the device. Call it
                once per layer, not again in recomputation.
        """
        try:
            tokens, squared, known, active, over, documents, head, share = self._features
            if isinstance(rows, int):
                known += rows
            else:
                known += sum(rows)
                active += sum(n > 0 for n in rows)
                over = [a + b for a, b in zip(over, rows_over(rows), strict=True)]
            self._features = (tokens, squared, known, active, over, documents, head, share)
        except Exception as error:
            self._calls.ring.count_error(error)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        calls = self._calls
        calls.ring.enter_phase(STEPPING)
        if kind is None:
            compute = None
            try:
                compute = calls.timer.end()
            except Exception as trouble:
                calls.ring.count_error(trouble)
            calls.on_microbatch_end(compute, self._features)


class Waiting:
    """Pauses the micro-batch's timer. One object is reused; of nested blocks the outer counts."""

    __slots__ = ("_before", "_ring", "_timer")

    def __init__(self, timer: SegmentClock, ring: Ring) -> None:
        self._timer = timer
        self._ring = ring
        self._before = COMPUTING

    def __enter__(self) -> None:
        try:
            before = self._ring.enter_phase(WAITING)
            if before != WAITING:
                self._before = before
            self._timer.pause()
        except Exception as error:
            self._ring.count_error(error)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._timer.resume()
            self._ring.enter_phase(self._before)
        except Exception as trouble:
            self._ring.count_error(trouble)


class Loading:
    """Adds the time of its body to the step's input wait."""

    __slots__ = ("_before", "_began_s", "_calls")

    def __init__(self, calls: HookCalls) -> None:
        self._calls = calls
        self._began_s = 0.0
        self._before = STEPPING

    def __enter__(self) -> None:
        self._before = self._calls.ring.enter_phase(LOADING)
        self._began_s = time.monotonic()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        calls = self._calls
        calls.input_s = (calls.input_s or 0.0) + time.monotonic() - self._began_s
        calls.ring.enter_phase(self._before)


class InPhase:
    """Publishes that its body is a phase of its own, such as saving a checkpoint."""

    __slots__ = ("_before", "_phase", "_ring")

    def __init__(self, ring: Ring, phase: int) -> None:
        self._ring, self._phase, self._before = ring, phase, STEPPING

    def __enter__(self) -> None:
        self._before = self._ring.enter_phase(self._phase)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._ring.enter_phase(self._before)


class WaitOfThread(InPhase):
    """A wait for other ranks, published if the training thread waits and not another one."""

    __slots__ = ("_is_own",)

    def __init__(self, ring: Ring, thread: int) -> None:
        super().__init__(ring, WAITING)
        self._is_own = threading.get_ident() == thread

    def __enter__(self) -> None:
        if self._is_own:
            super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._is_own:
            super().__exit__(kind, error, trace)
