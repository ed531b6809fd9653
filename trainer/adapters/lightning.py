"""Adapter for Lightning's Trainer: `Trainer(..., callbacks=[Pacekeeper(job="my-run")])`.

Works with `lightning.pytorch` and `pytorch_lightning`: it derives from the `Callback` of the one
that is loaded. Its moments tell steps and evaluations; the rest is what `pytorch.attach` infers
from the module's training step. See docs/trainer-lightning.md.
"""

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from pacekeeper.core.telemetry.attachment import JOB_NAME_RULE, is_job_name
from pacekeeper.trainer.adapters import pytorch
from pacekeeper.trainer.adapters.reporter import features_of_tokens
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures, StepResult

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
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
        work_of: Callable[[Any], MicrobatchFeatures] | None = None,
        micro_batches_per_step: int = 0,
    ) -> None:
        """Check the options; no other method raises.

        Args:
            job: Name of the job.
            role: Ranks of one role are compared with each other.
            ring_dir: The agent's ring directory.
            work_of: Returns the features of a batch; default: of `input_ids`, also in a list of
                batches, else of the first integer tensor [rows, tokens].
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
            "micro_batches_per_step": micro_batches_per_step,
        }
        self._work_of = work_of
        self.pace: pytorch.TorchHooks | None = None
        self._step: StepResult | None = None
        self._number = 0  # of the open step

    def __reduce__(self) -> Any:
        options = {**self._options, "work_of": self._work_of}
        return functools.partial(Pacekeeper, **options), ()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Attach; an earlier run in this process is closed, however it ended."""
        self._close()
        why = ""
        if "DeepSpeed" in type(trainer.strategy).__name__:
            why = "DeepSpeed drives the passes"
            _log.info("rank=%d reports steps only: %s", trainer.global_rank, why)
        own = self._work_of
        try:
            self.pace = pytorch.attach(
                None if why else module,
                trainer.optimizers if why else None,
                **self._options,
                device=trainer.strategy.root_device,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                work_of=features_of_tokens if own is None else lambda args, kwargs: own(args[0]),
            )
        except Exception:
            _log.warning("cannot attach: training continues unmonitored", exc_info=True)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *place: Any) -> None:
        """Start a step, unless this batch accumulates gradients for the open one."""
        is_automatic = module.automatic_optimization
        number = trainer.global_step if is_automatic else trainer.fit_loop.total_batch_idx
        if self.pace is not None and (self._step is None or number != self._number):
            self._number, self._step = number, self.pace.step(number)
            self._step.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *place: Any
    ) -> None:
        """End the step if an optimizer has stepped."""
        if self.pace is not None:
            self.pace.reporter.drop_micro_batches()  # one that had no backward pass
        is_over = not module.automatic_optimization or trainer.global_step != self._number
        if self._step is not None and is_over:
            self._step.__exit__(None, None, None)
            self._step = None

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Exit training, possibly within a step that accumulates gradients."""
        if self.pace is not None:
            self.pace.reporter.exit_training()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Return to training."""
        if self.pace is not None:
            self.pace.reporter.enter_training()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Restore the module and end the attachment."""
        self._close()

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        """Restore the module and end the attachment."""
        self._close()

    def _close(self) -> None:
        if self.pace is not None:
            self.pace.detach()
        self.pace = self._step = None


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
