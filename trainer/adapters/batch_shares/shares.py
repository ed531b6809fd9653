"""`BatchShares`: unequal numbers of micro-batches per rank, with the gradient of the whole batch.

Ranks average their gradients. A loss that is the mean over the tokens of a micro-batch is scaled by
ranks * (its tokens) / (tokens of the step on all ranks), so that the average is the mean over all
tokens of the global batch, whatever the shares. The sum of tokens travels with the votes on plans:
one message of a few numbers a step.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.adapters.batch_shares.dealing import ShareSchedule
from pacekeeper.trainer.adapters.batch_shares.gradient_sync import gradient_sync
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.plans.consumer import Gather, PlanSession, flat_layout
from pacekeeper.trainer.plans.gather import VOTE_TIMEOUT_S, CpuGather
from pacekeeper.trainer.plans.offers import PlanVote

IGNORED = -100  # a label that no loss counts, in PyTorch and Hugging Face
T = TypeVar("T")


def tokens_in(batch: Any) -> int:
    """Return the tokens over which a loss without a shift is a mean.

    Those of `labels` that are not -100, else all of `input_ids`, else the elements of a tensor.

    Raises:
        ConfigError: The batch is none of these.
    """
    match batch:
        case Mapping() if "labels" in batch:
            return int((batch["labels"] != IGNORED).sum())
        case Mapping() if "input_ids" in batch:
            return int(batch["input_ids"].numel())
        case Tensor():
            return batch.numel()
        case _:
            raise ConfigError(
                f"a batch is a {type(batch).__name__}: its tokens are unknown",
                remedy="pass tokens_of=, which returns the number that the loss is a mean over",
            )


def shifted_tokens_in(batch: Any) -> int:
    """Return the tokens over which the loss of a causal model of transformers is a mean.

    The model shifts `labels` itself, so that the first one of each row is no target.

    Raises:
        ConfigError: The batch has no labels.
    """
    match batch:
        case Mapping() if "labels" in batch:
            return tokens_in({"labels": batch["labels"][..., 1:]})
        case _:
            raise ConfigError(
                "a batch for a causal model of transformers has no labels: its tokens are unknown",
                remedy="pass tokens_of=, which returns the number that the loss is a mean over",
            )


def counter_of(model: nn.Module) -> Callable[[Any], int]:
    """Return what counts the tokens over which the loss of a model is a mean.

    Raises:
        ConfigError: The model is, or contains, one of transformers that may have any loss.
    """
    inner: Any = model
    while hasattr(inner, "_orig_mod") or isinstance(inner, DistributedDataParallel):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    if _has_causal_loss(inner):
        return shifted_tokens_in
    for module in inner.modules():
        if _is_of_transformers(module):
            raise ConfigError(
                f"{type(module).__name__} of transformers: which labels its loss counts is unknown",
                remedy="pass tokens_of=, which returns the number that the loss is a mean over",
            )
    return tokens_in


def _is_of_transformers(module: nn.Module) -> bool:
    return any(
        (base.__module__, base.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for base in type(module).__mro__
    )


def _has_causal_loss(model: Any) -> bool:
    """Whether a model's forward pass computes its loss by the causal loss of transformers."""
    if not _is_of_transformers(model):
        return False
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return (
        code is not None
        and "loss_function" in code.co_names
        and model.loss_function.__name__ == "ForCausalLMLoss"
    )


