"""Sums gradients: every block's over its holders, in two all-to-alls whatever the layout.

Reduce-scatter and gather: blocks with the same holders are one flat vector, cut into as many
chunks; each holder owns one, adds the parts up in rank order and hands the sum back. So all holders
get bit-equal gradients, and a new placement needs no communicator.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.distributed.collectives import Collectives
from pacekeeper.trainer.toy.model.block_state_dict import parts_of
from pacekeeper.trainer.toy.model.transformer import MoETransformer

Holders = tuple[int, ...]  # positions in the group, ascending


class ReplicaSync:
    """The plan of the two all-to-alls of one layout on one rank, made once per generation."""

    def __init__(self, layout: Layout, fabric: Collectives) -> None:
        self._fabric = fabric
        self._position = fabric.ranks.index(fabric.rank)
        # In the order of blocks, the same on all ranks. One holder alone has nothing to add up.
        self._blocks: dict[Holders, list[Block]] = {}
        for block in layout.blocks():
            holders = tuple(fabric.ranks.index(rank) for rank in layout.holders(block))
            if self._position in holders and len(holders) > 1:
                self._blocks.setdefault(holders, []).append(block)
        self._shared_with: list[list[Holders]] = [
            [holders for holders in self._blocks if other in holders and other != self._position]
            for other in range(len(fabric.ranks))
        ]

    def synchronise(self, model: MoETransformer) -> None:
        """Replace every gradient by its sum. A missing gradient counts as zero. Raises PeerLost."""
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        chunks = {
            holders: _gradients(model, blocks).tensor_split(len(holders))
            for holders, blocks in self._blocks.items()
        }

        def chunk_of(other: int, holders: Holders) -> Tensor:
            return chunks[holders][holders.index(other)]

        def own(holders: Holders) -> Tensor:
            return chunk_of(self._position, holders)

        none = model.head.head.new_empty(0)
        parts = self._swap(none, send=chunk_of, expect=lambda _, holders: len(own(holders)))
        sums = {
            holders: _sum_in_order(
                [own(holders) if r == self._position else parts[r, holders] for r in holders]
            )
            for holders in self._blocks
        }
        home = self._swap(
            none,
            send=lambda _, holders: sums[holders],
            expect=lambda other, holders: len(chunk_of(other, holders)),
        )
        for holders, blocks in self._blocks.items():
            in_order = [sums[holders] if r == self._position else home[r, holders] for r in holders]
            _store(model, blocks, torch.cat(in_order))

    def _swap(
        self,
        none: Tensor,
        *,
        send: Callable[[int, Holders], Tensor],
        expect: Callable[[int, Holders], int],
    ) -> dict[tuple[int, Holders], Tensor]:
        """One all-to-all: what each other member sends for each set of holders we are both in."""
        outgoing, lengths = list[Tensor](), list[list[int]]()
        sent = []
        for other, shared in enumerate(self._shared_with):
            outgoing += [send(other, holders) for holders in shared]
            sent.append(sum(len(part) for part in outgoing[len(outgoing) - len(shared) :]))
            lengths.append([expect(other, holders) for holders in shared])
        totals = [sum(some) for some in lengths]
        output = none.new_empty(sum(totals))
        self._fabric.all_to_all(output, torch.cat([none, *outgoing]), totals, sent)
        arrived = iter(output.split([length for some in lengths for length in some]))
        return {
            (other, holders): next(arrived)
            for other, shared in enumerate(self._shared_with)
            for holders in shared
        }


def _gradients(model: MoETransformer, blocks: Iterable[Block]) -> Tensor:
    """Of these blocks, one after the other, flat."""
    return torch.cat(
        [
            part.of(_grad(part.parameter)).flatten()
            for block in blocks
            for part in parts_of(model, block).values()
        ]
    )


def _store(model: MoETransformer, blocks: Iterable[Block], flat: Tensor) -> None:
    at = 0
    for block in blocks:
        for part in parts_of(model, block).values():
            old = part.of(_grad(part.parameter))
            old.copy_(flat[at : at + old.numel()].view_as(old))
            at += old.numel()


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "set before"
    return parameter.grad


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
