"""Adapter for Hugging Face's Trainer: `Trainer(..., callbacks=[Pacekeeper(job="my-run")])`.

Imports nothing of it: the Trainer calls its callbacks by name. They tell the steps and their
tokens; the rest is what `pytorch.attach` infers. If the model is compiled by the Trainer, or
DeepSpeed runs the passes, only steps are reported. See docs/trainer-huggingface.md.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from pacekeeper.core.telemetry.attachment import JOB_NAME_RULE, is_job_name
from pacekeeper.trainer.adapters import pytorch
from pacekeeper.trainer.adapters.instrumentation.batch_features import features_of_batch
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures, StepResult

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
        self.pace: pytorch.TorchHooks | None = None
        self._step: StepResult | None = None
        self._tokens_before = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore all other callbacks, also those of later versions."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Attach; an earlier run in this process is closed, however it ended."""
        self.on_train_end()
        model = parts.get("model")
        try:
            why = why_steps_alone(args, model)
            if why:
                _log.info("rank=%d reports steps only: %s", args.process_index, why)
            self.pace = pytorch.attach(
                None if why else model,
                parts.get("optimizer") if why else None,
                job=self._job,
                device=args.device,
                rank=args.process_index,
                world_size=args.world_size,
                role=self._role,
                ring_dir=self._ring_dir,
                micro_batches_per_step=self.micro_batches_per_step,
                work_of=_Work(skips_padding=_skips_padding(model)),
            )
        except Exception:
            _log.warning("cannot attach: training continues unmonitored", exc_info=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Start an optimizer step; its input is loaded already."""
        if self.pace is not None:
            self._tokens_before = _tokens_seen(state)
            self._step = self.pace.step(state.global_step)
            self._step.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """End the step; logs, evaluations and checkpoints follow."""
        if self._step is not None:
            self._step.tokens = max(0, _tokens_seen(state) - self._tokens_before)
            self._step.__exit__(None, None, None)
            self._step = None

    def on_train_end(self, *moment: Any, **parts: Any) -> None:
        """Restore the model and end the attachment."""
        if self.pace is not None:
            self.pace.detach()
        self.pace = self._step = None


class _Work:
    """Features of a model call of the Trainer, whose batches are keyed."""

    def __init__(self, *, skips_padding: bool) -> None:
        self._skips_padding = skips_padding

    def __call__(self, passed: tuple[Any, ...], named: Mapping[str, Any]) -> MicrobatchFeatures:
        batch = {"input_ids": passed[0], **named} if passed else named
        return features_of_batch(batch, skips_padding=self._skips_padding)


def _nothing(*args: Any, **parts: Any) -> None:
    """Ignore a callback."""


def _tokens_seen(state: Any) -> int:
    """Return the tokens of all ranks if `include_num_input_tokens_seen` is set, else 0."""
    return int(getattr(state, "num_input_tokens_seen", 0) or 0)


def why_steps_alone(args: Any, model: Any) -> str:
    """Return why passes of this model cannot be timed per rank; empty if they can."""
    if not isinstance(model, nn.Module):
        return "the model is no torch module"
    if args.n_gpu > 1:
        return "one process drives several devices"
    if getattr(args, "deepspeed", None):
        return "DeepSpeed drives the passes"
    if getattr(args, "torch_compile", False):
        return "the model is compiled"
    return ""


def _skips_padding(model: Any) -> bool:
    named = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    return str(named).startswith("flash")
