"""From layout N to N+1: expert blocks - weights and both moments together - in one all-to-all.

A rank that layout N did not have gets the dense state, too, a part of it from each that has it.

Staged first, swapped in only at the commit: until then the old state is untouched. Each block
carries a CRC32 that its receiver checks. A block that stays is copied bit by bit.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pacekeeper.core.errors import LostStateError, PacekeeperError
from pacekeeper.core.layout import BlockKind, Layout, Transfer, transfers
from pacekeeper.trainer import dense_state
from pacekeeper.trainer.fabric import Collectives
from pacekeeper.trainer.model import MoETransformer
from pacekeeper.trainer.moe import ExpertBank

CRC_BYTES = 8
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The new state of one rank, complete but not in force. rows[layer]: [S, 3 * expert size].

    `dense`: as of trainer/dense_state.py, on a rank that had none.
    """

    layout: Layout
    rows: tuple[Tensor, ...]
    moved_bytes: int
    dense: Tensor | None = None


def expert_transfers(old: Layout, new: Layout, living: Sequence[int]) -> tuple[Transfer, ...]:
    """The expert blocks that change hands. Raises LostStateError where one has no living holder."""
    moves = tuple(t for t in transfers(old, new, living=living) if t.block.kind is BlockKind.EXPERT)
    lost = [t.block for t in moves if t.source is None]
    if lost:
        raise LostStateError(
            f"no living holder of {[(b.layer, b.index) for b in lost]} (layer, expert)",
            remedy="restart from a checkpoint",
        )
    return moves


def stage(
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    old: Layout,
    new: Layout,
    fabric: Collectives,
) -> Staged:
    """Fetch what `new` wants here and `old` did not have. Raises PeerLost, LostStateError.

    Raises PacekeeperError where a block does not fit its checksum.
    """
    held = [_rows(layer.bank, optimizer) for layer in model.layers()]
    banks = [layer.bank for layer in model.layers()]
    moves = expert_transfers(old, new, living=fabric.ranks)
    outgoing: list[list[Tensor]] = [[] for _ in fabric.ranks]
    incoming: list[list[Transfer]] = [[] for _ in fabric.ranks]
    lengths: list[list[int]] = [[] for _ in fabric.ranks]
    position = {rank: i for i, rank in enumerate(fabric.ranks)}
    dtype = held[0].dtype
    for move in moves:
        assert move.source is not None, "checked by expert_transfers"
        if move.source == fabric.rank:
            row = held[move.block.layer][banks[move.block.layer].experts.index(move.block.index)]
            outgoing[position[move.destination]].append(_seal(row))
        if move.destination == fabric.rank:
            incoming[position[move.source]].append(move)
            lengths[position[move.source]].append(
                _sealed_bytes(held[move.block.layer].shape[1], dtype)
            )
    givers = [rank for rank in fabric.ranks if rank in old.ranks]
    takers = [rank for rank in fabric.ranks if rank not in old.ranks]
    num = dense_state.num_values(model)
    cuts = [dense_state.part_of(num, i, len(givers)) for i in range(len(givers))]
    if takers and fabric.rank in givers:
        own = dense_state.pack(model, optimizer)[cuts[givers.index(fabric.rank)]]
        for rank in takers:
            outgoing[position[rank]].append(_seal(own))
    if fabric.rank in takers:
        for rank, cut in zip(givers, cuts, strict=True):
            lengths[position[rank]].append(_sealed_bytes(cut.stop - cut.start, dtype))
    parcels = _travel(outgoing, lengths, fabric)
    arrived = {
        (move.block.layer, move.block.index): parcel
        for moves, sent in zip(incoming, parcels, strict=True)
        for move, parcel in zip(moves, sent, strict=False)
    }
    dense = None
    if fabric.rank in takers:
        parts = [parcels[position[rank]][-1] for rank in givers]
        dense = torch.cat([_unseal(part, dtype, "dense state") for part in parts])
    wanted = []
    for layer, bank in enumerate(banks):
        experts = new.experts_on(fabric.rank, layer)
        rows = held[layer].new_empty((len(experts), held[layer].shape[1]))
        for slot, expert in enumerate(experts):
            if (layer, expert) in arrived:
                what = f"layer {layer} expert {expert}"
                rows[slot] = _unseal(arrived[layer, expert], dtype, what)
            else:
                rows[slot] = held[layer][bank.experts.index(expert)]
        wanted.append(rows)
    return Staged(
        layout=new,
        rows=tuple(wanted),
        moved_bytes=sum(len(part) for parts in outgoing for part in parts),
        dense=dense,
    )


