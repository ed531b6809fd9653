"""Adapter for PyTorch: plain loops, DDP, FSDP2, and what is built on them.

    pace = pacekeeper.attach(model, optimizer)

Steps come from the optimizer's hooks, micro-batches from the model's forward and backward passes,
tokens from the batch's shape, waits for other ranks from torch.distributed. What the loop tells by
`with pace.step(...)` and `with pace.micro_batch_timer(...)` takes the place of what is inferred.
docs/trainer-torch.md lists what was tested.
"""

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, cast

import torch
from torch import nn

from pacekeeper.core.telemetry.attachment import Clock, ModelShape
from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.adapters.instrumentation.collectives import WaitAwareClock, waits_of_fsdp
from pacekeeper.trainer.adapters.instrumentation.module_passes import is_in_backward
from pacekeeper.trainer.adapters.instrumentation.training_watch import TrainingWatch, WorkOf
from pacekeeper.trainer.adapters.reporter import Reporter, features_of_tokens
from pacekeeper.trainer.adapters.run.command import default_job
from pacekeeper.trainer.hooks.compute_timers import SegmentClock
from pacekeeper.trainer.hooks.contexts import Loading, MicrobatchTimer, StepResult
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.hooks.ring_writer import Ring

attached: "weakref.WeakValueDictionary[str, TorchHooks]" = weakref.WeakValueDictionary()  # by job
_log = logging.getLogger(__name__)


def attach(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Any = None,
    *,
    job: str | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    role: str = "train",
    ring_dir: str | None = None,
    shape: ModelShape | None = None,
    step: int | Callable[[], int] = 0,
    work_of: WorkOf = features_of_tokens,
    timing: tuple[Clock, SegmentClock] | None = None,
    micro_batches_per_step: int = 0,
) -> "TorchHooks":
    """Attach this rank of a torch program; call it after `init_process_group`.

    Until `detach`, or the end of the process, waits in torch.distributed do not count as compute.
    A second call for the same job ends the first attachment. After this call nothing raises.

    Args:
        model: The module that the training loop calls, or several; as wrapped and compiled as it is
            called. None: micro-batches are told by the loop.
        optimizer: The optimizer that ends a step, or several: the last one ends it. None: steps are
            told by the loop.
        job: Name of the job; default: PACEKEEPER_JOB, then the name of the script.
        device: Device that computes; default: the model's, else this process's CUDA device if it
            has one, else CPU.
        rank: Default: of the default process group, else of torchrun's environment.
        world_size: Default: as `rank`.
        role: Ranks of one role are compared with each other, such as "stage0".
        ring_dir: The agent's ring directory; default: PACEKEEPER_RING_DIR, then the agent's own.
        shape: Shape of the model, if plans may be offered.
        step: Number of the first step, or a function that returns the number of the step that
            begins.
        work_of: Returns the features of a call of the model from its arguments. It must not read
            tensors of a device.
        timing: Clock that replaces the one of the device.
        micro_batches_per_step: Opts in to batch shares, as in `reporter.attach`.

    Raises:
        TypeError: If model, optimizer or step is something else.
        ValueError: If the job name or rank is invalid.
    """
    models, optimizers = _models_in(model), _optimizers_in(optimizer)
    if not callable(step) and not isinstance(step, SupportsIndex):
        raise TypeError(f"step={step!r}: expected a whole number, or a function that returns one")
    job = job or default_job()
    previous = attached.pop(job, None)
    if previous is not None and previous.ring.is_armed:
        _log.warning("job %s is attached again in this process: the first attachment ends", job)
        previous.detach()
    device = torch.device(device) if device is not None else _device_of(models)
    plain = reporter.attach(
        job=job,
        device=device,
        rank=rank,
        world_size=world_size,
        role=role,
        ring_dir=ring_dir,
        model=shape,
        timing=timing,
        micro_batches_per_step=micro_batches_per_step,
    )
    clock = WaitAwareClock(plain.timer, plain.ring.count_error, plain.ring.enter_phase)
    pace = TorchHooks(plain.ring, plain.rank, clock, device=device, step=step, work_of=work_of)
    for one in models:
        pace.reporter.run_guarded(pace.watch.add_model, one)
    for one in optimizers:
        pace.reporter.run_guarded(pace.watch.add_optimizer, one)
    if models or optimizers:
        pace.reporter.run_guarded(pace.watch.input_waits.attach)
    attached[job] = pace
    return pace


