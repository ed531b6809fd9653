"""Bitwise comparison of all copies of a block by one exchange of checksums.

Copies are equal while all is well: an owner sends the same sum to all holders
(trainer/toy/parallel/grad_reduce.py), and all update alike; the mover and the survivors use any
copy as a source. Right after a commit all ranks exchange the CRC32 of weights, both moments and
gradients of each block. It has no ticket, because it changes nothing. A difference ends the job
with exit code 10 and names layer, expert, part and ranks: of two copies no vote decides, and of
more the wrong one has already entered sums that the others hold. A checkpoint of a compared step is
the way back.
"""

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.errors import CorruptStateError
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import blocks_on
from pacekeeper.trainer.distributed.collectives import Collectives, end_together
from pacekeeper.trainer.toy.model.block_state_dict import MOMENTS, parts_of
from pacekeeper.trainer.toy.model.transformer import MoETransformer

PARTS = ("weights", "first moments", "second moments", "gradients")
_NAMED_DIFFERENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One part of one block that is not the same everywhere.

    `sides`: the ranks that hold equal copies, the largest side first, then that of the lowest rank.
    """

    block: Block
    part: str
    sides: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        first, *others = ([*side] for side in self.sides)
        return f"{self.block}: {self.part} on ranks {', '.join(map(str, others))} not as on {first}"


def check(
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    fabric: Collectives,
    step: int,
) -> None:
    """Compare weights, moments and gradients of all copies, after `step` was committed.

    All ranks come to the same end. Raises CorruptStateError where copies differ, PeerLost.
    """
    held = [blocks_on(layout, rank) for rank in fabric.ranks]
    mine = held[fabric.ranks.index(fabric.rank)]
    own = torch.tensor([checksums(model, optimizer, b) for b in mine], dtype=torch.int64)
    counts, size = [len(blocks) for blocks in held], len(fabric.ranks)
    arrived = own.new_empty(sum(counts), len(PARTS))
    fabric.all_to_all(arrived, own.repeat(size, 1), counts, [len(own)] * size)
    by_rank = {
        rank: dict(zip(blocks, map(tuple, sums.tolist()), strict=True))
        for rank, blocks, sums in zip(fabric.ranks, held, arrived.split(counts), strict=True)
    }
    found = differences(by_rank)
    if not found:
        return
    end_together(fabric)
    more = len(found) - _NAMED_DIFFERENCES
    said = "; ".join(map(str, found[:_NAMED_DIFFERENCES])) + (f"; {more} more" if more > 0 else "")
    raise CorruptStateError(
        f"after step {step} copies differ: {said}",
        remedy="restart from a checkpoint of a step whose check passed ('checked' in the steps "
        "files), and test memory and device of the ranks that differ",
    )


def checksums(model: MoETransformer, optimizer: torch.optim.Optimizer, block: Block) -> list[int]:
    """The CRC32 of each of PARTS of a block held here; what does not exist yet counts as 0."""
    sums = [0] * len(PARTS)
    for part in parts_of(model, block).values():
        state = optimizer.state.get(part.parameter, {})
        whole = (part.parameter.detach(), *map(state.get, MOMENTS), part.parameter.grad)
        for i, tensor in enumerate(whole):
            if tensor is not None:
                sums[i] = _crc(part.of(tensor), sums[i])
    return sums


def differences(by_rank: Mapping[int, Mapping[Block, Sequence[int]]]) -> list[Difference]:
    """What is not the same on all its holders; `by_rank`: the checksums of PARTS, by rank. Pure."""
    holders: dict[Block, list[int]] = defaultdict(list)
    for rank, sums in sorted(by_rank.items()):
        for block in sums:
            holders[block].append(rank)
    found = []
    for block, ranks in holders.items():
        for i, part in enumerate(PARTS):
            sides: dict[int, list[int]] = defaultdict(list)
            for rank in ranks:
                sides[by_rank[rank][block][i]].append(rank)
            if len(sides) > 1:
                order = sorted(sides.values(), key=lambda side: (-len(side), side))
                found.append(Difference(block=block, part=part, sides=tuple(map(tuple, order))))
    return found


def _crc(tensor: Tensor, before: int) -> int:
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
    return zlib.crc32(octets.numpy().data, before)