def swap_in(
    model: MoETransformer, optimizer: torch.optim.Optimizer, staged: Staged, fabric: Collectives
) -> None:
    """Put the staged state in force: parameters, moments, and the optimizer's parameter list."""
    if staged.dense is not None:
        dense_state.unpack(model, optimizer, staged.dense)
    updates = _num_updates(optimizer)
    for layer, module in enumerate(model.layers()):
        bank = module.bank
        experts = staged.layout.experts_on(fabric.rank, layer)
        shapes = (bank.w1.shape[1:], bank.w2.shape[1:])
        sizes = [shapes[0].numel(), shapes[1].numel()] * 3
        parts = torch.split(staged.rows[layer], sizes, dim=1)
        for old in (bank.w1, bank.w2):
            optimizer.state.pop(old, None)
        w1, w2 = (
            part.reshape(len(experts), *shape).clone()
            for part, shape in zip(parts[:2], shapes, strict=True)
        )
        bank.replace(experts, {"w1": w1, "w2": w2})
        for i, parameter in enumerate((bank.w1, bank.w2)):
            if updates is not None:
                optimizer.state[parameter] = {
                    "step": updates.clone(),
                    "exp_avg": parts[2 + i].reshape(parameter.shape).clone(),
                    "exp_avg_sq": parts[4 + i].reshape(parameter.shape).clone(),
                }
    optimizer.param_groups[0]["params"] = ordered_parameters(model)


def ordered_parameters(model: MoETransformer) -> list[nn.Parameter]:
    """All parameters in the order the optimizer walks them: dense first, then banks by layer."""
    banks = [p for layer in model.layers() for p in (layer.bank.w1, layer.bank.w2)]
    return model.dense_parameters() + banks


def _rows(bank: ExpertBank, optimizer: torch.optim.Optimizer) -> Tensor:
    """[S, 3 * expert size]: weights, first and second moments of each local expert as one row."""
    parts = [bank.w1.detach(), bank.w2.detach()]
    for moment in _MOMENTS:
        for parameter in (bank.w1, bank.w2):
            state = optimizer.state.get(parameter, {})
            parts.append(state.get(moment, torch.zeros_like(parameter)).detach())
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _num_updates(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """How many updates were applied: the same for all parameters; None before the first."""
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return max(steps, key=float) if steps else None


def _seal(row: Tensor) -> Tensor:
    """The row's bytes followed by their CRC32."""
    data = row.contiguous().view(torch.uint8).cpu()
    crc = zlib.crc32(data.numpy().tobytes())
    return torch.cat([data, torch.tensor([crc]).view(torch.uint8)])


def _unseal(sealed: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    data, crc = sealed[:-CRC_BYTES], sealed[-CRC_BYTES:].clone().view(torch.int64)
    if zlib.crc32(data.numpy().tobytes()) != int(crc):
        raise PacekeeperError(f"{what} arrived damaged (checksum)")
    return data.clone().view(dtype)


def _sealed_bytes(num: int, dtype: torch.dtype) -> int:
    return num * dtype.itemsize + CRC_BYTES


def _travel(
    outgoing: list[list[Tensor]], lengths: list[list[int]], fabric: Collectives
) -> list[list[Tensor]]:
    """One all-to-all of byte strings, cut up again: what came from each member, in its order.

    `lengths`: of what comes, by member.
    """
    empty = torch.empty(0, dtype=torch.uint8)
    sent = [torch.cat(parts) if parts else empty for parts in outgoing]
    totals = [sum(some) for some in lengths]
    output = torch.empty(sum(totals), dtype=torch.uint8)
    fabric.all_to_all(output, torch.cat(sent), totals, [len(part) for part in sent])
    return [
        list(part.split(some)) if some else []
        for part, some in zip(output.split(totals), lengths, strict=True)
    ]
