"""Adapter for Lightning's Trainer: `Trainer(..., callbacks=[Pacekeeper(job="my-run")])`.

Works with `lightning.pytorch` and `pytorch_lightning`: it derives from the `Callback` of the one
that is loaded. A training batch is a micro-batch, timed from its forward pass to the end of its
backward, without waits for other ranks; with manual optimization it is also a step. See
docs/trainer-lightning.md.
"""

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pacekeeper.core.telemetry.attachment import JOB_NAME_RULE, is_job_name
from pacekeeper.trainer.adapters.instrumentation.batch_features import features_of_batch
from pacekeeper.trainer.adapters.instrumentation.expert_load import RoutingWatch
from pacekeeper.trainer.adapters.instrumentation.module_passes import (
    at_end_of_backward,
    computes_alone,
)
from pacekeeper.trainer.adapters.reporter import (
    NO_FEATURES,
    StepReporter,
    attach,
    can_time,
    sum_of_features,
)
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
LOADS = "train_dataloader_next"  # profiler action of the wait for input
_log = logging.getLogger(__name__)


class Pacekeeper:
    """Trainer callback that reports steps, micro-batches, input waits and expert loads."""

    def __new__(cls, **options: Any) -> "Pacekeeper":
        """Create an instance that is a Lightning `Callback`; ImportError without Lightning."""
        bases = tuple(base for base in _bases() if not issubclass(cls, base))
        if not bases:
            return super().__new__(cls)
        made: Pacekeeper = object.__new__(type(cls.__name__, (cls, *bases), {}))
        return made

    def __init__(
        self,
        *,
        job: str,
        role: str = "train",
        ring_dir: str | None = None,
        work_of: Callable[[Any], MicrobatchFeatures] = lambda batch: _work_of(batch),
        micro_batches_per_step: int = 0,
    ) -> None:
        """Check the options; no other method raises.

        Args:
            job: Name of the job.
            role: Ranks of one role are compared with each other.
            ring_dir: The agent's ring directory.
            work_of: Returns the features of a batch; default: of mappings with `input_ids`, and of
                lists of them.
            micro_batches_per_step: Opts in to batch shares (docs/plan-consumer.md).

        Raises:
            ValueError: If the job name is invalid.
        """
        if not is_job_name(job):
            raise ValueError(f"job name {job!r}: expected {JOB_NAME_RULE}")
        self._options: dict[str, Any] = {
            "job": job,
            "role": role,
            "ring_dir": ring_dir,
            "work_of": work_of,
            "micro_batches_per_step": micro_batches_per_step,
        }
        self._work_of = work_of
        self.reporter: StepReporter | None = None
        self._routing: RoutingWatch | None = None
        self._undo: list[Callable[[], None]] = []
        self._is_timed = False  # passes, not only steps
        self._waiting_work: MicrobatchFeatures | None = (
            None  # of a batch whose forward pass will begin
        )
        self._is_first_input = True

    def __reduce__(self) -> Any:
        return functools.partial(Pacekeeper, **self._options), ()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Attach; an earlier run in this process is closed, however it ended."""
        self._close()
        try:
            self._begin(trainer, module)
        except Exception:
            _log.warning("cannot attach: training continues unmonitored", exc_info=True)
            self._close()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Ignore the next wait for input: it includes the start of the loader's workers."""
        self._is_first_input = True

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *place: Any) -> None:
        """Start a micro-batch, and its step if it is the first one."""
        if self.reporter is None:
            return
        self.reporter.begin_step(_step_of(trainer, module))
        if not self._is_timed:
            return
        try:
            work = self._work_of(batch)
        except Exception as error:
            self.reporter.pace.ring.count_error(error)
            work = NO_FEATURES
        if _is_wrapped(trainer, module):
            self._waiting_work = work
        else:
            self.reporter.begin_microbatch(work)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Register the end of the micro-batch for when its gradients are computed."""
        if self.reporter is None or not self.reporter.is_computing:
            return
        if isinstance(loss, Tensor) and loss.requires_grad:
            is_last = module.automatic_optimization
            over = self.reporter.end_microbatch if is_last else self.reporter.pause
            loss.register_hook(lambda gradient: _then(over))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Resume with manual optimization: more passes may follow."""
        if self.reporter is not None and not module.automatic_optimization:
            self.reporter.resume()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *place: Any
    ) -> None:
        """End the micro-batch, and the step if an optimizer has stepped."""
        if self.reporter is None:
            return
        if not module.automatic_optimization:
            self.reporter.end_microbatch()
        self.reporter.drop_microbatch()  # it had no backward pass
        self._waiting_work = None
        if not module.automatic_optimization or trainer.global_step != self.reporter.step:
            if self._routing is not None:
                self._routing.end_step()
            self.reporter.end_step()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Exit training, possibly within a step that accumulates gradients."""
        if self.reporter is not None:
            self.reporter.exit_training()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Return to training."""
        if self.reporter is not None:
            self.reporter.enter_training()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Restore model and profiler and end the attachment."""
        self._close()

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        """Restore model and profiler and end the attachment."""
        self._close()

    def _begin(self, trainer: Any, module: Any) -> None:
        device = trainer.strategy.root_device
        self.reporter = StepReporter(
            attach(
                job=self._options["job"],
                device=device,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                role=self._options["role"],
                ring_dir=self._options["ring_dir"],
                micro_batches_per_step=self._options["micro_batches_per_step"],
            )
        )
        self._undo.append(self.reporter.detach)
        why = _why_steps_alone(trainer, device)
        self._is_timed = not why
        if why:
            _log.info("rank=%d reports steps only: %s", trainer.global_rank, why)
        else:
            self._routing = RoutingWatch(self.reporter, module)
            self._undo.append(self._routing.close)
            self._undo.append(module.register_forward_pre_hook(self._forward_begins).remove)
        self._undo.append(self._time_loading(trainer.profiler))

    def _forward_begins(self, module: Any, args: Any) -> None:
        """Start the micro-batch inside the wrapper, after its wait for other ranks' buffers."""
        if torch.compiler.is_compiling():
            return
        work, self._waiting_work = self._waiting_work, None
        if work is not None and self.reporter is not None:
            self.reporter.begin_microbatch(work)

    def _time_loading(self, profiler: Any) -> Callable[[], None]:
        """Time the wait for input by wrapping the profiler; return the undo function."""
        start, stop = profiler.start, profiler.stop

        def started(action: str) -> None:
            start(action)
            if self.reporter is not None and action.endswith(LOADS) and not self._is_first_input:
                self.reporter.begin_loading()

        def stopped(action: str) -> None:
            if self.reporter is not None and action.endswith(LOADS):
                self.reporter.end_loading()
                self._is_first_input = False
            stop(action)

        profiler.start, profiler.stop = started, stopped

        def undo() -> None:
            profiler.__dict__.pop("start", None)
            profiler.__dict__.pop("stop", None)

        return undo

    def _close(self) -> None:
        while self._undo:
            with contextlib.suppress(Exception):
                self._undo.pop()()
        self.reporter = self._routing = self._waiting_work = None
        self._is_timed = False


