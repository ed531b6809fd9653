"""Adds up gradients over the ranks while the backward pass goes on, and clips them.

Those of dense blocks: `dense.py`. A replicated expert is on some ranks: each of them gets
the gradients of the others in one all-to-all per bucket and adds them up in rank order, so that
replicas stay equal bit by bit. Buckets start in one fixed order, each as soon as it and those
before it are complete. Losses are sums divided by a global count, so sums of gradients are what is
wanted.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from pacekeeper.core.layout.layout import Layout, ReplicaSet
from pacekeeper.trainer.groups.group import Group, Pending
from pacekeeper.trainer.parallel.block_states import TrainedBlocks
from pacekeeper.trainer.parallel.gradients.dense import (
    BUCKET_BYTES,
    DensePart,
    WeightMessage,
    dense_buckets,
    dense_parts,
    gradient_of,
    updated_parts,
    weight_messages,
)
from pacekeeper.trainer.parallel.mesh.subgroup import subgroup


class Bucket(Protocol):
    """Parameters whose gradients travel together."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters."""

    def start(self, unused: Collection[int] = ()) -> None:
        """Send the gradients, all of which are there; zeros for parameters of these ids."""

    def finish(self) -> Iterable[tuple[nn.Parameter, bool]]:
        """Wait for those of the others, and add them up.

        Returns:
            Of each part of a dense parameter that is updated here, whether any rank used it.
        """


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

    def start(self, unused: Collection[int] = ()) -> None:
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

    def finish(self) -> Iterable[tuple[nn.Parameter, bool]]:
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
        return ()


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
        self._is_armed, self._started = False, 0

    def finish(self) -> None:
        """Start what has not started, wait for all, and leave the sums in the gradients.

        A parameter without a gradient takes part with zeros; one without a gradient on all ranks
        keeps none, whatever buckets its parts are in, so that it does not decay either.
        """
        self._is_armed = False
        left = self.buckets[self._started :]
        unused = {id(p) for bucket in left for p in bucket.parameters if p.grad is None}
        for bucket in left:
            bucket.start(unused)
        used: dict[nn.Parameter, bool] = {}
        for bucket in self.buckets:
            for parameter, is_used in bucket.finish():
                used[parameter] = used.get(parameter, False) or is_used
        for parameter, is_used in used.items():
            if not is_used:
                parameter.grad = None

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


def clip_global_norm(
    dense: Sequence[DensePart],
    layers: Iterable[StackedExperts],
    group: Group,
    max_norm: float | None,
    square: Tensor,
) -> Tensor:
    """Scale all gradients so that their L2 norm over the whole model is at most `max_norm`.

    What several ranks hold counts once. No host synchronisation.

    Args:
        dense: Parts updated here; their gradients are equal on all ranks that update them. Those
            without a gradient are left alone.
        layers: Experts held here.
        group: All ranks.
        max_norm: The bound; None: only measure.
        square: Zero, a scalar on the device, of the type that sums have.

    Returns:
        The norm before clipping, a scalar on the device.
    """
    layers = list(layers)
    used = [one for one in dense if one.parameter.grad is not None]
    counted = [one.gradient for one in used if one.counter == group.rank]
    for norm in torch._foreach_norm(counted, 2.0, square.dtype) if counted else ():
        square += norm.to(square.dtype).square()
    for layer in layers:
        slots = layer.counted_slots(group.rank)
        for p in layer.parameters:
            # By slot, then chosen: what lies in other slots may be no number.
            by_slot = gradient_of(p).reshape(len(p), -1)
            norms = torch.linalg.vector_norm(by_slot, dim=1, dtype=square.dtype)
            square += norms.index_select(0, slots).square().sum()
    group.all_reduce(square).wait()
    total = square.sqrt()
    every = {id(one.parameter): one.parameter for one in used}
    gradients = [
        gradient_of(p) for p in [*every.values(), *(p for x in layers for p in x.parameters)]
    ]
    if max_norm is not None and gradients:
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
    return total


class Gradients:
    """The gradients of one rank: who shares them, and their norm.

    Args:
        states: The blocks held here.

    Attributes:
        sync: Adds up the gradients of a step.
        weight_messages: What owners send after an update.
    """

    def __init__(self, states: TrainedBlocks) -> None:
        self._states = states
        self._store = states.store
        self._updated: list[DensePart] = []
        self._stacked: list[StackedExperts] = []
        self.sync = GradientSync(buckets=())
        self.weight_messages: list[WeightMessage] = []

    def use_layout(self, layout: Layout, group: Group) -> None:
        """Add up over those who hold the same blocks in this layout.

        Args:
            layout: The layout, which `states` follow.
            group: Its ranks.
        """
        self.sync.close()
        store = self._store
        places = {id(p): n for n, p in enumerate(store.skeleton.module.parameters())}
        dense = dense_parts(self._states, layout, group.rank, places)
        self._updated = updated_parts(dense)
        self.weight_messages = weight_messages(store, layout, group.ranks, group.rank)
        trained = {
            layer: [p for p in store.stacked(layer).values() if p.requires_grad]
            for layer in store.holding.layers
        }
        self._stacked = [
            StackedExperts(
                parameters=parameters, experts=layout.experts[layer], slots=store.slots[layer]
            )
            for layer, parameters in trained.items()
            if parameters
        ]
        buckets: list[tuple[int, Bucket]] = [*dense_buckets(dense, group)]
        if self._stacked:
            sharing = subgroup(group, layout.ranks_of_layer(store.holding.layers.start))
            buckets += [
                (min(places[id(p)] for p in one.parameters), one)
                for one in replica_buckets(reversed(self._stacked), sharing)
            ]
        # A bucket is complete when the backward pass reaches the first of its parameters.
        buckets.sort(key=lambda one: -one[0])
        self.sync = GradientSync(buckets=[one for _, one in buckets])

    def clip(self, max_norm: float | None, group: Group) -> Tensor:
        """Return the norm of the sums, which are scaled down to `max_norm`; all ranks call it."""
        parameter = next(self._store.skeleton.module.parameters())
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        square = torch.zeros((), dtype=wide, device=self._store.device)
        return clip_global_norm(self._updated, self._stacked, group, max_norm, square)
