"""Megatron, watched: its schedules call the timers of their configuration, and are heard there.

    watch = adapter_megatron.watch(chunks, job="my-run", optimizer=optimizer)   # Megatron-Core
    pretrain(..., adapter_megatron.watched(forward_step, job="my-run"))         # Megatron-LM

`config.timers` is a place that Megatron-Core keeps for its user: whatever is there is called with a
name when a pass begins and ends. What was there before is called as ever. Nothing is imported but
what Megatron has loaded. docs/trainer-megatron.md says what was tested and what can not be seen.
"""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.adapters.instrumentation.expert_hooks import hooked
from pacekeeper.trainer.adapters.instrumentation.patching import Wrapping
from pacekeeper.trainer.adapters.microbatch_reporter import MicrobatchReporter, features_of_call
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

WorkOf = Callable[[tuple[Any, ...], Mapping[str, Any]], MicrobatchFeatures]
_LM = "megatron.training.global_vars"
_PARALLEL = "megatron.core.parallel_state"
_ALL = "all"  # the key of a step's passes where virtual stages take turns: one record of them


def watch(
    chunks: Sequence[Any] | Any,
    *,
    job: str,
    optimizer: Any = None,
    first_step: int = 0,
    work_of: WorkOf | None = None,
    ring_dir: str | None = None,
) -> "ScheduleWatch":
    """Tell pacekeeper of every training step that a schedule runs on `chunks`, this rank's model.

    A step ends when `optimizer` has stepped; without one, and without Megatron-LM's timers, when
    its passes have. Steps are numbered by Megatron-LM's iteration, else from `first_step` on.
    `work_of` says what a chunk is called with (default: the shape of its first tensor); it must not
    read tensors of a device. Raises ValueError for a wrong job name only.
    """
    chunks = list(chunks) if isinstance(chunks, list | tuple) else [chunks]
    parameter = next(chunks[0].parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    stage, num_stages = _of_parallel("pipeline_model_parallel")
    _, num_shards = _of_parallel("tensor_model_parallel")
    pace = reporter.attach(
        job=job,
        device=device,
        ring_dir=ring_dir,
        role=f"stage{stage}" if num_stages > 1 else "train",
    )
    teller = MicrobatchReporter(pace, tensor_share=1.0 / (num_stages * num_shards))
    return ScheduleWatch(teller, chunks, optimizer, first_step, work_of or _work_of_chunk)


def watched(forward_step: Callable[..., Any], *, job: str, **more: Any) -> Callable[..., Any]:
    """Megatron-LM's `forward_step(data_iterator, model)`, which attaches when it is called first.

    The step of that call is not told: it has begun already. The wait for the iterator is told as
    the wait for input.
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
    """What was put around one rank's model."""

    def __init__(
        self,
        teller: MicrobatchReporter,
        chunks: list[Any],
        optimizer: Any,
        first_step: int,
        work_of: WorkOf,
    ) -> None:
        self.teller = teller
        self._chunks = chunks
        self._optimizer = optimizer
        self._next_step = first_step
        self._work_of = work_of
        self._wrapping = Wrapping()
        self._timers: HeardTimers | None = None
        self._ends_at = "optimizer"
        self._takes_turns = False  # virtual stages
        self._forwards: deque[int] = deque()  # of the step, those without a backward yet
        self._num_forwards = 0
        teller.run_guarded(self._attach)

    def close(self) -> None:
        """The model and its configuration are as they were; the rank is done."""
        timers: HeardTimers | None = self._timers
        if timers is not None:
            original = timers.original
            if self._config.timers is timers:
                self._config.timers = original
            known = sys.modules.get(_LM)
            if known is not None and getattr(known, "_GLOBAL_TIMERS", None) is timers:
                vars(known)["_GLOBAL_TIMERS"] = original
        self._wrapping.undo()
        self.teller.detach()

    def _attach(self) -> None:
        teller = self.teller
        self._config = _config_of(self._chunks[0])
        known = sys.modules.get(_LM)
        of_lm = getattr(known, "_GLOBAL_TIMERS", None)
        self._timers = HeardTimers(
            self._config.timers if of_lm is None else of_lm,
            lambda name: teller.run_guarded(self._began, name),
            lambda name: teller.run_guarded(self._ended, name),
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
        # Of the first chunk only: a micro-batch passes all of them.
        self._wrapping.hold(
            self._chunks[0].register_forward_pre_hook(self._chunk_begins, with_kwargs=True)
        )
        for chunk in self._chunks:
            self._hook_experts(chunk)
        teller.collective_waits.attach()

    def sees(self, chunk: Any) -> None:
        """A forward of `chunk`: perhaps another virtual stage, perhaps after an evaluation, for
        which Megatron-LM takes the timers off and puts its own back.
        """
        if not any(chunk is known for known in self._chunks):
            self._chunks.append(chunk)
            self.teller.run_guarded(self._hook_experts, chunk)
        timers = self._timers
        if timers is not None and self._config.timers is timers.original is not None:
            self._config.timers = timers

    def _hook_experts(self, chunk: Any) -> None:
        for layer, router, experts in _moe_layers(chunk):
            self._wrapping.hold(*hooked(self.teller, layer, router, experts, _counts))

    def fed(self, iterator: Any) -> Any:
        """`iterator`, whose waits are told as waits for input and are not computing."""
        if isinstance(iterator, list):
            return [self.fed(one) for one in iterator]
        return iterator if iterator is None else _Fed(iterator, self.teller)

    def _optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.teller.run_guarded(self._ended, "optimizer")
        return result

    def _began(self, name: str) -> None:
        teller = self.teller
        match name:
            case "forward-backward" if self._chunks[0].training and torch.is_grad_enabled():
                teller.abandon_step()  # a step that is done again is told again, under its number
                self._forwards.clear()
                self._num_forwards = 0
                teller.begin_step(self._step_number())
            case "forward-compute":
                teller.enter_pass(_ALL if self._takes_turns else self._num_forwards)
            case "backward-compute" if self._forwards:
                teller.enter_pass(_ALL if self._takes_turns else self._forwards[0])

    def _ended(self, name: str) -> None:
        teller = self.teller
        match name:
            case "forward-compute" if teller.in_pass is not None:
                self._forwards.append(self._num_forwards)
                self._num_forwards += 1
                teller.suspend_pass()
            case "backward-compute" if teller.in_pass is not None:
                self._forwards.popleft()  # in the order of the forwards, where no stages take turns
                teller.suspend_pass() if self._takes_turns else teller.complete_pass()
            case "forward-backward" if self._takes_turns and self._num_forwards:
                teller.enter_pass(_ALL)
                teller.complete_pass()
        if name == self._ends_at and teller.step is not None:
            self._next_step = teller.step + 1
            teller.end_step()

    def _step_number(self) -> int:
        known = sys.modules.get(_LM)
        arguments = getattr(known, "_GLOBAL_ARGS", None)
        iteration = getattr(arguments, "curr_iteration", None)
        return self._next_step if iteration is None else int(iteration)

    def _chunk_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and self.teller.in_pass is not None:
            work = self.teller.run_guarded(self._work_of, args, kwargs)
            self.teller.add_features(work or reporter.NO_FEATURES)


class HeardTimers:
    """In the place of Megatron's `Timers`, which it still calls; four of them are heard."""

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
            return _Silent() if timer is None else timer
        return _Heard(name, _Silent() if timer is None else timer, self._began, self._ended)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class _Silent:
    """A timer where there was none."""

    def start(self, barrier: bool = False) -> None:
        """Nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing."""


class _Heard:
    """One call's timer. What it does itself, a barrier for instance, lies outside of the pass."""

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


class _Fed:
    """A data iterator; all else than its next item is the original's."""

    def __init__(self, iterator: Any, teller: MicrobatchReporter) -> None:
        self._iterator, self._teller = iterator, teller

    def __iter__(self) -> "_Fed":
        return self

    def __next__(self) -> Any:
        if self._teller.step is None:  # an evaluation's
            return next(self._iterator)
        with self._teller.collective_waits.around():
            self._teller.begin_loading()
            item = next(self._iterator)
            self._teller.end_loading()
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _of_parallel(kind: str) -> tuple[int, int]:
    """(own place, size) in Megatron-Core's group of this kind; alone where there is none."""
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


def _counts(output: Any) -> Any:
    """Of (probabilities, map [tokens, experts] of what was chosen)."""
    return output[1].sum(dim=0)


def _moe_layers(chunk: Any) -> list[tuple[int, Any, Any]]:
    """(number in the whole model, router, experts) of each MoE layer."""
    return [
        (max(0, (part.router.layer_number or 1) - 1), part.router, part.experts)
        for part in chunk.modules()
        if hasattr(part, "router") and hasattr(part, "experts")
    ]


def _work_of_chunk(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MicrobatchFeatures:
    """By the shape of its tokens; of packed sequences the squares are untold."""
    work = features_of_call(args, kwargs)
    if kwargs.get("packed_seq_params") is None:
        return work
    tokens, _, rows, active, over, _, head, share = work
    return (tokens, 0, rows, active, over, 0, head, share)