class BatchShares:
    """This rank's part of the batch; a `PlanConsumer`. Use it from the training thread.

    Attributes:
        step: The next step.
        schedule: The micro-batches of each rank by step.
    """

    def __init__(
        self,
        pace: Hooks,
        model: nn.Module,
        schedule: ShareSchedule,
        *,
        tokens_of: Callable[[Any], int] | None = None,
        gather: Gather | None = None,
    ) -> None:
        """Start with equal shares; all ranks call it together.

        Args:
            pace: Attached with the same `micro_batches_per_step` as the schedule.
            model: As DistributedDataParallel or FSDP2's `fully_shard` returned it.
            schedule: Also the loader's.
            tokens_of: Returns the tokens of a micro-batch over which its loss is a mean; None:
                labels other than -100, without the first of each row where a causal model of
                transformers shifts them, else all of `input_ids`, or the elements of a tensor.
            gather: Exchanges numbers of all ranks; default: a gloo group of its own, which waits
                60 s for a rank.

        Raises:
            ConfigError: The ranks have other settings, nothing averages their gradients, or what
                the loss of a model of transformers counts is unknown.
        """
        is_alone = not dist.is_initialized()
        self._num_ranks = 1 if is_alone else dist.get_world_size()
        self._gather = gather or (_alone if is_alone else CpuGather(VOTE_TIMEOUT_S))
        self._sync = gradient_sync(model, self._num_ranks)
        self._tokens_of, self._weight = tokens_of or counter_of(model), 0.0
        self.schedule, self.step = schedule, schedule.first_step
        self._due: int | None = None  # the first step under the agreed plan
        first = self.step, schedule.micro_batches_per_step
        if {*self._gather(first)} != {first}:
            raise ConfigError(
                f"rank {schedule.rank} begins at step {first[0]} with {first[1]} micro-batches a "
                "step, others do not",
                remedy="start all ranks with the same settings and from the same checkpoint",
            )
        self._session = PlanSession(pace, self, flat_layout(self._num_ranks), step=self.step)

    @property
    def layout(self) -> Layout:
        """The layout in force."""
        return self._session.layout

    def micro_batches(self, own: Sequence[T]) -> Iterator[T]:
        """Yield this rank's micro-batches of a step; run the loop to its end on every rank.

        A rank without a share gets one micro-batch without rows: its passes take part in the sum of
        gradients.

        Args:
            own: The step's item of the loader.

        Raises:
            ConfigError: `own` is not what the schedule dealt.
            UnreachableError: Another rank is dead or frozen.
        """
        count = self.schedule.at(self.step)[self.schedule.rank]
        if len(own) != max(count, 1):
            raise ConfigError(
                f"step {self.step}: {len(own)} micro-batches, this rank's share is {count}",
                remedy="take them from step_loader or steps_of_stream, made with this schedule",
            )
        tokens = [self._tokens_of(batch) if count else 0 for batch in own]
        scale = self._num_ranks / max(1, self._meet(sum(tokens)))
        for number, batch in enumerate(own):
            self._weight = tokens[number] * scale
            with self._sync(number == len(own) - 1):
                yield batch
        self.step += 1

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss of the current micro-batch, a mean over its tokens, as a part of the
        step's: the mean over the ranks of the sums of these is the loss of the global batch.
        """
        if not self._weight:  # a mean over nothing is no number
            loss = torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
        return loss * self._weight

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the current micro-batch's loss, a mean over its tokens."""
        self.scale(loss).backward()

    def check(self, layout: Layout) -> None:
        """Accept other batch shares, nothing else."""
        now = self._session.layout
        if layout.mesh != now.mesh or layout.experts != now.experts:
            raise ValueError("this trainer only changes how many micro-batches a rank runs")

    def apply(self, layout: Layout) -> int:
        """Nothing moves: the schedule was changed once all ranks had agreed."""
        return 0

    def _meet(self, tokens: int) -> int:
        """Meet all ranks before the step's first pass; return the tokens of all."""
        if self._due == self.step:
            self._session.apply(step=self.step)
            self._due = None
        mine = self.step, tokens, self.schedule.num_dealt, *self._session.vote()
        told = self._gather(mine)
        if {numbers[0] for numbers in told} != {self.step}:
            steps = sorted({numbers[0] for numbers in told})
            raise ConfigError(
                f"ranks are at steps {steps}",
                remedy="run the loop over micro_batches to its end on every rank",
            )
        if self._session.count(PlanVote(*numbers[3:]) for numbers in told):
            assert self._session.agreed is not None, "all voted for it"
            self._due = max(numbers[2] for numbers in told)
            rows = self._session.agreed.layout.rows_of(self.schedule.micro_batches_per_step)
            self.schedule.change(self._due, list(rows.values()))
        return sum(numbers[1] for numbers in told)


def _alone(own: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(own)]
