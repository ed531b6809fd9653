"""Adapter for Hugging Face's Trainer: `Trainer(..., callbacks=[Pacekeeper(job="my-run")])`.

Imports nothing of it: the Trainer calls its callbacks by name. Micro-batches are the passes of the
model, timed without waits for other ranks. If parameters are sharded, the model is compiled, or
DeepSpeed runs the passes, only steps are reported. See docs/trainer-huggingface.md.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from pacekeeper.core.telemetry.attachment import JOB_NAME_RULE, is_job_name
from pacekeeper.trainer.adapters.instrumentation.batch_features import features_of_batch
from pacekeeper.trainer.adapters.instrumentation.expert_load import RoutingWatch
from pacekeeper.trainer.adapters.instrumentation.module_passes import PassWatch, computes_alone
from pacekeeper.trainer.adapters.reporter import StepReporter, attach, can_time
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

_log = logging.getLogger(__name__)


class Pacekeeper:
    """Trainer callback that reports steps, micro-batches, input waits and expert loads."""

    def __init__(
        self,
        *,
        job: str,
        role: str = "train",
        ring_dir: str | None = None,
        micro_batches_per_step: int = 0,
    ) -> None:
        """Check the options; no other method raises.

        Args:
            job: Name of the job.
            role: Ranks of one role are compared with each other.
            ring_dir: The agent's ring directory.
            micro_batches_per_step: Opts in to batch shares (docs/plan-consumer.md).

        Raises:
            ValueError: If the job name is invalid.
        """
        if not is_job_name(job):
            raise ValueError(f"job name {job!r}: expected {JOB_NAME_RULE}")
        self._job, self._role, self._ring_dir = job, role, ring_dir
        self.micro_batches_per_step = micro_batches_per_step
        self.reporter: StepReporter | None = None
        self._routing: RoutingWatch | None = None
        self._undo: list[Callable[[], None]] = []
        self._tokens_before = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore all other callbacks, also those of later versions."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Attach; an earlier run in this process is closed, however it ended."""
        self._close()
        try:
            self._begin(args, state, parts.get("model"), parts.get("train_dataloader"))
        except Exception:
            _log.warning("cannot attach: training continues unmonitored", exc_info=True)
            self._close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Start an optimizer step; its input is loaded already."""
        if self.reporter is not None:
            self._tokens_before = _tokens_seen(state)
            self.reporter.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """End the step; logs, evaluations and checkpoints follow."""
        if self.reporter is not None:
            if self._routing is not None:
                self._routing.end_step()
            self.reporter.end_step(tokens=max(0, _tokens_seen(state) - self._tokens_before))

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Restore model and data loader and end the attachment."""
        self._close()

    def _begin(self, args: Any, state: Any, model: Any, loader: Any) -> None:
        reporter = StepReporter(
            attach(
                job=self._job,
                device=args.device,
                rank=args.process_index,
                world_size=args.world_size,
                role=self._role,
                ring_dir=self._ring_dir,
                micro_batches_per_step=self.micro_batches_per_step,
            )
        )
        self.reporter = reporter
        self._undo.append(reporter.detach)
        why = _why_steps_alone(args, model)
        if why:
            _log.info("rank=%d reports steps only: %s", args.process_index, why)
        else:
            skips = _skips_padding(model)

            def work_of(passed: tuple[Any, ...], named: Mapping[str, Any]) -> MicrobatchFeatures:
                batch = {"input_ids": passed[0], **named} if passed else named
                return features_of_batch(batch, skips_padding=skips)

            self._undo.append(PassWatch(reporter, model, work_of).close)
            self._routing = RoutingWatch(reporter, model)
            self._undo.append(self._routing.close)
        undo = _time_loading(reporter, loader)
        if undo is None:
            _log.info(
                "rank=%d input waits are not reported: %s",
                args.process_index,
                type(loader).__name__,
            )
        else:
            self._undo.append(undo)

    def _close(self) -> None:
        while self._undo:
            with contextlib.suppress(Exception):
                self._undo.pop()()
        self.reporter = self._routing = None


def _nothing(*args: Any, **parts: Any) -> None:
    """Ignore a callback."""


def _tokens_seen(state: Any) -> int:
    """Return the tokens of all ranks if `include_num_input_tokens_seen` is set, else 0."""
    return int(getattr(state, "num_input_tokens_seen", 0) or 0)


def _why_steps_alone(args: Any, model: Any) -> str:
    """Return why passes of this model cannot be timed per rank; empty if they can."""
    if not isinstance(model, nn.Module):
        return "the model is no torch module"
    if not can_time(args.device):
        return f"no events of a {args.device.type} device"
    if args.n_gpu > 1:
        return "one process drives several devices"
    if getattr(args, "deepspeed", None):
        return "DeepSpeed drives the passes"
    if getattr(args, "torch_compile", False):
        return "the model is compiled"
    if not computes_alone(model):
        return "parameters are sharded, every layer waits for all ranks"
    return ""


def _skips_padding(model: Any) -> bool:
    named = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    return str(named).startswith("flash")


def _time_loading(reporter: StepReporter, loader: Any) -> Callable[[], None] | None:
    """Time the loader's batches before they are copied to a device; return the undo function.

    None if that is impossible, for instance if one rank reads for all.
    """
    own = getattr(loader, "base_dataloader", None)
    if own is None or type(loader).__name__ != "DataLoaderShard":
        return None
    make = own.__iter__
    own.__iter__ = lambda: _timed(reporter, make())
    return lambda: own.__dict__.pop("__iter__", None) and None


def _timed(reporter: StepReporter, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches and time each but the first, which includes the start of the workers."""
    yield from _one(batches)
    while True:
        reporter.begin_loading()
        try:
            batch = next(batches)
        except StopIteration:
            return
        reporter.end_loading()
        yield batch


def _one(batches: Iterator[Any]) -> Iterator[Any]:
    with contextlib.suppress(StopIteration):
        yield next(batches)
