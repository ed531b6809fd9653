"""Infers steps, micro-batches and their features from a model's passes and its optimizers' steps.

Used by `pytorch.attach`. What the training loop tells by `with` blocks takes the place of what is
inferred. A micro-batch lasts from the model's forward pass to the end of its backward pass, without
the time between them, such as a loss outside the module. Forward passes without training
(evaluation, no gradients) and recomputation are no micro-batches.

No hook raises: errors are counted by the ring. A module's calls are wrapped where torch would call
its compiled form, around all hooks and a graph of the whole module; nothing is done while a graph
is traced. Of a Lightning module the training step is wrapped. What a pass runs is called in every
micro-batch: it calls little, since after a micro-batch each call is cold in the cache.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pacekeeper.core.telemetry.sign_of_life import EVALUATING
from pacekeeper.trainer.adapters.instrumentation.batch_features import NO_FEATURES
from pacekeeper.trainer.adapters.instrumentation.expert_hooks import watch_experts
from pacekeeper.trainer.adapters.instrumentation.input_waits import InputWaits
from pacekeeper.trainer.adapters.instrumentation.module_passes import (
    CALL,
    GradientHook,
    at_end_of_backward,
    graph_task,
    is_lightning,
    is_traced,
    tensors_in,
)
from pacekeeper.trainer.adapters.instrumentation.patching import WrappedMethod, Wrapping
from pacekeeper.trainer.adapters.reporter import Reporter, ToldMicrobatch, can_time
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

WorkOf = Callable[[tuple[Any, ...], Mapping[str, Any]], MicrobatchFeatures]
_ONLY = "only"  # the key of micro-batches that never overlap
MANY = 256  # micro-batches of one step, after which a warning is logged
_log = logging.getLogger(__name__)


class TrainingWatch:
    """Hooks on the models and optimizers of one rank.

    A step begins with the first training forward pass (or told micro-batch) after the previous
    step and ends when the last one of the optimizers has stepped. Forward passes whose gradients
    one backward pass computes are one micro-batch.
    """

    def __init__(
        self,
        reporter: Reporter,
        device: torch.device,
        *,
        step: int | Callable[[], int],
        work_of: WorkOf,
    ) -> None:
        self.reporter = reporter
        self.is_step_told = False
        self.num_passes = 0  # forward passes of micro-batches, of the whole run
        self.models: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self.input_waits = InputWaits(reporter)
        self.is_timed = can_time(device)  # False: forward passes only begin steps
        self._step, self._work_of = step, work_of
        self._wrapping = Wrapping()
        self._inside: nn.Module | None = None  # whose forward pass is timed now
        self._manual: list[nn.Module] = []  # whose training step makes the backward pass
        self._losses: list[float] = []
        self._is_loss_summed = False
        self._ends_later = False  # the optimizer has stepped within a pass
        self._num_open = 0  # micro-batches of the open step
        self._backward_hook = GradientHook(self._backward_begins)
        self._warned: set[str] = set()

    def add_model(self, model: nn.Module) -> None:
        """Watch the passes and the experts of `model`."""
        self.models.append(model)
        if not self.is_timed:
            self._warn_once("steps only: compute on this device or in this graph cannot be timed")
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.add_passes(inner)  # DDP's own wait for other ranks' buffers comes before
        self._wrapping.hold(*watch_experts(self.reporter, inner))

    def add_passes(self, module: nn.Module) -> None:
        """Report the training passes of `module`; all modules share micro-batches."""
        if is_lightning(module):
            method = WrappedMethod(module, "training_step", self._around(module, "training_step"))
            self._wrapping.put(module, "training_step", method)
            if not getattr(module, "automatic_optimization", True):
                self._manual.append(module)
        else:
            compiled = getattr(module, CALL, None) is not None
            around = self._around(module, CALL if compiled else "_call_impl")
            self._wrapping.put(module, CALL, around)

    def add_optimizer(self, optimizer: Any) -> None:
        """End steps when `optimizer` has stepped, if it remains the one added last."""
        while "_optimizer_step_post_hooks" not in vars(optimizer) and hasattr(
            optimizer, "optimizer"
        ):
            optimizer = optimizer.optimizer  # a wrapper, such as accelerate's
        self.optimizers.append(optimizer)
        if "_optimizer_step_post_hooks" in vars(optimizer):
            self._wrapping.hold(
                optimizer.register_step_post_hook(lambda one, args, kwargs: self.stepped(one))
            )
        else:
            self._wrapping.wrap(optimizer, "step", self._around_step)

    def close(self) -> None:
        """Remove all hooks."""
        self._wrapping.undo()
        self.input_waits.detach()

    # -- steps

    def begin_step(self, told: int | None = None) -> None:
        """Begin the step that the loop tells, or an inferred one unless one is open."""
        if told is not None:
            if self.is_step_told and self.reporter.step == told:
                return  # begun again
            if self.reporter.step is not None:
                self.reporter.abandon_step()
            self.is_step_told = True
        elif self.reporter.step is not None or self.is_step_told:
            return  # open, or told by the loop
        elif not self.optimizers:
            self._warn_once(
                "a micro-batch began outside of a step: attach the optimizer, too, or tell each "
                "step by `with pace.step(number):`"
            )
            return
        step = self._step() if callable(self._step) else self._step
        self._num_open, self._ends_later = 0, False
        self._losses.clear()
        self.reporter.begin_step(step if told is None else told)

    def end_step(
        self, *, tokens: int = 0, loss: float | None = None, sum_len_squared: int = 0
    ) -> None:
        """Report the end of the open step, with the inferred loss if none is told."""
        self._ends_later = False
        self.is_step_told = False
        if self.reporter.step is None:
            return
        if not callable(self._step):
            self._step = self.reporter.step + 1
        if loss is None and self._losses:
            loss = sum(self._losses) / (1 if self._is_loss_summed else len(self._losses))
        self.reporter.enter_training()
        self.reporter.end_step(tokens=tokens, loss=loss, sum_len_squared=sum_len_squared)

    def abandon_step(self) -> None:
        """Drop the open step: the loop's block has raised."""
        self.is_step_told = False
        self.reporter.abandon_step()

    def stepped(self, optimizer: Any) -> None:
        """End the step, if `optimizer` is the one that ends it. Called after each of its steps."""
        try:
            if optimizer is not self.optimizers[-1] or self.is_step_told:
                return
            if self.reporter.is_computing:
                self._ends_later = True
            elif self.num_passes:
                if self.is_timed and not self._num_open and self.reporter.step is not None:
                    self._warn_once(
                        "no micro-batch in a step: the attached model had no backward pass; attach "
                        "the module whose parameters are trained"
                    )
                self.end_step()
            else:
                self._end_step_alone()
        except Exception as error:
            self.count_error(error)

    def end_if_stepped(self) -> None:
        """End the step whose optimizer has stepped within the pass that has just ended."""
        if self._ends_later:
            self.end_step()

    def _around_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.stepped(self.optimizers[-1])
        return result

    def _end_step_alone(self) -> None:
        """Report steps from one optimizer step to the next: no pass has ever been seen."""
        self._warn_once(
            "steps only: no forward pass of the attached model in training mode was seen; attach "
            "the module that the training loop calls, after torch.compile, and call its train()"
        )
        self.end_step()
        self.begin_step()

    # -- passes

    def begin_told(self, block: ToldMicrobatch) -> None:
        """Begin a micro-batch that the loop times; open passes are dropped."""
        self._prepare()
        self.num_passes += 1
        self._num_open += 1
        self.reporter.write_done()
        self.reporter.told = block

    def _prepare(self) -> None:
        """Make a micro-batch possible: a step is open, and nothing else runs in it."""
        reporter = self.reporter
        if self.num_passes == 0 and not self.is_step_told:
            reporter.abandon_step()  # one of steps alone
        if reporter.step is None:
            self.begin_step()
        reporter.enter_training()
        if reporter.in_pass is not None:  # of a backward pass that raised
            reporter.drop_micro_batches()

    def _around(self, module: nn.Module, name: str) -> Callable[..., Any]:
        original = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return original(*args, **kwargs)
            self._forward_begins(module, args, kwargs)
            output = original(*args, **kwargs)
            if self._inside is module:
                self._forward_ended(module, output)
            return output

        return called

    def _forward_begins(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if graph_task() != -1:  # in a backward pass: recomputed
            return
        if self._inside is not None and self._inside is not module:
            return  # within the pass of another watched module
        try:
            reporter = self.reporter
            if not module.training:
                self._begin_evaluation()
            elif torch.is_grad_enabled():
                self._inside = None
                if reporter.told is not None:
                    return
                if (
                    reporter.step is None
                    or reporter.in_pass is not None
                    or reporter.away_s is not None
                    or self.num_passes == 0
                ):
                    self._prepare()
                self.num_passes += 1
                if self.is_timed:
                    try:
                        work = self._work_of(args, kwargs)
                    except Exception as error:
                        self.count_error(error)
                        work = NO_FEATURES
                    if not work[0]:
                        self._warn_of_tokens()
                    if kwargs:
                        self._is_loss_summed = kwargs.get("num_items_in_batch") is not None
                    reporter.enter_pass(_ONLY, work)
                    self._inside = module if reporter.in_pass is not None else None
        except Exception as error:
            self.count_error(error)

    def _warn_of_tokens(self) -> None:
        self._warn_once(
            "tokens are not reported: the model is called with no token sequences; report "
            "them by `with pace.micro_batch_timer(tokens=...)`"
        )

    def _forward_ended(self, module: nn.Module, output: Any) -> None:
        self._inside = None
        try:
            tensors: Iterable[Tensor] = (output,)
            if type(output) is not Tensor or output.dim() == 0:
                tensors = tensors_in(output)
                loss = _loss_in(output)
                if loss is not None:
                    self._losses.append(loss)
            if self._manual and any(one is module for one in self._manual):
                self._end_backward()
                return
            self.reporter.suspend_pass()
            for tensor in tensors:
                self._backward_hook.put_on(tensor)
        except Exception as error:
            self.count_error(error)

    def _backward_begins(self, gradients: Any) -> None:
        try:
            reporter = self.reporter
            if reporter.in_pass is None and _ONLY in reporter.open:
                reporter.enter_pass(_ONLY)
                at_end_of_backward(self._end_backward)
        except Exception as error:
            self.count_error(error)

    def _end_backward(self) -> None:
        try:
            self.reporter.complete_pass()
            self._num_open += 1
            if self._num_open == MANY:
                self._warn_once(
                    f"{MANY} micro-batches without an optimizer step: attach the optimizer that "
                    "the training loop steps"
                )
            if self._ends_later:
                self.end_step()
        except Exception as error:
            self.count_error(error)

    def _begin_evaluation(self) -> None:
        if self.reporter.step is None:
            self.reporter.pace.input_s = None  # the evaluation's own waits for input
            self.reporter.pace.ring.enter_phase(EVALUATING)
        elif not self.reporter.is_computing:
            self.reporter.exit_training()

    def count_error(self, error: Exception) -> None:
        self.reporter.pace.ring.count_error(error)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("rank=%d %s", self.reporter.pace.rank, text)


def _loss_in(output: Any) -> float | None:
    """Return the loss in a model's output, if it is there and on the host: reading it from a device
    would wait.
    """
    loss: Any = output.get("loss") if isinstance(output, Mapping) else None
    if loss is None:
        parts = output if isinstance(output, tuple) else (output,)
        scalars = [part for part in parts if isinstance(part, Tensor) and part.dim() == 0]
        loss = scalars[0] if len(scalars) == 1 else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.device.type != "cpu":
        return None
    return float(loss.detach())