def _models_in(given: Any) -> list[nn.Module]:
    alone = isinstance(given, nn.Module) or not isinstance(given, Iterable)
    found = [] if given is None else [given] if alone else list(given)
    for one in found:
        if not isinstance(one, nn.Module):
            kind = type(one).__name__
            raise TypeError(f"model: expected a torch.nn.Module, or a list of them, got a {kind}")
    return found


def _optimizers_in(given: Any) -> list[Any]:
    found = list(given) if isinstance(given, Iterable) else [given]
    found = [one for one in found if one is not None]
    for one in found:
        if isinstance(one, type) or not callable(getattr(one, "step", None)):
            kind = type(one).__name__
            raise TypeError(f"optimizer: expected one with step(), or a list of them, got a {kind}")
    return found


def _device_of(models: Sequence[nn.Module]) -> torch.device:
    parameter = next((p for model in models for p in model.parameters()), None)
    if parameter is not None:
        return parameter.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _ToldStep(StepResult):
    """A step that the loop tells: the optimizer's steps within it end nothing."""

    __slots__ = ()

    def __enter__(self) -> StepResult:
        self._watch.reporter.run_guarded(self._watch.begin_step, self._step)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._watch.reporter.run_guarded(self._end)
        else:
            self._watch.abandon_step()

    def _end(self) -> None:
        self._watch.end_step(
            tokens=self.tokens, loss=self.loss, sum_len_squared=self.sum_len_squared
        )

    @property
    def _watch(self) -> TrainingWatch:
        return cast(TorchHooks, self._calls).watch


class _ToldMicrobatch(MicrobatchTimer):
    """A micro-batch that the loop times: the passes within it are part of it.

    Expert rows that the loop tells take the place of those that hooks see. Rows of recomputation in
    the backward pass are ignored.
    """

    __slots__ = ("_given", "_is_told")

    def __enter__(self) -> "_ToldMicrobatch":
        self._given, self._is_told = self._features, self._features[2] > 0
        watch = cast(TorchHooks, self._calls).watch
        watch.reporter.run_guarded(watch.begin_told, self)
        super().__enter__()
        return self

    def add_expert_rows(self, rows: Sequence[int] | int) -> None:
        if not is_in_backward():
            if not self._is_told:
                self._features, self._is_told = self._given, True
            super().add_expert_rows(rows)

    def infer_expert_rows(self, rows: Sequence[int] | int) -> None:
        """Add rows that hooks saw."""
        if not self._is_told:
            super().add_expert_rows(rows)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        watch = cast(TorchHooks, self._calls).watch
        watch.reporter.told = None
        super().__exit__(kind, error, trace)
        watch.end_if_stepped()


class _ToldLoading(Loading):
    """A wait for input that the loop tells: the data loader's is part of it."""

    __slots__ = ()

    def __enter__(self) -> None:
        cast(TorchHooks, self._calls).watch.input_waits.is_told = True
        super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        cast(TorchHooks, self._calls).watch.input_waits.is_told = False


class TorchHooks(Hooks):
    """Hooks of one rank of a torch program, with `with` blocks that take the place of inference."""

    micro_batch_block = _ToldMicrobatch

    def __init__(
        self,
        ring: Ring,
        rank: int,
        timer: WaitAwareClock,
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        step: int | Callable[[], int] = 0,
        work_of: WorkOf = features_of_tokens,
    ) -> None:
        super().__init__(ring, rank, timer)
        self.reporter = Reporter(self)
        self.watch = TrainingWatch(self.reporter, device, step=step, work_of=work_of)
        timer.attach(*waits_of_fsdp())
        atexit.register(_detach_at_exit, weakref.ref(self))

    def detach(self) -> None:
        """End the attachment: remove all hooks and restore torch's functions."""
        self.reporter.run_guarded(self.watch.close)
        self.reporter.clock.detach()
        self.reporter.report_late()
        super().detach()

    def step(self, step: int, *, tokens: int = 0, sum_len_squared: int = 0) -> StepResult:
        return _ToldStep(self, step, tokens, sum_len_squared)

    def loading(self) -> Loading:
        return _ToldLoading(self)


def _detach_at_exit(of: "weakref.ref[TorchHooks]") -> None:
    pace = of()
    if pace is not None:
        pace.detach()
