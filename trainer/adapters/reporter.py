"""Shared parts of the adapters: the device's clock, and a reporter that tolerates any call order.

A foreign trainer calls its hooks in its own order and may omit some: an evaluation within a step, a
forward pass without a backward, a step that raised. The reporter drops what has no beginning or no
end and reports nothing twice. No call raises.
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import torch

from pacekeeper.core.telemetry.attachment import Capability, Clock, ModelShape
from pacekeeper.core.telemetry.expert_row_features import NO_ROWS_OVER
from pacekeeper.trainer.groups.devices import device_uuid, new_event
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.hooks.compute_timers import (
    CpuClock,
    DeviceEventClock,
    SegmentClock,
    WallClock,
)
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures
from pacekeeper.trainer.hooks.hooks import run_id_from_environment

NO_FEATURES: MicrobatchFeatures = (0, 0, 0, 0, NO_ROWS_OVER, 0, 0, 1.0)
_runs: Counter[str] = Counter()  # attachments of this process, by job
_P = ParamSpec("_P")


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world size): as given, else of the default process group, else of RANK and
    WORLD_SIZE in the environment.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def default_clock(device: torch.device) -> tuple[Clock, SegmentClock]:
    """Return the clock for `device`: CUDA events, CPU time of the thread, or wall time."""
    if device.type == "cuda":
        return Clock.CUDA, DeviceEventClock(new_event)
    if device.type == "cpu":
        return Clock.CPU, CpuClock()
    return Clock.WALL, WallClock()


def can_time(device: torch.device) -> bool:
    """Whether compute on `device` can be timed; on others the host sees only launch times."""
    return device.type in ("cpu", "cuda")


def attach(
    *,
    job: str,
    device: torch.device,
    rank: int | None = None,
    world_size: int | None = None,
    role: str = "train",
    ring_dir: str | None = None,
    model: ModelShape | None = None,
    timing: tuple[Clock, SegmentClock] | None = None,
    micro_batches_per_step: int = 0,
) -> hooks.Hooks:
    """Call `hooks.attach` for a rank of a torch trainer, with the clock of its device.

    A process may train the same job more than once: each attachment gets a launch number of its
    own. The arguments are those of `hooks.attach`; `timing` replaces the clock of the device.

    Args:
        micro_batches_per_step: Of all ranks together: opts in to plans that give ranks unequal
            numbers of them (docs/plan-consumer.md); 0: the job is only observed.

    Raises:
        ValueError: If the job name, rank or launch number is invalid.
    """
    rank, world_size = rank_and_world_size(rank, world_size)
    clock, timer = timing or default_clock(device)
    if micro_batches_per_step:
        model = shape_of_micro_batches(micro_batches_per_step)
    run_id = run_id_from_environment() + _runs[job]
    _runs[job] += 1
    return hooks.attach(
        job=job,
        rank=rank,
        world_size=world_size,
        ring_dir=ring_dir,
        role=role,
        run_id=run_id,
        model=model,
        clock=clock,
        timer=timer,
        device_uuid=device_uuid(device) if device.type == "cuda" else "",
        capabilities=[Capability.MICROBATCH_COUNTS] if micro_batches_per_step else (),
    )


def shape_of_micro_batches(micro_batches_per_step: int) -> ModelShape:
    """Return the shape of a job whose plans change only the micro-batches of each rank."""
    return ModelShape(
        num_layers=1,
        num_experts=0,
        experts_per_token=0,
        rows_per_step=micro_batches_per_step,
        slots_per_rank=0,
        expert_bytes=0,
        dense_bytes=0,
    )


def never_raises(
    call: Callable[Concatenate[Any, _P], None],
) -> Callable[Concatenate[Any, _P], None]:
    """Decorator: exceptions of `call` are counted by the ring and not raised."""

    @functools.wraps(call)
    def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            call(self, *args, **kwargs)
        except Exception as error:
            self.pace.ring.count_error(error)

    return guarded


class StepReporter:
    """Reports steps and micro-batches of one rank from hooks that may come in any order."""

    def __init__(self, pace: hooks.Hooks) -> None:
        self.pace = pace
        self.step: int | None = None  # the open step
        self._work: MicrobatchFeatures | None = None  # features of the open micro-batch
        self._is_paused = False
        self._loading_s: float | None = None  # start of the wait for input
        self._away_s: float | None = None  # start of an evaluation or another pause of training
        self._outside_s = 0.0  # time of the open step that was not training

    @property
    def is_computing(self) -> bool:
        """Whether a micro-batch is open, paused or not."""
        return self._work is not None

    @never_raises
    def begin_step(self, step: int) -> None:
        """Start an optimizer step; a repeated call for the same step has no effect."""
        if self.step == step:
            return
        self.step, self._work, self._outside_s = step, None, 0.0
        self.pace.begin_step(step)

    @never_raises
    def begin_microbatch(self, work: MicrobatchFeatures = NO_FEATURES) -> None:
        """Start a micro-batch, or add features to the open one."""
        if self.step is None or self._away_s is not None:
            return
        if self._work is None:
            self._work, self._is_paused = work, False
            self.pace.timer.begin()
            return
        self._work = sum_of_features(self._work, work)
        self._resume()

    @never_raises
    def pause(self) -> None:
        """Pause the open micro-batch: a wait for other ranks begins."""
        if self._work is not None and not self._is_paused:
            self._is_paused = True
            self.pace.timer.pause()

    @never_raises
    def resume(self) -> None:
        """Resume the open micro-batch."""
        self._resume()

    @never_raises
    def end_microbatch(self) -> None:
        """End and report the open micro-batch, if there is one."""
        if self._work is None:
            return
        self._resume()
        work, self._work = self._work, None
        self.pace.on_microbatch_end(self.pace.timer.end(), work)

    @never_raises
    def drop_microbatch(self) -> None:
        """Drop the open micro-batch without a report."""
        self._work = None

    @never_raises
    def end_step(
        self, *, tokens: int = 0, loss: float | None = None, sum_len_squared: int = 0
    ) -> None:
        """Report the end of the step, with tokens and loss of the global batch if known."""
        if self.step is None:
            return
        self._work = self.step = None
        self.pace.end_step(
            tokens=tokens,
            loss=loss,
            sum_len_squared=sum_len_squared,
            outside_s=self._outside_s,
        )

    @never_raises
    def abandon_step(self) -> None:
        """Drop the open step: its end will not be reported."""
        self._work = self.step = self._loading_s = self._away_s = None

    @never_raises
    def exit_training(self) -> None:
        """Mark the begin of something other than training: an evaluation, a checkpoint."""
        if self._away_s is None:
            self._away_s, self._work = time.monotonic(), None

    @never_raises
    def enter_training(self) -> None:
        """Mark the return to training; the time in between is not part of the step."""
        if self._away_s is not None:
            self._outside_s += time.monotonic() - self._away_s
            self._away_s = None

    @never_raises
    def begin_loading(self) -> None:
        """Start the wait for input; an earlier one without an end is dropped."""
        self._loading_s = None if self._away_s is not None else time.monotonic()

    @never_raises
    def end_loading(self) -> None:
        """End the wait for input."""
        if self._loading_s is not None:
            waited_s = time.monotonic() - self._loading_s
            self._loading_s = None
            self.pace.input_s = (self.pace.input_s or 0.0) + waited_s

    def detach(self) -> None:
        """End the attachment."""
        self.abandon_step()
        self.pace.detach()

    def _resume(self) -> None:
        if self._work is not None and self._is_paused:
            self._is_paused = False
            self.pace.timer.resume()


def sum_of_features(one: MicrobatchFeatures, more: MicrobatchFeatures) -> MicrobatchFeatures:
    """Add the features of two passes of one micro-batch; a sum with an unknown part is unknown."""

    def both(a: int, b: int) -> int:
        return a + b if a and b else 0

    over = tuple(a + b for a, b in zip(one[4], more[4], strict=True))
    return (
        both(one[0], more[0]),
        both(one[1], more[1]),
        one[2] + more[2],
        one[3] + more[3],
        over,
        both(one[5], more[5]),
        one[6] + more[6],
        one[7],
    )
