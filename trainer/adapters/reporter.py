"""Shared parts of the adapters: rank and clock of a torch process, and the reporter of its work.

A foreign trainer calls its hooks in its own order and may omit some: an evaluation within a step, a
forward pass without a backward, a step that raised. The reporter drops what has no beginning or no
end and reports nothing twice.

A pass is a forward or a backward of one micro-batch. The micro-batch is reported after its last
pass; between passes its clock is suspended. Waits for other ranks within a pass are excluded
(`WaitAwareClock`). A micro-batch that the training loop itself times is `told`: then no pass is
entered, and what the experts' hooks see belongs to it.
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from pacekeeper.core.telemetry.attachment import Capability, Clock, ModelShape
from pacekeeper.core.telemetry.expert_row_features import NO_ROWS_OVER, rows_over
from pacekeeper.core.telemetry.sign_of_life import COMPUTING, EVALUATING, LOADING, STEPPING, WAITING
from pacekeeper.trainer.adapters.instrumentation.batch_features import (
    NO_FEATURES,
    features_of_batch,
)
from pacekeeper.trainer.adapters.instrumentation.collectives import WaitAwareClock
from pacekeeper.trainer.adapters.instrumentation.expert_load import ExpertCounts
from pacekeeper.trainer.adapters.instrumentation.module_passes import is_in_backward, tensors_in
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

HOLD_S, HELD = 1.0, 16  # for how long and how many micro-batches are held to be written together
_runs: Counter[str] = Counter()  # attachments of this process, by job
_P = ParamSpec("_P")
_Item = TypeVar("_Item")


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world size), each as given, else of the default process group, else of RANK
    and WORLD_SIZE in the environment.
    """
    dist = torch.distributed
    is_in_group = dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if is_in_group else int(os.environ.get("RANK", "0"))
    if world_size is None:
        world_size = (
            dist.get_world_size() if is_in_group else int(os.environ.get("WORLD_SIZE", "1"))
        )
    return rank, world_size


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
    capabilities: Iterable[Capability] = (),
) -> hooks.Hooks:
    """Call `hooks.attach` for a rank of a torch trainer, with the clock of its device.

    A process may train the same job more than once: each attachment gets a launch number of its
    own. The arguments are those of `hooks.attach`; `timing` replaces the clock of the device.

    Args:
        micro_batches_per_step: Of all ranks together: opts in to plans that give ranks unequal
            numbers of them (docs/plan-consumer.md); 0: the job is only observed.
        capabilities: Other plans that the trainer can carry out, with `model`.

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
        capabilities=[Capability.MICROBATCH_COUNTS] if micro_batches_per_step else capabilities,
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


class ToldMicrobatch(Protocol):
    """A micro-batch that the training loop times itself."""

    def infer_expert_rows(self, rows: Sequence[int] | int) -> None:
        """Add rows that the experts' hooks saw."""


@dataclass(slots=True)
class _InFlightMicrobatch:
    """A micro-batch before its last pass: features so far, and its clock while suspended."""

    work: MicrobatchFeatures = NO_FEATURES
    expert_rows: int = 0
    num_active: int = 0
    rows_over: Sequence[int] = NO_ROWS_OVER
    aside: Any = None


