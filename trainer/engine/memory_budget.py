"""How much memory a rank needs, from the shapes of a model on the meta device.

Bytes of weights, gradients and optimizer state are exact; those of activations are an estimate.
Nothing is allocated here; `training.py` compares the sum with what a device has.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.blocks import Holding
from pacekeeper.trainer.model.skeleton import Skeleton

ESTIMATE_FACTOR = 2.0
"""Measured activations were within this factor of the estimate, above and below."""

STATES = {"sgd": 0, "sgd_momentum": 1, "adamw": 2}
"""Kinds of optimizers and their state tensors of a parameter's shape."""

_COUNTER_BYTES = 4  # AdamW's step, one per parameter
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchShape:
    """What a rank computes at once.

    Attributes:
        rows: Rows of a micro-batch.
        row_tokens: Tokens of a row.
        compute_dtype: Type of the computation, where it is not that of the parameters.
        checkpoint_activations: Whether decoder layers are repeated in the backward pass.
        num_in_flight: Micro-batches whose forward pass is done before the backward pass of the
            first: 1, or in a pipeline the number of this and the later stages.
    """

    rows: int
    row_tokens: int
    compute_dtype: torch.dtype | None = None
    checkpoint_activations: bool = False
    num_in_flight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes that one rank needs.

    Attributes:
        dense_weights: Parameters held beside experts, and buffers.
        used_slots: Weights of experts held here.
        free_slots: Weights of slots that hold no expert.
        gradients: Of all parameters, free slots too.
        optimizer: State of the optimizer.
        activations: Estimate of what the forward pass keeps for the backward pass.
        in_flight: Copies of dense gradients while they are exchanged, when activations are gone.
    """

    dense_weights: int
    used_slots: int
    free_slots: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int

    @property
    def state(self) -> int:
        """What training needs at any time."""
        weights = self.dense_weights + self.used_slots + self.free_slots
        return weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The expected peak."""
        return self.state + max(self.activations, self.in_flight)

    @property
    def least(self) -> int:
        """What is needed even if the estimate is too high by its factor."""
        return self.state + max(int(self.activations / ESTIMATE_FACTOR), self.in_flight)


class OwnedState(NamedTuple):
    """The dense blocks whose optimizer state a rank has, where it has owners and mirrors.

    `num_bytes`: of their trained weights. `copied_bytes`: of those that the optimizer has in
    tensors of their own, as it has some shards of a tensor and not all. `num_tensors`: that it has.
    """

    num_bytes: int = 0
    copied_bytes: int = 0
    num_tensors: int = 0


def owned_state(skeleton: Skeleton, layout: Layout) -> dict[int, OwnedState]:
    """Return what each rank with work updates; {} where all holders update their blocks."""
    if not layout.state_owners:
        return {}
    parameters = dict(skeleton.module.named_parameters())
    pieces: dict[int, Counter[str]] = {rank: Counter() for rank in layout.working}
    for block in layout.dense_blocks():
        names = [n for n in skeleton.blocks[block] if n in parameters]
        for rank in layout.state_holders(block):
            pieces[rank].update(n for n in names if parameters[n].requires_grad)
    found = {}
    for rank, counts in pieces.items():
        holding, num_bytes, copied = Holding.of(layout, rank), 0, 0
        for name, count in counts.items():
            cut, shape = skeleton.cuts.get(name), skeleton.specs[name].shape
            size = torch.Size(cut.run_shape(shape, count) if cut else shape).numel()
            size *= parameters[name].element_size()
            num_bytes += size
            copied += size if cut and count < len(holding.run(cut.kind)) else 0
        found[rank] = OwnedState(num_bytes, copied, len(counts))
    return found


