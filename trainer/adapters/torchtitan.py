"""Adapter for torchtitan: wraps a trainer and reports steps, passes, expert rows and loads.

    watch = torchtitan.watch(trainer, job="my-run")  # before trainer.train()

Uses only the trainer's own attributes and hooks and imports nothing of torchtitan.
docs/trainer-torchtitan.md lists what was tested and what cannot be observed.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pacekeeper.core.telemetry.expert_row_features import NO_ROWS_OVER
from pacekeeper.trainer.adapters.batch_shares.torchtitan import (
    TrainerShares,
    micro_batches_of,
    require_settings,
)
from pacekeeper.trainer.adapters.instrumentation.batch_features import features_of_batch
from pacekeeper.trainer.adapters.instrumentation.collectives import waits_of_fsdp
from pacekeeper.trainer.adapters.instrumentation.expert_hooks import watch_experts
from pacekeeper.trainer.adapters.instrumentation.patching import Wrapping
from pacekeeper.trainer.adapters.reporter import Reporter, attach, can_time
from pacekeeper.trainer.adapters.torchtitan_experts.replicas import CAPABILITIES, ExpertReplicas
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

_BY_DOCUMENT = ("Flex", "Varlen")  # attention limited to documents, by its settings' class name
_log = logging.getLogger(__name__)


def watch(
    trainer: Any,
    *,
    job: str,
    ring_dir: str | None = None,
    moves_experts: bool = False,
    shares_batches: bool = False,
) -> "TrainerWatch":
    """Report every training step of `trainer`, a torchtitan Trainer.

    Args:
        trainer: As torchtitan built it.
        job: Name of the job.
        ring_dir: The agent's ring directory; default: that of `hooks.attach`.
        moves_experts: Opts in to plans that place experts and their replicas; the overrides of
            `torchtitan_experts` must be active.
        shares_batches: Opts in to plans that give ranks unequal numbers of micro-batches; the
            override of `batch_shares.torchtitan_loader` must be active.

    Raises:
        ValueError: If the job name is invalid.
        ConfigError: What is opted in to is not possible with the Trainer's settings.
    """
    if shares_batches:
        require_settings(trainer)
    replicas = ExpertReplicas(trainer) if moves_experts else None
    dims = trainer.parallel_dims
    stage = dims.get_mesh("pp").get_local_rank() if dims.pp > 1 else 0
    pace = attach(
        job=job,
        device=torch.device(trainer.device),
        ring_dir=ring_dir,
        role=f"stage{stage}" if dims.pp > 1 else "train",
        model=replicas.shape if replicas else None,
        capabilities=CAPABILITIES if replicas else (),
        micro_batches_per_step=micro_batches_of(trainer) if shares_batches else 0,
    )
    if replicas:
        replicas.take_plans(pace, step=trainer.step + 1)
    reporter = Reporter(pace, tensor_share=1.0 / (dims.pp * dims.tp))
    found = TrainerWatch(reporter, trainer, replicas)
    found.shares = TrainerShares(trainer, pace) if shares_batches else None
    return found


def why_untimed(trainer: Any) -> str:
    """Return why compute cannot be timed without waits; empty if it can."""
    config = trainer.config
    if not can_time(torch.device(trainer.device)):
        return f"no clock for {trainer.device}"
    if not getattr(config.training, "disable_cuda_graphs", True):
        return "CUDA graphs hide the waits in them"
    if _is_compiled(config) and getattr(trainer.parallel_dims, "ep", 1) > 1:
        return "compiled layers hide how many rows their experts get"
    return ""


class TrainerWatch:
    """Hooks and wrapped attributes of one trainer."""

    def __init__(
        self, reporter: Reporter, trainer: Any, replicas: ExpertReplicas | None = None
    ) -> None:
        self.reporter = reporter
        self.trainer = trainer
        self.replicas = replicas
        self.shares: TrainerShares | None = None
        self.untimed = ""  # why passes are not reported; empty: they are
        self._wrapping = Wrapping()
        self._work: deque[MicrobatchFeatures] = (
            deque()
        )  # of the batches that were fetched and not computed yet
        self._num_passes = 0
        self._tokens = 0  # of the step
        self._loss: float | None = None
        reporter.run_guarded(self._attach)

    def close(self) -> None:
        """Restore the trainer and end the attachment."""
        if self.shares is not None:
            self.shares.close()
        self._wrapping.undo()
        self.reporter.detach()

    def _attach(self) -> None:
        trainer = self.trainer
        self.untimed = why_untimed(trainer)
        self._wrapping.wrap(trainer, "train_step", self._train_step)
        self._wrapping.wrap(trainer.metrics_processor, "log", self._logged)
        if self.untimed:
            _log.info("reports steps only: %s", self.untimed)
            return
        self._wrapping.wrap(trainer, "forward_backward_step", self._pass)
        if not _is_compiled(trainer.config):  # else the hook would be compiled, too
            for part in trainer.model_parts:
                self._wrapping.hold(*watch_experts(self.reporter, part, is_sorted=True))
        self.reporter.clock.attach(*waits_of_fsdp())

    def _train_step(self, original: Callable[..., Any], data_iterator: Iterator[Any]) -> Any:
        self._work.clear()
        self._num_passes, self._tokens, self._loss = 0, 0, None
        if self.replicas is not None:
            self.replicas.at_boundary(step=self.trainer.step)
        self.reporter.begin_step(self.trainer.step)
        try:
            result = original(_TimedBatches(data_iterator, self))
        except BaseException:
            self.reporter.abandon_step()
            raise
        tokens = self._tokens if self.untimed else 0  # all ranks have batches of one shape
        self.reporter.end_step(tokens=tokens * _num_batches(self.trainer), loss=self._loss)
        return result

    def _pass(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.reporter.enter_pass(self._num_passes)
        self._num_passes += 1
        self.reporter.run_guarded(self._tell_work, kwargs.get("labels"))
        result = original(*args, **kwargs)
        self.reporter.complete_pass()
        return result

    def _tell_work(self, labels: Any) -> None:
        for _ in range(len(labels) if isinstance(labels, list) else 1):  # several in a pipeline
            self.reporter.add_features(self._work.popleft())

    def _logged(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = args[1] if len(args) > 1 else kwargs.get("global_avg_loss")
        self._loss = loss if isinstance(loss, float) else None
        return original(*args, **kwargs)

    def fetched(self, batch: Any) -> None:
        """Add the features of a fetched batch."""
        inputs = batch[0]["input"]
        self._tokens += inputs.numel()
        self._work.append(
            _work_of(batch[0], by_document=_keeps_to_documents(self.trainer), parts=self._parts())
        )

    def _parts(self) -> int:
        return int(getattr(self.trainer.parallel_dims, "cp", 1))


class _TimedBatches:
    """The trainer's batches; each wait is reported as a wait for input."""

    def __init__(self, batches: Iterator[Any], watch: TrainerWatch) -> None:
        self._batches, self._watch = batches, watch

    def __iter__(self) -> "_TimedBatches":
        return self

    def __next__(self) -> Any:
        reporter = self._watch.reporter
        reporter.begin_loading()
        batch = next(self._batches)
        reporter.end_loading()
        reporter.run_guarded(self._watch.fetched, batch)
        return batch