class Reporter:
    """Reports steps and keyed micro-batches of one rank from hooks that may come in any order.

    Use it from the training thread. No call raises.
    """

    def __init__(self, pace: hooks.Hooks, *, tensor_share: float = 1.0) -> None:
        """`tensor_share`: part of all layers that this rank holds."""
        self.pace = pace
        self.step: int | None = None  # the open step
        self.in_pass: Hashable = None  # key of the micro-batch that computes now
        self.told: ToldMicrobatch | None = None
        self.expert_counts = ExpertCounts(pace)
        own, ring = pace.timer, pace.ring
        self.clock = (
            own
            if isinstance(own, WaitAwareClock)
            else WaitAwareClock(own, ring.count_error, ring.enter_phase)
        )
        self._before_loading = STEPPING
        self._tensor_share = tensor_share
        self.open: dict[Hashable, _InFlightMicrobatch] = {}  # that have begun and not ended
        self._done: list[_InFlightMicrobatch] = []  # not yet written
        self._written_s = 0.0  # when micro-batches were last written
        self._loading_s: float | None = None  # start of the wait for input
        self.away_s: float | None = None  # start of what is not training, such as an evaluation
        self._outside_s = 0.0  # time of the open step that was not training

    @property
    def is_computing(self) -> bool:
        """Whether a micro-batch computes now, in a pass or told."""
        return self.in_pass is not None or self.told is not None

    # -- steps

    @never_raises
    def begin_step(self, step: int) -> None:
        """Start an optimizer step; open passes of an earlier one are dropped. A repeated call for
        the same step has no effect.
        """
        if self.step == step:
            return
        self.drop_micro_batches()
        self.expert_counts.forget()
        self.step, self._outside_s = step, 0.0
        self.pace.begin_step(step)

    @never_raises
    def end_step(
        self, *, tokens: int = 0, loss: float | None = None, sum_len_squared: int = 0
    ) -> None:
        """Report the end of the step and its expert loads, with tokens and loss of the global batch
        if known.
        """
        step, self.step = self.step, None
        if step is None:
            return
        self.drop_micro_batches()
        try:
            self.expert_counts.end_step(step)
        finally:
            self.pace.end_step(
                tokens=tokens,
                loss=loss,
                sum_len_squared=sum_len_squared,
                outside_s=self._outside_s,
            )

    @never_raises
    def abandon_step(self) -> None:
        """Drop the open step and its passes: its end will not be reported."""
        self.drop_micro_batches()
        self.expert_counts.forget()
        self.step = self._loading_s = self.away_s = None

    @never_raises
    def exit_training(self) -> None:
        """Mark the begin of something other than training: an evaluation, a checkpoint."""
        if self.away_s is None:
            self.away_s = time.monotonic()
            self.pace.ring.enter_phase(EVALUATING)

    @never_raises
    def enter_training(self) -> None:
        """Mark the return to training; the time in between is not part of the step."""
        if self.away_s is not None:
            self._outside_s += time.monotonic() - self.away_s
            self.away_s = None
            self.pace.ring.enter_phase(STEPPING)

    @never_raises
    def begin_loading(self) -> None:
        """Start the wait for input."""
        self._loading_s = None
        if self.away_s is None:
            self._before_loading = self.pace.ring.enter_phase(LOADING)
            self._loading_s = time.monotonic()

    @never_raises
    def end_loading(self) -> None:
        """End the wait for input."""
        if self._loading_s is not None:
            waited_s = time.monotonic() - self._loading_s
            self._loading_s = None
            self.pace.ring.enter_phase(self._before_loading)
            self.pace.input_s = (self.pace.input_s or 0.0) + waited_s

    @never_raises
    def drop_loading(self) -> None:
        """Drop the wait for input: there is none left, or it failed."""
        if self._loading_s is not None:
            self._loading_s = None
            self.pace.ring.enter_phase(self._before_loading)

    def loading(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Iterate over `items`; waits for the next item are reported as waits for input."""
        while True:
            self.begin_loading()
            try:
                item = next(items)
            except StopIteration:
                self.drop_loading()
                return
            self.end_loading()
            yield item

    # -- micro-batches

    # The next four run in every pass, and so without the frame of a decorator.

    def enter_pass(self, key: Hashable, work: MicrobatchFeatures = NO_FEATURES) -> None:
        """Start a pass of micro-batch `key`, which adds `work`; ignored within another pass."""
        if self.step is None or self.in_pass is not None or self.away_s is not None:
            return
        try:
            known = self.open.get(key)
            if known is None:
                self.pace.ring.enter_phase(COMPUTING)
                self.open[key] = _InFlightMicrobatch(work)
                self.clock.begin()
            else:
                if work is not NO_FEATURES:
                    known.work = add_features(known.work, work)
                self.clock.resume_suspended(known.aside)
            self.in_pass = key
        except Exception as error:
            self.pace.ring.count_error(error)

    def suspend_pass(self) -> None:
        """End the pass; its micro-batch has further passes."""
        key, self.in_pass = self.in_pass, None
        if key is not None:
            try:
                self.open[key].aside = self.clock.suspend()
            except Exception as error:
                self.pace.ring.count_error(error)

    def complete_pass(self) -> None:
        """End the last pass of a micro-batch, which is reported with others of its step.

        What is computed and written at once costs a third of what it costs after each micro-batch,
        when code and data have left the cache; and agents report at most once a second.
        """
        key, self.in_pass = self.in_pass, None
        if key is None:
            return
        try:
            known = self.open.pop(key)
            known.aside = self.clock.suspend()
            self.pace.ring.enter_phase(WAITING if self.clock.is_in_run else STEPPING)
            self._done.append(known)
            if len(self._done) == HELD or time.monotonic() - self._written_s > HOLD_S:
                self.write_done()
        except Exception as error:
            self.pace.ring.count_error(error)

    def write_done(self) -> None:
        """Write the completed micro-batches of the open step."""
        done, self._done = self._done, []
        self._written_s = time.monotonic()
        for known in done:
            try:
                compute = self.clock.time_of(known.aside)
                tokens, squared, _, _, _, documents, head, _ = known.work
                rows = known.expert_rows, known.num_active, known.rows_over
                work = (tokens, squared, *rows, documents, head, self._tensor_share)
                self.pace.on_microbatch_end(compute, work)
            except Exception as error:
                self.pace.ring.count_error(error)

    def add_features(self, work: MicrobatchFeatures) -> None:
        """Add features to the micro-batch that computes now, such as those of a second forward."""
        try:
            known = self.open.get(self.in_pass)
            if known is not None:
                known.work = work if known.work is NO_FEATURES else add_features(known.work, work)
        except Exception as error:
            self.pace.ring.count_error(error)

    @never_raises
    def add_expert_rows(self, rows: Sequence[int] | int) -> None:
        """Add the rows that a layer computes on each of this rank's experts, or their sum if the
        counts are on the device.
        """
        if is_in_backward():  # recomputed there
            return
        if self.told is not None:
            self.told.infer_expert_rows(rows)
            return
        known = self.open.get(self.in_pass)
        if known is None:
            return
        if isinstance(rows, int):
            known.expert_rows += rows
            return
        known.expert_rows += sum(rows)
        known.num_active += sum(n > 0 for n in rows)
        known.rows_over = [a + b for a, b in zip(known.rows_over, rows_over(rows), strict=True)]

    @never_raises
    def add_expert_loads(self, layer: int, counts: Tensor) -> None:
        """Add how many of this rank's tokens the router of `layer` sent to each expert."""
        if self.is_computing and not is_in_backward():
            self.expert_counts.add(layer, counts)

    def run_guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(*args)`; if it raises, count the error and return None."""
        try:
            return call(*args)
        except Exception as error:
            self.pace.ring.count_error(error)
            return None

    def detach(self) -> None:
        """Report late counts and end the attachment."""
        self.clock.detach()
        self.report_late()
        self.abandon_step()
        self.pace.detach()

    @never_raises
    def report_late(self) -> None:
        """Report micro-batches of an open step, and counts known since the last one."""
        self.write_done()
        self.expert_counts.tell()

    def drop_micro_batches(self) -> None:
        """Drop open micro-batches: passes without an end, whose forward was discarded."""
        self.write_done()
        self.clock.close_pass()
        self.in_pass = None
        self.open.clear()


def add_features(one: MicrobatchFeatures, more: MicrobatchFeatures) -> MicrobatchFeatures:
    """Add tokens, squared lengths and documents; a sum with an unknown part is unknown."""

    def both(a: int, b: int) -> int:
        return a + b if a and b else 0

    tokens, squared, documents = both(one[0], more[0]), both(one[1], more[1]), both(one[5], more[5])
    return (tokens, squared, one[2], one[3], one[4], documents, one[6] + more[6], one[7])


def features_of_call(arguments: Sequence[Any], named: Mapping[str, Any]) -> MicrobatchFeatures:
    """Return the features of a call of a stage: as `features_of_tokens`, else of the first tensor
    [rows, tokens, ...], such as the hidden states that stages exchange.
    """
    work = features_of_tokens(arguments, named)
    if work != NO_FEATURES:
        return work
    for tensor in (*arguments, *named.values()):
        if isinstance(tensor, Tensor) and tensor.dim() >= 2:
            return features_of_batch({"input_ids": tensor})
    return NO_FEATURES


def features_of_tokens(arguments: Sequence[Any], named: Mapping[str, Any]) -> MicrobatchFeatures:
    """Return the features of a model call: of a batch by its keys, or of a list of such batches,
    else of the first integer tensor [rows, tokens]. What has none is unknown.
    """
    first = arguments[0] if arguments and not named else None
    if isinstance(first, Tensor) and first.dim() == 2 and first.dtype is torch.int64:
        rows, length = first.shape  # as below, in less time
        return (rows * length, rows * length * length, 0, 0, NO_ROWS_OVER, rows, 0, 1.0)
    for given in (named, *arguments):
        batches = given if isinstance(given, list) else [given]
        found = [features_of_batch(batch) for batch in batches if isinstance(batch, Mapping)]
        if found and found[0] != NO_FEATURES:
            return functools.reduce(add_features, found)
    for tensor in tensors_in([*arguments, *named.values()]):
        if tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32):
            return features_of_batch({"input_ids": tensor})
    return NO_FEATURES
