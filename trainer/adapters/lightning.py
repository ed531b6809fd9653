"""Lightning's Trainer, watched: `Trainer(..., callbacks=[Pacekeeper(job="my-run")])`.

One for `lightning.pytorch` and `pytorch_lightning`: it becomes a `Callback` of what is loaded when
it is made. A training batch is a micro-batch, timed from its forward pass to the end of its
backward, before ranks wait for each other; with manual optimization it is a step as well. See
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
from pacekeeper.trainer.adapters.reporter import NO_FEATURES, StepReporter, attach, can_time
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
LOADS = "train_dataloader_next"  # as the Trainer's profilers name the wait for input
_log = logging.getLogger(__name__)


class Pacekeeper:
    """For the Trainer's `callbacks`: tells this rank's steps, micro-batches, input and routing."""

    def __new__(cls, **options: Any) -> "Pacekeeper":
        """Of a class that Lightning takes for a callback; raises ImportError without Lightning."""
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
    ) -> None:
        """`work_of` a batch; by itself it knows mappings that hold `input_ids`.

        Raises ValueError for a wrong job name; later on nothing here raises.
        """
        if not is_job_name(job):
            raise ValueError(f"job name {job!r}: expected {JOB_NAME_RULE}")
        self._options: dict[str, Any] = {
            "job": job,
            "role": role,
            "ring_dir": ring_dir,
            "work_of": work_of,
        }
        self._work_of = work_of
        self.teller: StepReporter | None = None
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
        """Attach; a run before this one in the same process is over, however it ended."""
        self._close()
        try:
            self._begin(trainer, module)
        except Exception:
            _log.warning("not watched: training goes on without pacekeeper", exc_info=True)
            self._close()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Workers of the loader start: the first wait says nothing of the storage."""
        self._is_first_input = True

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *place: Any) -> None:
        """A micro-batch, and the step that it is of."""
        if self.teller is None:
            return
        self.teller.begin_step(_step_of(trainer, module))
        if not self._is_timed:
            return
        try:
            work = self._work_of(batch)
        except Exception as error:
            self.teller.pace.ring.count_error(error)
            work = NO_FEATURES
        if _is_wrapped(trainer, module):
            self._waiting_work = work
        else:
            self.teller.begin_microbatch(work)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Asks to be told when the gradients are computed."""
        if self.teller is None or not self.teller.is_computing:
            return
        if isinstance(loss, Tensor) and loss.requires_grad:
            is_last = module.automatic_optimization
            over = self.teller.end_microbatch if is_last else self.teller.pause
            loss.register_hook(lambda gradient: _then(over))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """With manual optimization computing goes on: more passes may come."""
        if self.teller is not None and not module.automatic_optimization:
            self.teller.resume()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *place: Any
    ) -> None:
        """The micro-batch is over, and the step if an optimizer has stepped."""
        if self.teller is None:
            return
        if not module.automatic_optimization:
            self.teller.end_microbatch()
        self.teller.drop_microbatch()  # without a backward pass
        self._waiting_work = None
        if not module.automatic_optimization or trainer.global_step != self.teller.step:
            if self._routing is not None:
                self._routing.end_step()
            self.teller.end_step()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """In the middle of a step, where gradients are accumulated."""
        if self.teller is not None:
            self.teller.exit_training()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Training goes on."""
        if self.teller is not None:
            self.teller.enter_training()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """The run is over; model and profiler are as they were."""
        self._close()

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        """So it is, too."""
        self._close()

    def _begin(self, trainer: Any, module: Any) -> None:
        device = trainer.strategy.root_device
        self.teller = StepReporter(
            attach(
                job=self._options["job"],
                device=device,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                role=self._options["role"],
                ring_dir=self._options["ring_dir"],
            )
        )
        self._undo.append(self.teller.detach)
        why = _why_steps_alone(trainer, device)
        self._is_timed = not why
        if why:
            _log.info("rank=%d steps are told alone: %s", trainer.global_rank, why)
        else:
            self._routing = RoutingWatch(self.teller, module)
            self._undo.append(self._routing.close)
            self._undo.append(module.register_forward_pre_hook(self._forward_begins).remove)
        self._undo.append(self._time_loading(trainer.profiler))

    def _forward_begins(self, module: Any, args: Any) -> None:
        """Inside the wrapper, which may have waited for other ranks' buffers just before."""
        if torch.compiler.is_compiling():
            return
        work, self._waiting_work = self._waiting_work, None
        if work is not None and self.teller is not None:
            self.teller.begin_microbatch(work)

    def _time_loading(self, profiler: Any) -> Callable[[], None]:
        """Hear of the wait for input as a profiler does, whichever there is; what undoes it."""
        start, stop = profiler.start, profiler.stop

        def started(action: str) -> None:
            start(action)
            if self.teller is not None and action.endswith(LOADS) and not self._is_first_input:
                self.teller.begin_loading()

        def stopped(action: str) -> None:
            if self.teller is not None and action.endswith(LOADS):
                self.teller.end_loading()
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
        self.teller = self._routing = self._waiting_work = None
        self._is_timed = False


def _bases() -> tuple[type, ...]:
    """`Callback` of every Lightning that is loaded, else of the first one that can be."""
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
    return features_of_batch(batch) if isinstance(batch, Mapping) else NO_FEATURES


def _then(call: Callable[[], None]) -> None:
    """At the end of the backward pass that has just begun."""
    with contextlib.suppress(Exception):
        at_end_of_backward(call)


def _step_of(trainer: Any, module: Any) -> int:
    """Of the run; with manual optimization an optimizer step is any number of them."""
    if module.automatic_optimization:
        return int(trainer.global_step)
    return int(trainer.fit_loop.total_batch_idx)


def _is_wrapped(trainer: Any, module: Any) -> bool:
    """Does another module (DDP) call the forward pass?"""
    return trainer.strategy.model is not module


def _why_steps_alone(trainer: Any, device: Any) -> str:
    """Why passes can not be timed rank by rank; empty where they can."""
    if not can_time(device):
        return f"no events of a {device.type} device"
    if "DeepSpeed" in type(trainer.strategy).__name__:
        return "DeepSpeed drives the passes"
    if not computes_alone(trainer.strategy.model):
        return "parameters are sharded, every layer waits for all ranks"
    return ""
