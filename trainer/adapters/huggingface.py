"""Hugging Face's Trainer, watched: `Trainer(..., callbacks=[Pacekeeper(job="my-run")])`.

Imports nothing of it: the Trainer calls its callbacks by name. Micro-batches are the passes of the
model, timed up to where ranks would wait for each other; what shards parameters, is compiled or is
driven by DeepSpeed has its steps told alone. See docs/trainer-huggingface.md.
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
    """For the Trainer's `callbacks`: tells this rank's steps, micro-batches, input and routing."""

    def __init__(self, *, job: str, role: str = "train", ring_dir: str | None = None) -> None:
        """Raises ValueError for a wrong job name; later on nothing here raises."""
        if not is_job_name(job):
            raise ValueError(f"job name {job!r}: expected {JOB_NAME_RULE}")
        self._job, self._role, self._ring_dir = job, role, ring_dir
        self.teller: StepReporter | None = None
        self._routing: RoutingWatch | None = None
        self._undo: list[Callable[[], None]] = []
        self._tokens_before = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The Trainer's other moments, also those of versions to come: nothing to tell."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Attach; a run before this one in the same process is over, however it ended."""
        self._close()
        try:
            self._begin(args, state, parts.get("model"), parts.get("train_dataloader"))
        except Exception:
            _log.warning("not watched: training goes on without pacekeeper", exc_info=True)
            self._close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """An optimizer step; its input is loaded already."""
        if self.teller is not None:
            self._tokens_before = _tokens_seen(state)
            self.teller.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The optimizer has stepped. Logs, evaluations and checkpoints come after this."""
        if self.teller is not None:
            if self._routing is not None:
                self._routing.end_step()
            self.teller.end_step(tokens=max(0, _tokens_seen(state) - self._tokens_before))

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The run is over; model and data loader are as they were."""
        self._close()

    def _begin(self, args: Any, state: Any, model: Any, loader: Any) -> None:
        teller = StepReporter(
            attach(
                job=self._job,
                device=args.device,
                rank=args.process_index,
                world_size=args.world_size,
                role=self._role,
                ring_dir=self._ring_dir,
            )
        )
        self.teller = teller
        self._undo.append(teller.detach)
        why = _why_steps_alone(args, model)
        if why:
            _log.info("rank=%d steps are told alone: %s", args.process_index, why)
        else:
            skips = _skips_padding(model)

            def work_of(passed: tuple[Any, ...], named: Mapping[str, Any]) -> MicrobatchFeatures:
                batch = {"input_ids": passed[0], **named} if passed else named
                return features_of_batch(batch, skips_padding=skips)

            self._undo.append(PassWatch(teller, model, work_of).close)
            self._routing = RoutingWatch(teller, model)
            self._undo.append(self._routing.close)
        undo = _time_loading(teller, loader)
        if undo is None:
            _log.info("rank=%d loading is untold: %s", args.process_index, type(loader).__name__)
        else:
            self._undo.append(undo)

    def _close(self) -> None:
        while self._undo:
            with contextlib.suppress(Exception):
                self._undo.pop()()
        self.teller = self._routing = None


def _nothing(*args: Any, **parts: Any) -> None:
    """A moment of which nothing is told."""


def _tokens_seen(state: Any) -> int:
    """Of all ranks, where the Trainer counts them (`include_num_input_tokens_seen`); else 0."""
    return int(getattr(state, "num_input_tokens_seen", 0) or 0)


def _why_steps_alone(args: Any, model: Any) -> str:
    """Why passes of this model can not be timed rank by rank; empty where they can."""
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


def _time_loading(teller: StepReporter, loader: Any) -> Callable[[], None] | None:
    """Time the loader's own batches, before they are copied to a device; what undoes it.

    None where that can not be done: one rank reads for all, for instance, and they wait for it.
    """
    own = getattr(loader, "base_dataloader", None)
    if own is None or type(loader).__name__ != "DataLoaderShard":
        return None
    make = own.__iter__
    own.__iter__ = lambda: _timed(teller, make())
    return lambda: own.__dict__.pop("__iter__", None) and None


def _timed(teller: StepReporter, batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches. The first is not timed: workers start, it says nothing of the storage."""
    yield from _one(batches)
    while True:
        teller.begin_loading()
        try:
            batch = next(batches)
        except StopIteration:
            return
        teller.end_loading()
        yield batch


def _one(batches: Iterator[Any]) -> Iterator[Any]:
    with contextlib.suppress(StopIteration):
        yield next(batches)
