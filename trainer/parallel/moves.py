"""Moves blocks between ranks: weights and optimizer state, in one all-to-all with checksums.

A move is staged first: until `commit` nothing that is in force changes, so that a rank whose data
arrived damaged stops all. What stays on a rank stays in its slot and changes no bit. Data and
checksums stay on the device.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pacekeeper.core.errors import ConfigError, CorruptStateError, LostStateError
from pacekeeper.core.layout.diff import Transfer, diff_layouts, lost_blocks
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import (
    BlockState,
    BlockStates,
    StateSpec,
    blocks_on,
    kinds_of,
    read_block,
)
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.parallel.optimizers import states_of
from pacekeeper.trainer.parallel.row_exchange import exchange

_WORD = 8  # bytes
_NAMED = 8  # of the blocks that are lost


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
    """Blocks that arrived, not in force yet.

    Attributes:
        held: Blocks that this rank holds after the move, as of `blocks_on`.
        arrived: Tensors of each block, or part of one, that comes, by name.
        num_updates: Updates that the optimizers of the senders had made.
        moved_bytes: What this rank sent.
    """

    held: Mapping[Block, bool]
    arrived: Mapping[Block, BlockState]
    num_updates: int
    moved_bytes: int


def stage_move(
    states: BlockStates,
    old: Layout,
    new: Layout,
    group: Group,
    refilled: Mapping[Block, BlockState] | None = None,
) -> StagedMove:
    """Fetch the blocks that `new` puts on this rank and `old` does not.

    Args:
        states: Blocks held here, as `old` says.
        old: The layout in force; ranks of it that are not in `group` are dead.
        new: The next layout, accepted by `require_slots`, for ranks of `group`.
        group: All ranks that hold or get blocks.
        refilled: What this rank gets of blocks that no rank of `group` holds; None: there are none.

    Raises:
        LostStateError: On all ranks: no rank holds a block, and it was not refilled.
        CorruptStateError: On all ranks: a block arrived damaged on one.
    """
    if refilled is None:
        _require_holders(old, group.ranks)
    moves = diff_layouts(old, new, living=group.ranks)
    fetched = fetch_blocks(states, moves, new.generation, group)
    return StagedMove(
        held=blocks_on(new, group.rank),
        arrived={**(refilled or {}), **fetched.arrived},
        num_updates=fetched.num_updates,
        moved_bytes=fetched.moved_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Blocks that arrived; attributes as of `StagedMove`."""

    arrived: Mapping[Block, BlockState]
    num_updates: int
    moved_bytes: int


def fetch_blocks(
    states: BlockStates, moves: Iterable[Transfer], generation: int, group: Group
) -> Fetched:
    """Send blocks from rank to rank in one all-to-all; all ranks call it with the same moves.

    Args:
        states: Blocks held here.
        moves: Copies of blocks; those without a source are left out.
        generation: Of the layout that they are for.
        group: All ranks that send or get blocks.

    Raises:
        CorruptStateError: On all ranks: a block arrived damaged on one.
    """
    position = {rank: i for i, rank in enumerate(group.ranks)}
    outgoing: list[list[Tensor]] = [[] for _ in group.ranks]
    incoming: list[list[tuple[Block, list[StateSpec]]]] = [[] for _ in group.ranks]
    for move in moves:
        if move.source is None:
            continue
        if move.source == group.rank:
            outgoing[position[move.destination]].append(_packed(states, move, generation))
        if move.destination == group.rank:
            kinds = kinds_of(states, move.part)
            specs = [spec for spec in states.specs(move.block) if spec.kind in kinds]
            incoming[position[move.source]].append((move.block, specs))
    empty = torch.empty(0, dtype=torch.uint8, device=states.device)
    lengths = [[_num_bytes(specs) for _, specs in some] for some in incoming]
    received = exchange(
        torch.cat([empty, *(row for rows in outgoing for row in rows)]),
        group,
        receive=[sum(some) for some in lengths],
        send=[sum(map(len, rows)) for rows in outgoing],
    )
    wanted = [one for some in incoming for one in some]
    rows = received.split([n for some in lengths for n in some]) if wanted else ()
    arrived: dict[Block, dict[str, Tensor]] = {}
    damaged = []
    for (block, specs), row in zip(wanted, rows, strict=True):
        if not _is_intact(row, _number(generation, block)):
            damaged.append(block)
        arrived.setdefault(block, {}).update(_unpacked(row, specs))
    own = torch.tensor([len(damaged), states.num_updates], device=states.device)
    every = group.all_gather(own).tolist()
    if num_damaged := sum(row[0] for row in every):
        raise CorruptStateError(
            f"generation {generation}: {num_damaged} blocks arrived damaged"
            + (f", here {', '.join(map(str, damaged))}" if damaged else " on other ranks"),
            remedy="the old layout is in force; look at the network and the memory of these hosts",
        )
    return Fetched(
        arrived=arrived,
        num_updates=max(row[1] for row in every),
        moved_bytes=sum(len(row) for some in outgoing for row in some),
    )


def commit_move(states: BlockStates, staged: StagedMove) -> None:
    """Put a staged move in force; slots that are free afterwards are zero in every tensor."""
    states.load(staged.held, staged.arrived, staged.num_updates)


def _require_holders(layout: Layout, living: Collection[int]) -> None:
    if lost := lost_blocks(layout, living):
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        raise LostStateError(
            f"no living rank holds {', '.join(map(str, lost[:_NAMED]))}{more}",
            remedy="restart from a checkpoint",
        )


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


def _num_bytes(specs: Sequence[StateSpec]) -> int:
    size = sum(spec.size_bytes for spec in specs)
    return size + -size % _WORD + _WORD


def _packed(states: BlockStates, move: Transfer, generation: int) -> Tensor:
    """The tensors' bytes in the order of their names, filled up to whole words, and a checksum."""
    parts = [
        tensor.to(states.device).contiguous().reshape(-1).view(torch.uint8)
        for _, tensor in sorted(read_block(states, move.block, move.part).items())
    ]
    size = sum(len(part) for part in parts)
    data = torch.cat([*parts, torch.zeros(-size % _WORD, dtype=torch.uint8, device=states.device)])
    number = _number(generation, move.block)
    return torch.cat([data, checksum(data, number)[None].view(torch.uint8)])


def _unpacked(packed: Tensor, specs: Sequence[StateSpec]) -> dict[str, Tensor]:
    found, at = {}, 0
    for spec in sorted(specs, key=lambda one: one.name):
        # A copy, as the type's alignment may differ from that of the others.
        part = packed[at : at + spec.size_bytes].clone()
        found[spec.name] = part.view(spec.dtype).view(spec.shape)
        at += spec.size_bytes
    return found


def _is_intact(packed: Tensor, number: int) -> bool:
    stored = packed[-_WORD:].view(torch.int64)[0]
    return bool(stored == checksum(packed[:-_WORD], number))


def checksum(data: Tensor, number: int) -> Tensor:
    """Return the sum of the data's 64-bit words, each mixed with its place and the block's number.

    The mix is that of splitmix64, on the device: changed, exchanged or missing words, and the words
    of another block, give another sum but for one case in 2^64.
    """
    words = data.view(torch.int64)
    place = torch.arange(1, len(words) + 1, device=data.device)
    mixed = words + (place + number) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return (mixed ^ (mixed >> 31 & (1 << 33) - 1)).sum() + 1


def _number(generation: int, block: Block) -> int:
    """Return a number of the block and the move; the same in all processes."""
    kind = zlib.crc32(block.kind.encode())
    return hash((generation, kind, block.layer, block.index)) & (1 << 62) - 1
