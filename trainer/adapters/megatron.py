"""Adapter for Megatron-LM and Megatron-Core: reports passes from the schedules' timers.

    watch = megatron.watch(chunks, job="my-run", optimizer=optimizer)  # Megatron-Core
    pretrain(..., megatron.watched(forward_step, job="my-run"))        # Megatron-LM

Megatron-Core calls `config.timers` with a name when a pass begins and ends; the adapter wraps the
object there and still calls it. Imports only modules that Megatron has loaded.
docs/trainer-megatron.md lists what was tested and what cannot be observed.
"""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pacekeeper.trainer.adapters.instrumentation.batch_features import NO_FEATURES
from pacekeeper.trainer.adapters.instrumentation.expert_hooks import watch_experts
from pacekeeper.trainer.adapters.instrumentation.patching import Wrapping
from pacekeeper.trainer.adapters.reporter import Reporter, attach, features_of_call
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

WorkOf = Callable[[tuple[Any, ...], Mapping[str, Any]], MicrobatchFeatures]
_LM = "megatron.training.global_vars"
_PARALLEL = "megatron.core.parallel_state"
_ALL = "all"  # key of all passes of a step with virtual stages: one record


def watch(
    chunks: Sequence[Any] | Any,
    *,
    job: str,
    optimizer: Any = None,
    first_step: int = 0,
    work_of: WorkOf | None = None,
    ring_dir: str | None = None,
) -> "ScheduleWatch":
    """Report every training step that a schedule runs on this rank's model.

    Args:
        chunks: The model, or its chunks of virtual stages.
        job: Name of the job.
        optimizer: A step ends when it has stepped; without it, and without Megatron-LM's timers,
            when its passes have ended.
        first_step: Number of the first step, if Megatron-LM's iteration is unknown.
        work_of: Returns the features of a chunk's call (default: from the shape of its first
            tensor). It must not read tensors of a device.
        ring_dir: The agent's ring directory.

    Raises:
        ValueError: If the job name is invalid.
    """
    chunks = list(chunks) if isinstance(chunks, list | tuple) else [chunks]
    parameter = next(chunks[0].parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    stage, num_stages = _parallel_rank("pipeline_model_parallel")
    _, num_shards = _parallel_rank("tensor_model_parallel")
    pace = attach(
        job=job,
        device=device,
        ring_dir=ring_dir,
        role=f"stage{stage}" if num_stages > 1 else "train",
    )
    reporter = Reporter(pace, tensor_share=1.0 / (num_stages * num_shards))
    return ScheduleWatch(reporter, chunks, optimizer, first_step, work_of or _work_of_chunk)


def watched(forward_step: Callable[..., Any], *, job: str, **more: Any) -> Callable[..., Any]:
    """Wrap Megatron-LM's `forward_step(data_iterator, model)`; attach at its first call.

    The step of the first call is not reported, since it has begun already. Waits for the iterator
    are reported as waits for input.
    """
    watching: list[ScheduleWatch] = []

    def step(data_iterator: Any, model: Any, *rest: Any, **named: Any) -> Any:
        if not watching:
            watching.append(watch(model, job=job, **more))
        one = watching[0]
        one.sees(model)
        return forward_step(one.fed(data_iterator), model, *rest, **named)

    return step


class ScheduleWatch:
    """Hooks and wrapped timers of one rank's model."""

    def __init__(
        self,
        reporter: Reporter,
        chunks: list[Any],
        optimizer: Any,
        first_step: int,
        work_of: WorkOf,
    ) -> None:
        self.reporter = reporter
        self._chunks = chunks
        self._optimizer = optimizer
        self._next_step = first_step
        self._work_of = work_of
        self._wrapping = Wrapping()
        self._timers: ReportingTimers | None = None
        self._ends_at = "optimizer"
        self._takes_turns = False  # virtual stages
        self._forwards: deque[int] = deque()  # of the step, without a backward yet
        self._num_forwards = 0
        reporter.run_guarded(self._attach)

    def close(self) -> None:
        """Restore the model and its configuration and end the attachment."""
        timers: ReportingTimers | None = self._timers
        if timers is not None:
            original = timers.original
            if self._config.timers is timers:
                self._config.timers = original
            known = sys.modules.get(_LM)
            if known is not None and getattr(known, "_GLOBAL_TIMERS", None) is timers:
                vars(known)["_GLOBAL_TIMERS"] = original
        self._wrapping.undo()
        self.reporter.detach()

    def _attach(self) -> None:
        reporter = self.reporter
        self._config = _config_of(self._chunks[0])
        known = sys.modules.get(_LM)
        of_lm = getattr(known, "_GLOBAL_TIMERS", None)
        self._timers = ReportingTimers(
            self._config.timers if of_lm is None else of_lm,
            lambda name: reporter.run_guarded(self._began, name),
            lambda name: reporter.run_guarded(self._ended, name),
        )
        if of_lm is None or self._config.timers is not None:  # in an evaluation it has none
            self._config.timers = self._timers
        size = getattr(self._config, "virtual_pipeline_model_parallel_size", None)
        self._takes_turns = size is not None or len(self._chunks) > 1
        if of_lm is not None:
            vars(known)["_GLOBAL_TIMERS"] = self._timers
        elif self._optimizer is not None:
            self._wrapping.wrap(self._optimizer, "step", self._optimizer_step)
        else:
            self._ends_at = "forward-backward"
        # The first chunk only: a micro-batch passes through all of them.
        self._wrapping.hold(
            self._chunks[0].register_forward_pre_hook(self._chunk_begins, with_kwargs=True)
        )
        for chunk in self._chunks:
            self._hook_experts(chunk)
        reporter.clock.attach()

    def sees(self, chunk: Any) -> None:
        """Register `chunk`, if new, and put our timers back.

        Megatron-LM removes the timers for an evaluation and restores its own after it.
        """
        if not any(chunk is known for known in self._chunks):
            self._chunks.append(chunk)
            self.reporter.run_guarded(self._hook_experts, chunk)
        timers = self._timers
        if timers is not None and self._config.timers is timers.original is not None:
            self._config.timers = timers

    def _hook_experts(self, chunk: Any) -> None:
        self._wrapping.hold(*watch_experts(self.reporter, chunk))

    def fed(self, iterator: Any) -> Any:
        """Wrap `iterator`: its waits are reported as waits for input, not as compute."""
        if isinstance(iterator, list):
            return [self.fed(one) for one in iterator]
        return iterator if iterator is None else _TimedIterator(iterator, self.reporter)

    def _optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.reporter.run_guarded(self._ended, "optimizer")
        return result

    def _began(self, name: str) -> None:
        reporter = self.reporter
        match name:
            case "forward-backward" if self._chunks[0].training and torch.is_grad_enabled():
                reporter.abandon_step()  # a repeated step is reported again under its number
                self._forwards.clear()
                self._num_forwards = 0
                reporter.begin_step(self._step_number())
            case "forward-compute":
                reporter.enter_pass(_ALL if self._takes_turns else self._num_forwards)
            case "backward-compute" if self._forwards:
                reporter.enter_pass(_ALL if self._takes_turns else self._forwards[0])

    def _ended(self, name: str) -> None:
        reporter = self.reporter
        match name:
            case "forward-compute" if reporter.in_pass is not None:
                self._forwards.append(self._num_forwards)
                self._num_forwards += 1
                reporter.suspend_pass()
            case "backward-compute" if reporter.in_pass is not None:
                self._forwards.popleft()  # in the order of the forwards, without virtual stages
                reporter.suspend_pass() if self._takes_turns else reporter.complete_pass()
            case "forward-backward" if self._takes_turns and self._num_forwards:
                reporter.enter_pass(_ALL)
                reporter.complete_pass()
        if name == self._ends_at and reporter.step is not None:
            self._next_step = reporter.step + 1
            reporter.end_step()

    def _step_number(self) -> int:
        known = sys.modules.get(_LM)
        arguments = getattr(known, "_GLOBAL_ARGS", None)
        iteration = getattr(arguments, "curr_iteration", None)
        return self._next_step if iteration is None else int(iteration)

    def _chunk_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and self.reporter.in_pass is not None:
            work = self.reporter.run_guarded(self._work_of, args, kwargs)
            self.reporter.add_features(work or NO_FEATURES)


class ReportingTimers:
    """Replaces Megatron's `Timers` and calls them; reports four of the timers."""

    _HEARD = frozenset({"forward-backward", "forward-compute", "backward-compute", "optimizer"})

    def __init__(
        self, original: Any, began: Callable[[str], None], ended: Callable[[str], None]
    ) -> None:
        self.original = original
        self._began = began
        self._ended = ended

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        timer = None if self.original is None else self.original(name, log_level)
        if name not in self._HEARD:
            return _NoTimer() if timer is None else timer
        return _ReportingTimer(
            name, _NoTimer() if timer is None else timer, self._began, self._ended
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class _NoTimer:
    """A timer without effect."""

    def start(self, barrier: bool = False) -> None:
        """Nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing."""


class _ReportingTimer:
    """Wraps one timer; its own work, such as a barrier, is not counted in the pass."""

    def __init__(
        self,
        name: str,
        original: Any,
        began: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        self._name, self._original, self._began, self._ended = name, original, began, ended

    def start(self, *args: Any, **kwargs: Any) -> None:
        self._original.start(*args, **kwargs)
        self._began(self._name)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self._ended(self._name)
        self._original.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _TimedIterator:
    """Wraps a data iterator and times its next item."""

    def __init__(self, iterator: Any, reporter: Reporter) -> None:
        self._iterator, self._reporter = iterator, reporter

    def __iter__(self) -> "_TimedIterator":
        return self

    def __next__(self) -> Any:
        if self._reporter.step is None:  # in an evaluation
            return next(self._iterator)
        with self._reporter.clock.wait_block():
            self._reporter.begin_loading()
            item = next(self._iterator)
            self._reporter.end_loading()
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _parallel_rank(kind: str) -> tuple[int, int]:
    """Return (rank, size) in Megatron-Core's group of this kind, (0, 1) if there is none."""
    state = sys.modules.get(_PARALLEL)
    if state is None or not state.model_parallel_is_initialized():
        return 0, 1
    return getattr(state, f"get_{kind}_rank")(), getattr(state, f"get_{kind}_world_size")()


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _config_of(chunk: Any) -> Any:
    return _unwrapped(chunk).config


def _work_of_chunk(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MicrobatchFeatures:
    """Return the features of a chunk's call; squared lengths of packed sequences are unknown."""
    work = features_of_call(args, kwargs)
    if kwargs.get("packed_seq_params") is None:
        return work
    tokens, _, rows, active, over, _, head, share = work
    return (tokens, 0, rows, active, over, 0, head, share)
