"""Moves experts between ranks: weights and optimizer state, in one all-to-all with checksums.

A move is staged first: until `commit` nothing that is in force changes, so that a rank whose data
arrived damaged stops all. What stays on a rank stays in its slot and changes no bit.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pacekeeper.core.errors import ConfigError, CorruptStateError
from pacekeeper.core.layout.diff import diff_layouts
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.parallel.optimizers import states_of
from pacekeeper.trainer.parallel.row_exchange import exchange

_WORD = 8  # bytes


class ExpertStore(Protocol):
    """Experts of one rank, stacked by layer."""

    @property
    def num_slots(self) -> int:
        """Slots of a layer on every rank."""

    @property
    def slots(self) -> Sequence[Mapping[int, int]]:
        """By layer, the slot of each expert held here; {} for a dense layer."""

    def stacked(self, layer: int) -> Mapping[str, nn.Parameter]:
        """Return the layer's stacked parameters, [num_slots, ...] each, by name."""

    def assign(self, layer: int, slots: Mapping[int, int]) -> None:
        """Let these slots hold these experts from now on; new ones are written afterwards."""


def assign_slots(
    held: Mapping[int, int], wanted: Collection[int], num_slots: int
) -> dict[int, int]:
    """Return a slot for each wanted expert: what is held stays, the others fill the lowest gaps.

    Raises:
        ValueError: There are more experts than slots.
    """
    if len(wanted) > num_slots:
        raise ValueError(f"{len(wanted)} experts of a layer do not fit into {num_slots} slots")
    staying = {expert: slot for expert, slot in held.items() if expert in wanted}
    taken = set(staying.values())
    free = (slot for slot in range(num_slots) if slot not in taken)
    return staying | {expert: next(free) for expert in sorted(set(wanted) - staying.keys())}


