"""Adds up gradients over the ranks while the backward pass goes on, and clips them.

A dense parameter is on all ranks: its gradients are all-reduced in buckets. A replicated expert is
on some: each of them gets the gradients of the others in one all-to-all per bucket and adds them
up in rank order, so that replicas stay equal bit by bit. Buckets start in one fixed order, each as
soon as it and those before it are complete. Losses are sums divided by a global count, so sums of
gradients are what is wanted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from pacekeeper.core.layout.layout import ReplicaSet
from pacekeeper.trainer.groups.group import Group, Pending

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel's default


class Bucket(Protocol):
    """Parameters whose gradients travel together."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters."""

    def start(self) -> None:
        """Send the gradients, all of which are there."""

    def finish(self) -> None:
        """Wait for those of the others, and add them up."""


class DenseBucket:
    """Gradients that all ranks of the group hold.

    A parameter that has a gradient on no rank keeps none, so that no optimizer touches it: an
    encoder of images in a step of text must not decay. The host waits for that only where this
    rank has none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.parameters = tuple(parameters)
        self._group = group
        self._is_used: list[bool] = []
        self._flat: Tensor | None = None
        self._pending: Pending | None = None

    def start(self) -> None:
        self._is_used = [p.grad is not None for p in self.parameters]
        parts = [gradient_of(p).reshape(-1) for p in self.parameters]
        uses = parts[0].new_ones(len(parts))
        for place, is_used in enumerate(self._is_used):
            if not is_used:
                uses[place].zero_()  # a copy of a list would wait for the device
        self._flat = torch.cat([*parts, uses])
        self._pending = self._group.all_reduce(self._flat)

    def finish(self) -> None:
        assert self._pending is not None and self._flat is not None, "finish comes after start"
        self._pending.wait()
        sizes = [p.numel() for p in self.parameters]
        *parts, uses = self._flat.split([*sizes, len(sizes)])
        for parameter, part in zip(self.parameters, parts, strict=True):
            gradient_of(parameter).copy_(part.view(parameter.shape))
        if not all(self._is_used):
            for parameter, count in zip(self.parameters, uses.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        self._flat = self._pending = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackedExperts:
    """Experts of one layer on this rank.

    Attributes:
        parameters: Stacked parameters, [slots, ...] each.
        experts: Replicas of each expert of the layer.
        slots: Slot of each expert held here.
    """

    parameters: Sequence[nn.Parameter]
    experts: Sequence[ReplicaSet]
    slots: Mapping[int, int]
    _counted: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def counted_slots(self, rank: int) -> Tensor:
        """Return the slots of the experts that this rank counts: as their lowest replica rank.

        The same tensor each time, on the device: to make it there, the host waits.
        """
        if rank not in self._counted:
            counted = (slot for e, slot in self.slots.items() if self.experts[e][0].rank == rank)
            device = self.parameters[0].device
            self._counted[rank] = torch.tensor(sorted(counted), dtype=torch.int64, device=device)
        return self._counted[rank]


class ReplicaBucket:
    """Gradients of replicated experts of some layers.

    Args:
        layers: The layers, in the same order on all ranks.
        group: Ranks that hold the experts.
    """

    def __init__(self, layers: Sequence[StackedExperts], group: Group) -> None:
        self.parameters = [p for layer in layers for p in layer.parameters]
        self._group = group
        self._layers = [(layer.parameters, _SharedSlots.of(layer, group)) for layer in layers]
        # Parts of the buffers: by member, layer and parameter.
        self._sizes = [
            [
                len(shared.by_member[i]) * p[0].numel()
                for parameters, shared in self._layers
                for p in parameters
            ]
            for i in range(len(group.ranks))
        ]
        self._arrived: Tensor | None = None
        self._pending: Pending | None = None

    def start(self) -> None:
        parts = [
            gradient_of(p).index_select(0, shared.slots[shared.by_member[i]]).reshape(-1)
            for i in range(len(self._group.ranks))
            for parameters, shared in self._layers
            for p in parameters
        ]
        splits = [sum(sizes) for sizes in self._sizes]
        sent = torch.cat(parts)
        self._arrived = torch.empty_like(sent)
        self._pending = self._group.all_to_all_rows(self._arrived, sent, splits, splits)

    def finish(self) -> None:
        assert self._pending is not None and self._arrived is not None, "finish comes after start"
        self._pending.wait()
        arrived = iter(self._arrived.split([n for sizes in self._sizes for n in sizes]))
        own = self._group.ranks.index(self._group.rank)
        parts = [(shared, p) for parameters, shared in self._layers for p in parameters]
        grads = [gradient_of(p).index_select(0, shared.slots) for shared, p in parts]
        sums = [torch.zeros_like(gradient) for gradient in grads]
        for i in range(len(self._group.ranks)):
            for (shared, p), gradient, total in zip(parts, grads, sums, strict=True):
                rows = next(arrived).view(-1, *p.shape[1:])
                if i == own:
                    total += gradient
                else:
                    total.index_add_(0, shared.by_member[i], rows)
        for (shared, p), total in zip(parts, sums, strict=True):
            gradient_of(p).index_copy_(0, shared.slots, total)
        self._arrived = self._pending = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SharedSlots:
    """Own slots of the experts with replicas elsewhere, and their positions by member."""

    slots: Tensor
    by_member: tuple[Tensor, ...]

    @classmethod
    def of(cls, layer: StackedExperts, group: Group) -> "_SharedSlots":
        device = layer.parameters[0].device
        shared = [e for e in sorted(layer.slots) if len(layer.experts[e]) > 1]
        holders = [{replica.rank for replica in layer.experts[e]} for e in shared]
        by_member = (
            [i for i, ranks in enumerate(holders) if member in ranks and member != group.rank]
            for member in group.ranks
        )
        return cls(
            slots=torch.tensor([layer.slots[e] for e in shared], dtype=torch.int64, device=device),
            by_member=tuple(
                torch.tensor(chosen, dtype=torch.int64, device=device) for chosen in by_member
            ),
        )


def replica_buckets(
    layers: Iterable[StackedExperts], group: Group, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Make buckets of consecutive layers, in the given order; all ranks cut at the same layers.

    Layers whose experts have one replica each are left out.
    """
    buckets: list[Bucket] = []
    held: list[StackedExperts] = []
    size = 0
    for layer in layers:
        copies = sum(len(replicas) - 1 for replicas in layer.experts)
        if not copies:
            continue
        held.append(layer)
        size += sum(p[0].numel() * p.element_size() for p in layer.parameters) * copies
        if size >= bucket_bytes * len(group.ranks):
            buckets.append(ReplicaBucket(held, group))
            held, size = [], 0
    return buckets + ([ReplicaBucket(held, group)] if held else [])


