"""Forward and backward passes over the micro-batches of a step, on all ranks together.

`Passes` agrees on the size of the global batch and leaves gradients of this rank's part of it:
of its stage of the model, on its slice of the tokens. It neither adds them up over the ranks nor
updates anything.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.core.layout.pipeline_schedule import Program, Schedule, pipeline_program
from pacekeeper.trainer.emulation.model_kernels import Portion
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
from pacekeeper.trainer.model.blocks import BlockStore
from pacekeeper.trainer.model.packing import packed_arguments
from pacekeeper.trainer.model.skeleton import Skeleton
from pacekeeper.trainer.parallel.dispatch_plan import ReplicaShares
from pacekeeper.trainer.parallel.experts import ExpertParallel
from pacekeeper.trainer.parallel.mesh.deferred_weights import DeferredWeights
from pacekeeper.trainer.parallel.mesh.row_deal import (
    MicroBatchRows,
    dealt_rows,
    kept_rows,
    micro_batches_of,
    rows_of_rank,
)
from pacekeeper.trainer.parallel.mesh.stage_run import OpenMicroBatch, StageModel, StageRun
from pacekeeper.trainer.parallel.mesh.tensor_regions import TokenSlices, compute_on_slices
from pacekeeper.trainer.parallel.mesh.token_slices import MeshPlace, token_slices

_PRIME = 2**31 - 1  # of sums that are exchanged in 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The size of a batch over all ranks.

    Attributes:
        num_micro_batches: Micro-batches of the rank with most.
        num_targets: Targets of all ranks.
        work: Tokens, documents and squares of all ranks.
        own: Size of each micro-batch of this rank.
        numbers: Of each of them in the step.
        rows: Of all micro-batches of the step, where stages of a pipeline have rows of their own.
    """

    num_micro_batches: int
    num_targets: int
    work: WorkSize
    own: Sequence[MicroBatchSize]
    numbers: Sequence[int]
    rows: Sequence[MicroBatchRows] = ()


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
        deferred: Gradients of weights that a schedule computes apart.
        place: Of this rank in the layout; None: it stands by.
        slices: The micro-batch that is computed, and who has which of its tokens.
        stage: The decoder layers held here.
    """

    skeleton: Skeleton
    experts: ExpertParallel
    routing: Routing
    groups: EngineGroups
    device: torch.device
    compute_dtype: torch.dtype | None
    telemetry: Telemetry | None
    deferred: DeferredWeights
    place: MeshPlace | None = None
    _layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        module = self.skeleton.module
        self._vocabulary_size = library.vocabulary_size(module)
        self._hidden_size = library.hidden_size(module)
        self.slices = TokenSlices(self.groups.exchange, self.experts.clock)
        layers = module.get_submodule(self.skeleton.layers)
        self.stage = StageModel(list(layers.children()), self.slices)
        self.deferred.watch(module)
        for region in self.skeleton.regions:
            compute_on_slices(region, self.slices)

    def use(self, layout: Layout, groups: EngineGroups, store: BlockStore) -> None:
        """Compute the part of this rank of `groups` in `layout`, which `store` follows."""
        self._layout, self.groups = layout, groups
        self.place = self.stage.place = MeshPlace.of(layout, groups.exchange)
        if self.place is not None:
            self.slices.group, self.slices.idle = self.place.tensor, self.place.idle
            self.experts.group = self.place.experts
        self.routing.use_layout()
        self.experts.forget_layers()
        for layer in store.holding.layers:
            one = self.skeleton.experts[layer]
            if one is not None:
                shares = ReplicaShares.of(
                    layout.experts[layer],
                    store.slots[layer],
                    ranks=self.experts.group.ranks,
                    rank=groups.exchange.rank,
                    num_slots=store.num_slots,
                    device=self.device,
                )
                self.experts.set_layer(layer, one.module, shares)

    def portion_of(self, name: str) -> Portion:
        """Return what this rank computes of a module in the micro-batch at hand."""
        place = self.place
        layer = name.removeprefix(f"{self.skeleton.layers}.").partition(".")[0]
        is_inside = name.startswith(f"{self.skeleton.layers}.")
        if place is None or (
            not place.stage.first_layer <= int(layer) < place.stage.end_layer
            if is_inside
            else not place.is_last and name in self.skeleton.head
        ):
            return Portion(0.0, 0.0)
        for region in self.skeleton.regions if is_inside and place.is_cut else ():
            if name == region.name or name.startswith(f"{region.name}."):
                return Portion(1.0, place.share(region.kind) if region.is_cut else 1.0)
        is_before = not is_inside and name not in self.skeleton.head
        return Portion(1.0 if is_before else len(self.slices.own) / self.slices.num_tokens)

    def forget(self) -> None:
        """Drop what an interrupted step, or passes that are no step, left behind."""
        self.experts.forget()
        self.routing.forget()
        self.deferred.forget()
        self.deferred.is_on = False

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

        own, sizes = exchange_on_all_ranks(take, 9, self.groups.control)
        ranks, layout = self.groups.control.ranks, self._layout
        by_rank = dict(zip(ranks, sizes.tolist(), strict=True))
        first = {
            rank: layout.pipelines[at].stages[stage if layout.stage_shares else 0].group[0]
            for rank, (stage, at) in layout.places.items()
        }
        if bad := [rank for rank, one in first.items() if by_rank[rank] != by_rank[one]]:
            raise ConfigError(
                f"step {step}: ranks {format_ranks(bad)} were given other micro-batches than the "
                "first ranks of their pipelines",
                remedy="give each rank the rows of Engine.micro_batches",
            )
        if bad := [rank for rank, row in by_rank.items() if row[5]]:
            raise DataError(
                f"step {step}: ranks {format_ranks(bad)} were given {int(sizes[:, 5].sum())} "
                f"tokens or labels outside the vocabulary of {self._vocabulary_size}",
                remedy="tokenise the data with the tokenizer of this model",
            )
        leaders = [by_rank[rank] for rank, _ in layout.batch_shares]
        _, targets, tokens, documents, squared, _, num_rows, *_ = map(
            sum, zip(*leaders, strict=True)
        )
        count = int(sizes[:, 0].max())
        numbers: Sequence[int] = range(len(batches))
        rows: Sequence[MicroBatchRows] = ()
        if layout.stage_shares:
            lengths = set(sizes[:, 7].tolist()) - {0}
            numbers, rows = self._deal(step, batches, num_rows, count, lengths)
        return batches, GlobalBatch(
            num_micro_batches=count,
            num_targets=targets,
            work=WorkSize(tokens=tokens, documents=documents, sum_len_squared=squared),
            own=own,
            numbers=numbers,
            rows=rows,
        )

    def _deal(
        self,
        step: int,
        batches: Sequence[MicroBatch],
        num_rows: int,
        count: int,
        lengths: set[int],
    ) -> tuple[Sequence[int], Sequence[MicroBatchRows]]:
        """Check micro-batches against the layout's stage shares, with all ranks.

        Args:
            step: For messages.
            batches: Of this rank.
            num_rows: Of the global batch.
            count: Micro-batches of the step.
            lengths: Of all ranks' rows, in tokens.

        Returns:
            The number of each of `batches` in the step, and the rows of all micro-batches.

        Raises:
            ConfigError: On all ranks: one was given other rows than its stage's.
        """
        layout, rank = self._layout, self.groups.exchange.rank
        deal = micro_batches_of(rows_of_rank(layout, rank, num_rows), count)
        expected = list(map(len, deal.values()))

        def check() -> tuple[None, list[int]]:
            sizes = [len(batch["input_ids"]) for batch in batches]
            if sizes != expected or len(lengths) > 1 or min(lengths, default=1) < 0:
                raise ConfigError(
                    f"step {step}: micro-batches of {sizes} rows, where the "
                    f"layout has {expected} at this stage, or rows of several lengths",
                    remedy="give each rank the rows of Engine.micro_batches",
                )
            tokens = (row for batch in batches for row in batch["input_ids"].cpu().numpy())
            places = chain.from_iterable(deal.values())
            crcs = zip(map(zlib.crc32, tokens), places, strict=True)
            return None, [sum(crc * (place + 1) for crc, place in crcs) % _PRIME]

        _, contents = exchange_on_all_ranks(check, 1, self.groups.control)
        by_rank = dict(zip(self.groups.control.ranks, contents.flatten().tolist(), strict=True))
        stages = [
            sum(by_rank[pipeline.stages[stage].group[0]] for pipeline in layout.pipelines) % _PRIME
            for stage in range(len(layout.stage_shares))
        ]
        if len(set(stages)) > 1:
            raise ConfigError(
                f"step {step}: stages of the pipelines were given other rows than one another",
                remedy="give each rank the rows of Engine.micro_batches",
            )
        if rank not in layout.places:
            return (), ()
        return list(deal), dealt_rows(layout, rank, num_rows, count)

    def _sizes(self, batches: Sequence[MicroBatch]) -> tuple[list[MicroBatchSize], list[int]]:
        """Return the size of each micro-batch of this rank, and what `agree` exchanges.

        Exchanged: micro-batches, targets, tokens, documents, squares, tokens out of range, rows,
        tokens of a row (-1: not of all the same), content.
        """
        for batch in batches:
            check_micro_batch(batch)
        sizes = measure(batches, self._vocabulary_size)
        if any(size.is_unshifted for size in sizes):
            raise ConfigError(
                "labels are the tokens at their own places: the model would learn to copy",
                remedy="shift them: labels[r, t] is the token after input_ids[r, t], or -100",
            )
        lengths = {batch["input_ids"].shape[1] for batch in batches}
        own = [
            len(batches),
            sum(size.targets for size in sizes),
            sum(size.work.tokens for size in sizes),
            sum(size.work.documents for size in sizes),
            sum(size.work.sum_len_squared for size in sizes),
            sum(size.foreign for size in sizes),
            sum(len(batch["input_ids"]) for batch in batches),
            lengths.pop() if len(lengths) == 1 else -len(lengths),
            self._content(batches),
        ]
        return sizes, own

    def _content(self, batches: Sequence[MicroBatch]) -> int:
        """What tells micro-batches from others, where several ranks must have the same."""
        if self.place is None or not (self.place.is_cut or self.place.num_stages > 1):
            return 0
        crc = 0
        for batch in batches:
            tokens = batch["input_ids"].cpu()
            crc = zlib.crc32(tokens.numpy().tobytes(), crc) ^ len(tokens)
        return crc

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
        total, failure = torch.zeros((), dtype=torch.float64, device=self.device), None
        if self.place is not None and whole.num_micro_batches:
            work = Chunks(self, batches, whole, loss, is_first=is_first, before_last=before_last)
            schedule = self._layout.schedule
            self.deferred.is_on = schedule is Schedule.ZERO_BUBBLE
            program = _program(schedule, self.place.num_stages, whole.num_micro_batches)
            self._run(work, self.place).run(program.stages[self.place.number])
            self.deferred.is_on = False
            total, failure = work.total, work.failure
        if is_first:
            on_all_ranks(lambda: _raise(failure), self.groups.control)
        return total

    def evaluate(self, batches: Sequence[MicroBatch], whole: GlobalBatch, loss: Loss) -> Tensor:
        """Return the sum of the losses of this rank; arguments as of `train`."""
        if self.place is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        work = Chunks(self, batches, whole, loss)
        self._run(work, self.place).forward_only(whole.num_micro_batches)
        return work.total

    def logits(self, batch: MicroBatch) -> Tensor:
        """Run the model's forward pass; only the last stage's result is logits.

        Args:
            batch: Whole micro-batch, on the device.
        """
        assert self.place is not None, "a rank that stands by computes nothing"
        inputs: dict[str, Any] = {name: t for name, t in batch.items() if name != "labels"}
        if "position_ids" in inputs and "attention_mask" not in inputs:
            inputs |= packed_arguments(
                self.skeleton, inputs["position_ids"], self.compute_dtype or self._dtype
            )
        if not self.place.is_first:  # masks and positions have their shapes of it; see `StageModel`
            like = torch.zeros((), dtype=self._dtype, device=self.device)
            shape = inputs.pop("input_ids").shape
            inputs["inputs_embeds"] = like.expand(*shape, self._hidden_size)
        with self._precision():
            found: Tensor = self.skeleton.module(**inputs, use_cache=False).logits
        return found

    def _run(self, work: "Chunks", place: MeshPlace) -> StageRun:
        return StageRun(
            place=place,
            exchange=self.groups.exchange,
            work=work,
            hidden_size=self._hidden_size,
            dtype=self._dtype,
            device=self.device,
        )

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.skeleton.module.parameters()).dtype

    def _precision(self) -> AbstractContextManager[object]:
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


@lru_cache(maxsize=8)  # the same in most steps
def _program(schedule: Schedule, num_stages: int, num_micro_batches: int) -> Program:
    return pipeline_program(schedule, num_stages=num_stages, num_microbatches=num_micro_batches)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


class Chunks:
    """The micro-batches of one step, or of an evaluation, on this rank's stage.

    Args:
        passes: Of the rank, which has a place.
        batches: Its micro-batches; a placeholder stands for those that only other pipelines have.
        whole: Their sizes.
        loss: Sum of a micro-batch's losses over its targets.
        is_first: Whether to check that `loss` is a sum.
        before_last: Called before the last backward pass; None: this is no training.

    Attributes:
        total: Sum of the losses of this rank, float64 on the device.
        failure: Why `loss` is no sum; None where it is.
    """

    def __init__(
        self,
        passes: Passes,
        batches: Sequence[MicroBatch],
        whole: GlobalBatch,
        loss: Loss,
        *,
        is_first: bool = False,
        before_last: Callable[[], None] | None = None,
    ) -> None:
        assert passes.place is not None, "a rank that stands by computes nothing"
        self._passes, self._place = passes, passes.place
        self._batches, self._whole, self._loss = batches, whole, loss
        self._is_checked, self._before_last = is_first, before_last
        self._telemetry = passes.telemetry if before_last else None
        self._index = {number: at for at, number in enumerate(whole.numbers)}
        self.total = torch.zeros((), dtype=torch.float64, device=passes.device)
        self.failure: ConfigError | None = None

    def open(self, number: int) -> OpenMicroBatch:
        shape = (1, self._place.largest_group)
        if number in self._index:
            rows, tokens = self._batches[self._index[number]]["input_ids"].shape
            shape = (rows, tokens)
        dealt = self._whole.rows
        of = dealt[number] if dealt else kept_rows(self._place, shape[0])
        return OpenMicroBatch(number=number, shape=shape, rows=of)

    def forward(self, micro: OpenMicroBatch) -> None:
        passes, place = self._passes, self._place
        is_idle = self._is_idle(micro)
        batch = self._inputs(micro)
        self._resume(micro)
        if self._telemetry:
            size = WorkSize() if is_idle else self._size(micro).work
            is_mesh = place.is_cut or place.num_stages > 1
            self._telemetry.begin_micro_batch(
                micro.number,
                size,
                head_tokens=len(passes.slices.own) if is_mesh and place.is_last else 0,
                tensor_share=place.share(BlockKind.ATTENTION)
                * place.stage.num_layers
                / passes.skeleton.num_layers,
            )
        passes.experts.take_computed_rows()  # of an unwatched step
        output = passes.logits(batch)
        micro.left, passes.stage.left = passes.stage.left, None
        value: Tensor | None = None
        if place.is_last:
            value = 0.0 * output.sum() if is_idle else self.loss(output, batch)
            self.total += value.detach() if self._before_last else value
        if self._before_last:
            balance = passes.routing.loss(
                0 if is_idle else micro.shape[0],
                self._whole.work.tokens,
                passes.slices,
                place.experts,
            )
            parts = [balance] if isinstance(balance, Tensor) else []
            if value is not None:
                parts.append(value / max(self._whole.num_targets, 1))
            micro.objective = torch.stack(parts).sum() if parts else None
            if self._telemetry:
                self._telemetry.forward_is_over(micro.number)

    def backward(self, micro: OpenMicroBatch) -> None:
        deferred = self._passes.deferred
        is_last = micro.number == self._whole.num_micro_batches - 1
        if self._before_last and is_last and not deferred.is_on:
            self._before_last()
        deferred.number = micro.number
        self._resume(micro)
        if self._telemetry:
            self._telemetry.resume_micro_batch(micro.number)
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if micro.objective is not None and micro.objective.requires_grad:
            roots.append(micro.objective)
            gradients.append(None)
        if micro.left is not None and micro.left.requires_grad and micro.gradient is not None:
            roots.append(micro.left)
            gradients.append(micro.gradient.to(micro.left.dtype))
        if roots:  # none where all that is trained comes later
            torch.autograd.backward(roots, gradients)
        micro.left = micro.objective = micro.gradient = None
        if self._telemetry and not deferred.is_on:
            self._telemetry.end_micro_batch(micro.number)

    def weight_gradients(self, number: int) -> None:
        if self._telemetry:
            self._telemetry.resume_micro_batch(number)
        self._passes.deferred.compute_waiting(number)
        if self._telemetry:
            self._telemetry.end_micro_batch(number)

    def suspend(self) -> None:
        if self._telemetry:
            self._telemetry.suspend()

    def _resume(self, micro: OpenMicroBatch) -> None:
        """Let hooks in the model see this micro-batch: layers may be repeated when it goes back."""
        slices = self._passes.slices
        slices.clock, slices.shape = self._passes.experts.clock, micro.shape
        slices.slices = token_slices(self._place.stage, slices.num_tokens)
        self._passes.stage.entered = micro.entered
        self._passes.experts.is_idle = self._is_idle(micro)
        if micro.entered is not None and self._before_last:
            micro.entered.requires_grad_()

    def _is_idle(self, micro: OpenMicroBatch) -> bool:
        return micro.number not in self._index

    def _size(self, micro: OpenMicroBatch) -> MicroBatchSize:
        return self._whole.own[self._index[micro.number]]

    def _inputs(self, micro: OpenMicroBatch) -> MicroBatch:
        if self._is_idle(micro):
            batch: MicroBatch = {"input_ids": torch.zeros(micro.shape, dtype=torch.int64)}
        else:
            batch = self._batches[self._index[micro.number]]
            if self._size(micro).has_plain_positions:
                batch = {name: tensor for name, tensor in batch.items() if name != "position_ids"}
        return on_device(batch, self._passes.device)

    def loss(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        """Return the sum of the losses of this rank's tokens.

        Args:
            logits: Of these tokens, [rows, tokens, V].
            batch: The whole micro-batch, on the device.
        """
        own = batch
        if self._place.is_cut:
            shape, cut = self._passes.slices.shape, self._passes.slices.own
            own = {
                name: t.flatten(0, 1)[cut.start : cut.stop][None] if t.shape[:2] == shape else t
                for name, t in batch.items()
            }
        value = self._loss(logits, own)
        if self._is_checked:
            self._is_checked = False
            try:
                if self._place.is_cut:  # one row: tokens take the place of rows
                    turned = {n: t.transpose(0, 1) if t.dim() > 1 else t for n, t in own.items()}
                    require_sum(self._loss, logits.transpose(0, 1), turned, value.item())
                else:
                    require_sum(self._loss, logits, own, value.item())
            except ConfigError as error:  # raised on all ranks, when they are here
                self.failure = error
        return value