def require_slots(layout: Layout, num_slots: int) -> None:
    """Reject a layout that puts more experts of a layer on a rank than it has slots.

    Every rank sees the whole layout, so all reject it together.

    Raises:
        ConfigError: Which layer and rank need how many slots.
    """
    for layer, experts in enumerate(layout.experts):
        on: dict[int, int] = {}
        for replicas in experts:
            for replica in replicas:
                on[replica.rank] = on.get(replica.rank, 0) + 1
        rank = max(on, key=lambda r: on[r], default=0)
        if on.get(rank, 0) > num_slots:
            raise ConfigError(
                f"generation {layout.generation}: layer {layer} puts {on[rank]} experts on rank "
                f"{rank}, which has {num_slots} slots per layer",
                remedy="build the engine with more slots, or place fewer replicas",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedMove:
    """Experts that arrived, not in force yet.

    Attributes:
        slots: By layer, the slot of each expert that this rank holds after the move.
        arrived: Tensors of each (layer, expert) that comes, by name.
        moved_bytes: What this rank sent.
    """

    slots: tuple[dict[int, int], ...]
    arrived: Mapping[tuple[int, int], Mapping[str, Tensor]]
    moved_bytes: int


def stage_move(
    store: ExpertStore,
    optimizers: Sequence[torch.optim.Optimizer],
    old: Layout,
    new: Layout,
    group: Group,
) -> StagedMove:
    """Fetch the experts that `new` puts on this rank and `old` does not.

    Args:
        store: Experts held here.
        optimizers: Of the experts' parameters; on all ranks after the same number of steps.
        old: The layout in force.
        new: The next layout, accepted by `require_slots`.
        group: All ranks.

    Raises:
        CorruptStateError: On all ranks, where an expert arrived damaged on one.
    """
    if not any(new.experts):
        return StagedMove(slots=tuple({} for _ in new.experts), arrived={}, moved_bytes=0)
    device = next(iter(store.stacked(_first_layer(new)).values())).device
    position = {rank: i for i, rank in enumerate(group.ranks)}
    outgoing: list[list[tuple[int, int]]] = [[] for _ in group.ranks]
    incoming: list[list[tuple[int, int]]] = [[] for _ in group.ranks]
    for move in diff_layouts(old, new):
        if move.block.kind is not BlockKind.EXPERT or move.source is None:
            continue
        if move.source == group.rank:
            outgoing[position[move.destination]].append((move.block.layer, move.block.index))
        if move.destination == group.rank:
            incoming[position[move.source]].append((move.block.layer, move.block.index))
    packed = [
        [
            _packed(
                _tensors(store, optimizers, layer, store.slots[layer][expert]),
                _name(new.generation, layer, expert, device),
            )
            for layer, expert in pairs
        ]
        for pairs in outgoing
    ]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    lengths = [
        [_num_bytes(_tensors(store, optimizers, layer, 0)) for layer, _ in pairs]
        for pairs in incoming
    ]
    received = exchange(
        torch.cat([empty, *(one for some in packed for one in some)]),
        group,
        receive=[sum(some) for some in lengths],
        send=[sum(len(one) for one in some) for some in packed],
    )
    moved = [pair for some in incoming for pair in some]
    parts = received.split([n for some in lengths for n in some]) if moved else ()
    arrived, damaged = {}, []
    for (layer, expert), part in zip(moved, parts, strict=True):
        like = _tensors(store, optimizers, layer, 0)
        if not _is_intact(part, _name(new.generation, layer, expert, device)):
            damaged.append(f"layer {layer} expert {expert}")
        arrived[layer, expert] = _unpacked(part, like)
    bad = torch.tensor(float(len(damaged)), device=device)
    group.all_reduce(bad).wait()
    if bad.item():
        raise CorruptStateError(
            f"generation {new.generation}: {int(bad.item())} experts arrived damaged"
            + (f", here {', '.join(damaged)}" if damaged else " on other ranks"),
            remedy="the old layout is in force; look at the network and the memory of these hosts",
        )
    return StagedMove(
        slots=tuple(
            assign_slots(held, new.experts_on(group.rank, layer), store.num_slots)
            for layer, held in enumerate(store.slots)
        ),
        arrived=arrived,
        moved_bytes=sum(len(one) for some in packed for one in some),
    )


def commit_move(
    store: ExpertStore, optimizers: Sequence[torch.optim.Optimizer], staged: StagedMove
) -> None:
    """Put a staged move in force; slots that are free afterwards are zero in every tensor."""
    change_slots(store, optimizers, staged.slots)
    for layer, slots in enumerate(staged.slots):
        for expert, slot in slots.items():
            if (layer, expert) in staged.arrived:
                fresh = staged.arrived[layer, expert]
                for name, tensor in _tensors(store, optimizers, layer, slot).items():
                    tensor.copy_(fresh[name])


def change_slots(
    store: ExpertStore,
    optimizers: Sequence[torch.optim.Optimizer],
    slots: Sequence[Mapping[int, int]],
) -> None:
    """Let each layer's `slots` hold these experts; slots that are left are zero in every tensor."""
    for layer, wanted in enumerate(slots):
        left = [slot for expert, slot in store.slots[layer].items() if expert not in wanted]
        store.assign(layer, wanted)
        for slot in left:
            for tensor in _tensors(store, optimizers, layer, slot).values():
                tensor.zero_()


def _first_layer(layout: Layout) -> int:
    return next(layer for layer, experts in enumerate(layout.experts) if experts)


def _tensors(
    store: ExpertStore, optimizers: Sequence[torch.optim.Optimizer], layer: int, slot: int
) -> dict[str, Tensor]:
    """Weights and optimizer state in a slot, by name: views."""
    found = {}
    for name, parameter in store.stacked(layer).items():
        found[name] = parameter.detach()[slot]
        for key, state in states_of(parameter, optimizers).items():
            found[f"{name}.{key}"] = state[slot]
    return found


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return size + -size % _WORD + _WORD


def _packed(tensors: Mapping[str, Tensor], name: Tensor) -> Tensor:
    """The tensors' bytes in the order of their names, filled up to whole words, and a checksum."""
    parts = [tensors[name].reshape(-1).view(torch.uint8) for name in sorted(tensors)]
    size = sum(len(part) for part in parts)
    data = torch.cat([*parts, parts[0].new_zeros(-size % _WORD)])
    return torch.cat([data, _checksum(data, name)[None].view(torch.uint8)])


def _unpacked(packed: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found, at = {}, 0
    for name in sorted(like):
        end = at + like[name].numel() * like[name].element_size()
        # A copy, as the type's alignment may differ from that of the others.
        found[name] = packed[at:end].clone().view(like[name].dtype).view(like[name].shape)
        at = end
    return found


def _is_intact(packed: Tensor, name: Tensor) -> bool:
    stored = packed[-_WORD:].view(torch.int64)[0]
    return bool(stored == _checksum(packed[:-_WORD], name))


def _checksum(data: Tensor, name: Tensor) -> Tensor:
    """Return the sum of the data's 64-bit words, each mixed with its place and the block's name.

    The mix is that of splitmix64, on the device: changed, exchanged or missing words, and the words
    of another block, give another sum but for one case in 2^64.
    """
    words = data.view(torch.int64)
    place = torch.arange(1, len(words) + 1, device=data.device)
    mixed = words + (place + name) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return (mixed ^ (mixed >> 31 & (1 << 33) - 1)).sum() + 1


def _name(generation: int, layer: int, expert: int, device: torch.device) -> Tensor:
    """Return a number of the block and the move."""
    return torch.tensor(hash((generation, layer, expert)) & (1 << 62) - 1, device=device)