def dense_buckets(
    parameters: Iterable[nn.Parameter], group: Group, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Make buckets of parameters of one type and device, in the given order."""
    buckets: list[Bucket] = []
    held: list[nn.Parameter] = []
    for parameter in parameters:
        size = sum(p.numel() * p.element_size() for p in held)
        if held and (parameter.dtype != held[0].dtype or size >= bucket_bytes):
            buckets.append(DenseBucket(held, group))
            held = []
        held.append(parameter)
    return buckets + ([DenseBucket(held, group)] if held else [])


@dataclass(kw_only=True)
class GradientSync:
    """Starts buckets in their order while the backward pass of the last micro-batch runs.

    Attributes:
        buckets: In the order in which all ranks start them: the end of the model first.
    """

    buckets: Sequence[Bucket]
    _missing: list[int] = field(default_factory=list)
    _started: int = 0
    _is_armed: bool = False
    _handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, number=number: self._on_gradient(number)
                    )
                )

    def arm(self) -> None:
        """Expect the last backward pass of a step: gradients are complete with it."""
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._started, self._is_armed = 0, True

    def disarm(self) -> None:
        """Expect nothing more of a step that was interrupted."""
        self._is_armed = False

    def finish(self) -> None:
        """Start what has not started, wait for all, and leave the sums in the gradients.

        A parameter without a gradient takes part with zeros; without one on all ranks it keeps
        none.
        """
        self._is_armed = False
        for bucket in self.buckets[self._started :]:
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, number: int) -> None:
        if not self._is_armed:
            return
        self._missing[number] -= 1
        while self._started < len(self.buckets) and self._missing[self._started] <= 0:
            self.buckets[self._started].start()
            self._started += 1


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the parameter's gradient, zeros where the backward pass made none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def clip_global_norm(
    dense: Sequence[nn.Parameter],
    layers: Iterable[StackedExperts],
    group: Group,
    max_norm: float | None,
) -> Tensor:
    """Scale all gradients so that their L2 norm over the whole model is at most `max_norm`.

    A replicated expert counts once. No host synchronisation.

    Args:
        dense: Parameters that all ranks hold; their gradients are equal on all ranks. Those
            without a gradient are left alone.
        layers: Experts held here.
        group: Ranks that hold the experts.
        max_norm: The bound; None: only measure.

    Returns:
        The norm before clipping, a scalar on the device.
    """
    layers = list(layers)
    stacked = [p for layer in layers for p in layer.parameters]
    first = [*dense, *stacked][0]
    every = [p for p in dense if p.grad is not None] + stacked
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    square = torch.zeros((), dtype=wide, device=first.device)
    for layer in layers:
        counted = layer.counted_slots(group.rank)
        for p in layer.parameters:
            # By slot, then chosen: what lies in other slots may be no number.
            by_slot = gradient_of(p).reshape(len(p), -1)
            norms = torch.linalg.vector_norm(by_slot, dim=1, dtype=wide)
            square += norms.index_select(0, counted).square().sum()
    group.all_reduce(square).wait()
    gradients = [p.grad for p in dense if p.grad is not None]
    for norm in torch._foreach_norm(gradients, 2.0, wide) if gradients else ():
        square += norm.to(wide).square()
    total = square.sqrt()
    if max_norm is not None and every:
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([gradient_of(p) for p in every], scale)
    return total
