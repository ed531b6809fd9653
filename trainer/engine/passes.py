"""Forward and backward passes over the micro-batches of a step, on all ranks together.

`Passes` agrees on the size of the global batch and leaves gradients of this rank's part of it. It
neither adds them up over the ranks nor updates anything.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.trainer.engine.micro_batches import (
    Loss,
    MicroBatch,
    MicroBatchSize,
    WorkSize,
    check_micro_batch,
    measure,
    on_device,
    require_sum,
)
from pacekeeper.trainer.engine.routing import Routing
from pacekeeper.trainer.engine.telemetry import Telemetry
from pacekeeper.trainer.groups.agreement import exchange_on_all_ranks, on_all_ranks
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.packing import packed_arguments
from pacekeeper.trainer.model.skeleton import Skeleton
from pacekeeper.trainer.parallel.experts import ExpertParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The size of a batch over all ranks.

    Attributes:
        num_micro_batches: Micro-batches of the rank with most.
        num_targets: Targets of all ranks.
        work: Tokens, documents and squares of all ranks.
        own: Size of each micro-batch of this rank.
    """

    num_micro_batches: int
    num_targets: int
    work: WorkSize
    own: Sequence[MicroBatchSize]


@dataclass(kw_only=True, eq=False)
class Passes:
    """Passes of one rank.

    Attributes:
        skeleton: The model.
        experts: Computes its experts.
        routing: Its routers.
        groups: All ranks; replaced when ranks leave or join.
        device: Where the model is.
        compute_dtype: torch.bfloat16 for mixed precision; None: the type of the parameters.
        telemetry: Times micro-batches; None: unwatched.
        is_standing_by: This rank has no work: it takes part in exchanges, untimed.
    """

    skeleton: Skeleton
    experts: ExpertParallel
    routing: Routing
    groups: EngineGroups
    device: torch.device
    compute_dtype: torch.dtype | None
    telemetry: Telemetry | None
    is_standing_by: bool = False

    def __post_init__(self) -> None:
        self._vocabulary_size = library.vocabulary_size(self.skeleton.module)

    def forget(self) -> None:
        """Drop what an interrupted step, or passes that are no step, left behind."""
        self.experts.forget()
        self.routing.forget()

    def agree(self, step: int, batch: Iterable[MicroBatch]) -> tuple[list[MicroBatch], GlobalBatch]:
        """Take this rank's micro-batches and exchange the sizes of all ranks' batches.

        Args:
            step: For messages.
            batch: Micro-batches of this rank; what it raises ends the step on all ranks.

        Raises:
            Exception: That of `batch`.
            ConfigError: On all ranks: one was given what is no micro-batch, or unshifted labels.
            DataError: On all ranks: one was given a token outside the vocabulary.
        """
        batches: list[MicroBatch] = []

        def take() -> tuple[list[MicroBatchSize], list[int]]:
            batches.extend(batch)
            return self._sizes(batches)

        own, sizes = exchange_on_all_ranks(take, 6, self.groups.control)
        ranks = self.groups.control.ranks
        if bad := [rank for rank, row in zip(ranks, sizes.tolist(), strict=True) if row[5]]:
            raise DataError(
                f"step {step}: ranks {format_ranks(bad)} were given {int(sizes[:, 5].sum())} "
                f"tokens or labels outside the vocabulary of {self._vocabulary_size}",
                remedy="tokenise the data with the tokenizer of this model",
            )
        targets, tokens, documents, squared = sizes[:, 1:5].sum(0).tolist()
        return batches, GlobalBatch(
            num_micro_batches=int(sizes[:, 0].max()),
            num_targets=targets,
            work=WorkSize(tokens=tokens, documents=documents, sum_len_squared=squared),
            own=own,
        )

    def _sizes(self, batches: Sequence[MicroBatch]) -> tuple[list[MicroBatchSize], list[int]]:
        """Return the size of each micro-batch of this rank, and what `agree` exchanges.

        Exchanged: micro-batches, targets, tokens, documents, squares, tokens out of range.
        """
        for batch in batches:
            check_micro_batch(batch)
        sizes = measure(batches, self._vocabulary_size)
        if any(size.is_unshifted for size in sizes):
            raise ConfigError(
                "labels are the tokens at their own places: the model would learn to copy",
                remedy="shift them: labels[r, t] is the token after input_ids[r, t], or -100",
            )
        own = [
            len(batches),
            sum(size.targets for size in sizes),
            sum(size.work.tokens for size in sizes),
            sum(size.work.documents for size in sizes),
            sum(size.work.sum_len_squared for size in sizes),
            sum(size.foreign for size in sizes),
        ]
        return sizes, own

    def train(
        self,
        batches: Sequence[MicroBatch],
        whole: GlobalBatch,
        loss: Loss,
        *,
        is_first: bool,
        before_last: Callable[[], None],
    ) -> Tensor:
        """Run forward and backward passes; gradients are of the mean over the global batch.

        Args:
            batches: Micro-batches of this rank.
            whole: Their sizes, from `agree`.
            loss: Sum of a micro-batch's losses over its targets.
            is_first: Whether to check that `loss` is a sum.
            before_last: Called before the last micro-batch.

        Returns:
            The sum of the losses of this rank, float64 on the device.

        Raises:
            ConfigError: On all ranks: the batch or the loss of one is not possible.
        """
        if self.routing.needs_one_micro_batch and whole.num_micro_batches > 1:
            raise ConfigError(
                f"a load-balancing loss over the batch, and {whole.num_micro_batches} "
                "micro-batches",
                remedy='use balance="sequence", or one micro-batch per rank',
            )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number in range(whole.num_micro_batches):
            if number == whole.num_micro_batches - 1:
                before_last()
            with self._timed(whole, number):
                value = self._forward(
                    batches, whole, number, loss, is_checked=is_first and not number
                )
                num_rows = len(batches[number]["input_ids"]) if number < len(batches) else 0
                balance = self.routing.loss(num_rows, whole.work.tokens, self.groups.exchange)
                (value / max(whole.num_targets, 1) + balance).backward()
            total += value.detach()
        return total

    def evaluate(self, batches: Sequence[MicroBatch], whole: GlobalBatch, loss: Loss) -> Tensor:
        """Return the sum of the losses of this rank; arguments as of `train`."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number in range(whole.num_micro_batches):
            total += self._forward(batches, whole, number, loss)
        return total

    def _timed(self, whole: GlobalBatch, number: int) -> AbstractContextManager[object]:
        if self.telemetry is None or self.is_standing_by:
            return nullcontext()
        is_idle = number >= len(whole.own)
        return self.telemetry.micro_batch(WorkSize() if is_idle else whole.own[number].work)

    def _forward(
        self,
        batches: Sequence[MicroBatch],
        whole: GlobalBatch,
        number: int,
        loss: Loss,
        *,
        is_checked: bool = False,
    ) -> Tensor:
        """Return the sum of the losses of a micro-batch; 0 for one that this rank lacks."""
        is_idle = number >= len(batches)
        batch = _placeholder() if is_idle else batches[number]
        if not is_idle and whole.own[number].has_plain_positions:
            batch = {name: tensor for name, tensor in batch.items() if name != "position_ids"}
        batch = on_device(batch, self.device)
        self.experts.is_idle = is_idle
        self.experts.take_computed_rows()  # of an unwatched step
        inputs: dict[str, Any] = {name: t for name, t in batch.items() if name != "labels"}
        if "position_ids" in inputs and "attention_mask" not in inputs:
            dtype = self.compute_dtype or next(self.skeleton.module.parameters()).dtype
            inputs |= packed_arguments(self.skeleton, inputs["position_ids"], dtype)
        with self._precision():
            logits = self.skeleton.module(**inputs, use_cache=False).logits
        value = 0.0 * logits.sum() if is_idle else loss(logits, batch)
        if is_checked:

            def check() -> None:
                if not is_idle:
                    require_sum(loss, logits, batch, value.item())

            on_all_ranks(check, self.groups.control)
        return value

    def _precision(self) -> AbstractContextManager[object]:
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


def _placeholder() -> MicroBatch:
    return {"input_ids": torch.zeros(1, 1, dtype=torch.int64)}
