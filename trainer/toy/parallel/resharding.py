"""From layout N to N+1: blocks - weights and both moments together - in one all-to-all.

Staged first, put in force only at the commit: until then the old state is untouched. Each block
carries a CRC32 that its receiver checks. A block that stays is not touched, or copied bit by bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.diff import Transfer, diff_layouts, lost_blocks
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import BlockState, blocks_on
from pacekeeper.trainer.distributed.checked_payload import (
    CRC_BYTES,
    all_to_all_bytes,
    pack_with_crc,
    unpack_checked,
)
from pacekeeper.trainer.distributed.collectives import Collectives
from pacekeeper.trainer.toy.model.block_state_dict import (
    ENDINGS,
    load_blocks,
    num_updates,
    num_values,
    read_block,
    shapes_of,
)
from pacekeeper.trainer.toy.model.transformer import MoETransformer

_NAMED = 8  # of the blocks that are lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What a rank is to hold and what arrived for it, not in force.

    `updates`: how many the optimizer of the sources had made.
    """

    wanted: tuple[Block, ...]
    arrived: dict[Block, BlockState]
    updates: int
    moved_bytes: int


def block_transfers(old: Layout, new: Layout, living: Sequence[int]) -> tuple[Transfer, ...]:
    """The blocks that change hands. Raises LostStateError where one has no living holder."""
    moves, lost = diff_layouts(old, new, living=living), lost_blocks(old, living)
    if lost:
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        raise LostStateError(
            f"no living holder of {', '.join(map(str, lost[:_NAMED]))}{more}",
            remedy="restart from a checkpoint",
        )
    return moves


def stage(
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    old: Layout,
    new: Layout,
    fabric: Collectives,
    refilled: Mapping[Block, BlockState] | None = None,
) -> Staged:
    """Fetch what `new` wants here and `old` did not have. Raises PeerLost, LostStateError.

    `refilled`: what this rank is to hold of the blocks that nobody holds any more; None: there are
    none. Raises PacekeeperError where a block does not fit its checksum.
    """
    if refilled is None:
        moves = block_transfers(old, new, living=fabric.ranks)
    else:
        moves = diff_layouts(old, new, living=fabric.ranks)
    outgoing: list[list[Tensor]] = [[] for _ in fabric.ranks]
    incoming: list[list[Block]] = [[] for _ in fabric.ranks]
    position = {rank: i for i, rank in enumerate(fabric.ranks)}
    updates, dtype = num_updates(optimizer), model.dtype
    for move in moves:
        if move.source is None:
            continue
        if move.source == fabric.rank:
            row = _flat(updates, read_block(model, optimizer, move.block))
            outgoing[position[move.destination]].append(pack_with_crc([row]))
        if move.destination == fabric.rank:
            incoming[position[move.source]].append(move.block)
    lengths = [
        [(1 + num_values(model, b)) * dtype.itemsize + CRC_BYTES for b in blocks]
        for blocks in incoming
    ]
    arrived: dict[Block, BlockState] = dict(refilled or {})
    for blocks, parcels in zip(incoming, all_to_all_bytes(outgoing, lengths, fabric), strict=True):
        for block, parcel in zip(blocks, parcels, strict=True):
            row = unpack_checked(parcel, str(block)).clone().view(dtype)
            told, arrived[block] = _cut_up(model, block, row)
            updates = max(updates, told)
    return Staged(
        wanted=blocks_on(new, fabric.rank),
        arrived=arrived,
        updates=updates,
        moved_bytes=sum(len(part) for parts in outgoing for part in parts),
    )


def swap_in(model: MoETransformer, optimizer: torch.optim.Optimizer, staged: Staged) -> None:
    """Put the staged state in force: parameters, moments, and the optimizer's parameter list."""
    load_blocks(model, optimizer, staged.wanted, staged.arrived, staged.updates)


def _flat(updates: int, state: BlockState) -> Tensor:
    """The number of updates, then all tensors of a block by name, in one row."""
    (first, *_), values = state.values(), [part.flatten() for part in state.values()]
    return torch.cat([first.new_tensor([float(updates)]), *values])


def _cut_up(model: MoETransformer, block: Block, row: Tensor) -> tuple[int, BlockState]:
    """What `_flat` was made of."""
    shapes = {
        f"{name}{ending}": shape
        for name, shape in shapes_of(model, block).items()
        for ending in ENDINGS
    }
    names = sorted(shapes)
    told, *parts = row.split([1, *(torch.Size(shapes[name]).numel() for name in names)])
    state = {name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)}
    return int(told), state