def _work_of(batch: Mapping[str, Any], *, by_document: bool, parts: int) -> MicrobatchFeatures:
    """Return the features of a batch in host memory, of which this rank computes 1 / `parts`."""
    tokens = batch["input"]
    work = features_of_batch({"input_ids": tokens})
    squared, documents = work[1], work[5]
    positions = batch.get("positions")
    if by_document and isinstance(positions, Tensor):
        if positions.device.type != "cpu":
            squared = documents = 0
        else:
            starts = positions.reshape(tokens.shape) == 0
            starts[:, 0] = True  # documents end with their row
            begins = starts.flatten().nonzero().flatten()
            lengths = torch.cat([begins, begins.new_tensor([tokens.numel()])]).diff()
            squared, documents = int((lengths * lengths).sum()), len(lengths)
    return (work[0] // parts, squared // parts, 0, 0, NO_ROWS_OVER, documents, 0, 1.0)


def _keeps_to_documents(trainer: Any) -> bool:
    attention = getattr(getattr(trainer, "model_config", None), "first_attention", None)
    settings = type(getattr(attention, "inner_attention", None)).__qualname__
    return settings.startswith(_BY_DOCUMENT)


def _num_batches(trainer: Any) -> int:
    """Return the number of data-parallel replicas."""
    dims = trainer.parallel_dims
    return int(getattr(dims, "dp_replicate", 1) * getattr(dims, "dp_shard", 1))


def _is_compiled(config: Any) -> bool:
    return bool(config.compile.enable) and "model" in config.compile.components