def _bases() -> tuple[type, ...]:
    """Return the `Callback` of each loaded Lightning, else of the first importable one."""
    names = [name for name in PACKAGES if name in sys.modules]
    for name in PACKAGES if not names else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            names = [name]
            break
    if not names:
        raise ImportError(f"none of {', '.join(PACKAGES)} can be imported: install lightning")
    return tuple(sys.modules[name].Callback for name in names)


def _work_of(batch: Any) -> MicrobatchFeatures:
    if isinstance(batch, list):  # of a step's micro-batches
        return functools.reduce(sum_of_features, map(_work_of, batch))
    return features_of_batch(batch) if isinstance(batch, Mapping) else NO_FEATURES


def _then(call: Callable[[], None]) -> None:
    """Call `call` at the end of the running backward pass."""
    with contextlib.suppress(Exception):
        at_end_of_backward(call)


def _step_of(trainer: Any, module: Any) -> int:
    """Return the step of the run; with manual optimization the number of the batch."""
    if module.automatic_optimization:
        return int(trainer.global_step)
    return int(trainer.fit_loop.total_batch_idx)


def _is_wrapped(trainer: Any, module: Any) -> bool:
    """Whether another module (DDP) calls the forward pass."""
    return trainer.strategy.model is not module


def _why_steps_alone(trainer: Any, device: Any) -> str:
    """Return why passes cannot be timed per rank; empty if they can."""
    if not can_time(device):
        return f"no events of a {device.type} device"
    if "DeepSpeed" in type(trainer.strategy).__name__:
        return "DeepSpeed drives the passes"
    if not computes_alone(trainer.strategy.model):
        return "parameters are sharded, every layer waits for all ranks"
    return ""