def memory_budget(
    skeleton: Skeleton,
    shape: MicroBatchShape,
    *,
    num_slots: int,
    used_slots: int,
    num_ranks: int,
    optimizer: str = "adamw",
    holding: Holding | None = None,
    owned: OwnedState | None = None,
) -> MemoryBudget:
    """Compute the memory that a rank needs; nothing may be materialised yet.

    Activations of N = rows x row_tokens tokens, in bytes, with b of the compute type, K experts per
    token and hidden size H:

        layer  N b (2 H + sum of in + out over dense matrices + K x the same over an expert's)
               + 8 N x (sum of norms' sizes)             (norms compute in float32)
        casts  b x elements of the layer's matrices      (mixed precision only)
        head   N V (8 + b)                               (logits, log-softmax, its gradient)
        total  head + sum of layers and casts; with checkpointing head + layers x N H b
               + the largest layer with its casts

    In a pipeline the layers' part counts for each micro-batch in flight. Matrices and norms are of
    the size that the rank holds. Rows are taken to spread evenly over the ranks, so that each
    computes K N rows per layer.

    Args:
        skeleton: The model.
        shape: Of the micro-batches.
        num_slots: Slots of each layer with experts.
        used_slots: Slots that hold experts on the rank, over all layers.
        num_ranks: Ranks of the job.
        optimizer: One of `STATES`.
        holding: What the rank holds beside experts; None: everything.
        owned: Dense blocks with optimizer state on the rank; None: all that it holds.
    """
    holding = holding or Holding.everything(skeleton)
    parameters = dict(skeleton.module.named_parameters())
    held = _held_shapes(skeleton, holding)
    experts = [one for one in skeleton.experts if one and one.layer in holding.layers]
    stacks = {name for one in experts for name in one.tensors}
    dense = {name: shape for name, shape in held.items() if name not in stacks}
    width = {name: parameter.element_size() for name, parameter in parameters.items()}
    unsaved = [one for name, one in skeleton.module.named_buffers() if name not in skeleton.specs]
    kept = [
        skeleton.specs[name].dtype.itemsize * shape.numel()
        for name, shape in dense.items()
        if name not in parameters
    ]
    slot_bytes = sum(_bytes([parameters[name]]) // len(parameters[name]) for name in stacks)
    layers = max(len(experts), 1)
    slots = slot_bytes * num_slots
    used = slot_bytes * used_slots // layers
    weights = {name: width[name] * dense[name].numel() for name in dense if name in parameters}
    trained = {name: n for name, n in weights.items() if parameters[name].requires_grad}
    owned = owned or OwnedState(sum(trained.values()), 0, len(trained))
    counters = _COUNTER_BYTES * (owned.num_tensors + len(stacks)) if optimizer == "adamw" else 0
    return MemoryBudget(
        dense_weights=sum(weights.values()) + sum(kept) + _bytes(unsaved) + owned.copied_bytes,
        used_slots=used,
        free_slots=slots - used,
        gradients=sum(trained.values()) + slots,
        optimizer=STATES[optimizer] * (owned.num_bytes + slots) + counters,
        activations=_activations(skeleton, shape, num_slots, held, holding),
        in_flight=sum(trained.values()) if num_ranks > 1 else 0,
    )


def _held_shapes(skeleton: Skeleton, holding: Holding) -> dict[str, torch.Size]:
    """The shapes of what a rank holds, by name; those of stacks with all experts."""
    shards: Counter[str] = Counter()
    for block, specs in skeleton.blocks.items():
        if holding.has(block):
            shards.update(specs.keys())
    found = {}
    for name, count in shards.items():
        shape, cut = skeleton.specs[name].shape, skeleton.cuts.get(name)
        found[name] = torch.Size(cut.run_shape(shape, count) if cut else shape)
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _activations(
    skeleton: Skeleton,
    shape: MicroBatchShape,
    num_slots: int,
    held: Mapping[str, torch.Size],
    holding: Holding,
) -> int:
    num_tokens = shape.rows * shape.row_tokens
    own = next(skeleton.module.parameters()).dtype
    width = (shape.compute_dtype or own).itemsize
    hidden = library.hidden_size(skeleton.module)
    per_token = library.experts_per_token(skeleton.config)
    stacks = {name for one in skeleton.experts if one for name in one.tensors}
    by_layer: dict[int, int] = defaultdict(lambda: 2 * hidden * width * num_tokens)
    for name, _ in skeleton.module.named_parameters():
        number = name.removeprefix(f"{skeleton.layers}.").partition(".")[0]
        if not name.startswith(f"{skeleton.layers}.") or name not in held:
            continue
        sizes = held[name][1:] if name in stacks else held[name]
        if len(sizes) < 2:
            by_layer[int(number)] += 0 if name in stacks else 8 * num_tokens * sum(sizes)
            continue
        times = per_token if name in stacks else 1
        by_layer[int(number)] += num_tokens * times * width * (sizes[0] + sizes[1])
        if shape.compute_dtype not in (None, own):
            copies = num_slots if name in stacks else 1
            by_layer[int(number)] += copies * sizes.numel() * width
    vocabulary = library.vocabulary_size(skeleton.module)
    head = num_tokens * vocabulary * (8 + width) * holding.has_head
    if not shape.checkpoint_activations:
        return head + sum(by_layer.values()) * shape.num_in_flight
    inputs = len(by_layer) * num_tokens * hidden * width * shape.num_in_flight
    return head + inputs + max(by_layer.values(), default=0)


def budget_table(budget: MemoryBudget, *, rank: int, available: int | None) -> str:
    """Return the budget of a rank as a table.

    Args:
        budget: The budget.
        rank: The rank.
        available: Bytes that the rank can have; None: unknown.
    """
    rows = [
        ("dense weights", budget.dense_weights),
        ("experts: slots in use", budget.used_slots),
        ("experts: free slots", budget.free_slots),
        ("gradients", budget.gradients),
        ("optimizer state", budget.optimizer),
        ("activations (estimate)", budget.activations),
        ("gradients in flight", budget.in_flight),
        ("peak (estimate)", budget.total),
    ]
    name, unit = ("GiB", _GIB) if budget.total >= _GIB else ("MiB", _MIB)
    lines = [f"memory of rank {rank}, which needs most, in {name}"]
    lines += [f"  {name:<24}{size / unit:>12,.2f}" for name, size in rows]
    known = "unknown" if available is None else f"{available / unit:,.2f}"
    return "\n".join([*lines, f"  {'available':<24}{known:>12}"])


def require_memory(budget: MemoryBudget, *, available: int | None, where: str) -> None:
    """Reject a budget that cannot fit.

    Args:
        budget: Of this rank.
        available: Bytes that this rank can have; None: unknown, nothing is rejected.
        where: Names the rank and its device.

    Raises:
        ConfigError: More is needed than there is.
    """
    if available is not None and budget.least > available:
        raise ConfigError(
            f"{where}: training needs at least {budget.least / _GIB:.3f} GiB of memory "
            f"({budget.state / _GIB:.3f} GiB without activations), "
            f"{available / _GIB:.3f} GiB are available",
            remedy="use more ranks or a smaller model, fewer rows_per_microbatch, or "
            "checkpoint_activations",
        )
