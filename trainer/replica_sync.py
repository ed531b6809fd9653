"""Sums gradients: dense ones over all ranks, an expert's over its hosts - in two all-to-alls.

Reduce-scatter and gather: each dense chunk and each expert has one owner that adds the parts up in
rank order and hands the sum back. So all holders get bit-equal gradients, and a new placement
needs no communicator.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pacekeeper.core.layout import Layout
from pacekeeper.trainer.fabric import Collectives
from pacekeeper.trainer.model import MoETransformer
from pacekeeper.trainer.moe import ExpertBank

ExpertKey = tuple[int, int]  # (layer, expert)


class ReplicaSync:
    """The plan of the two all-to-alls of one layout on one rank, made once per generation."""

    def __init__(self, layout: Layout, fabric: Collectives) -> None:
        self._fabric = fabric
        self._position = fabric.ranks.index(fabric.rank)
        self._hosts: dict[ExpertKey, tuple[int, ...]] = {}  # positions in the group, ascending
        for layer, experts in enumerate(layout.experts):
            for expert, hosts in enumerate(experts):
                self._hosts[layer, expert] = tuple(fabric.ranks.index(h.rank) for h in hosts)
        # An expert with one host has nothing to add up.
        shared = [key for key, hosts in self._hosts.items() if len(hosts) > 1]
        mine = [key for key in shared if self._position in self._hosts[key]]
        self._owned = [key for key in mine if self._owner(key) == self._position]
        size = len(fabric.ranks)
        # Blocks that travel to and from each member, in the same order on both sides.
        self._to_owner: list[list[ExpertKey]] = [
            [k for k in mine if self._owner(k) == other and other != self._position]
            for other in range(size)
        ]
        self._from_host: list[list[ExpertKey]] = [
            [k for k in self._owned if other in self._hosts[k] and other != self._position]
            for other in range(size)
        ]

    def _owner(self, key: ExpertKey) -> int:
        """Owners are spread over an expert's hosts, so that the adding is, too."""
        hosts = self._hosts[key]
        return hosts[sum(key) % len(hosts)]

    def synchronise(self, model: MoETransformer) -> None:
        """Replace every gradient by its sum. A missing gradient counts as zero. Raises PeerLost."""
        dense = model.dense_parameters()
        flat = torch.cat([_gradient(p).reshape(-1) for p in dense])
        banks = [layer.bank for layer in model.layers()]
        rows = [_expert_rows(bank) for bank in banks]
        size = len(self._fabric.ranks)
        bounds = [len(flat) * i // size for i in range(size + 1)]

        def row(key: ExpertKey) -> Tensor:
            return rows[key[0]][banks[key[0]].experts.index(key[1])]

        own = flat[bounds[self._position] : bounds[self._position + 1]]
        parts = [
            [flat[bounds[other] : bounds[other + 1]], *map(row, self._to_owner[other])]
            for other in range(size)
        ]
        arrived = self._travel(parts, len(own), self._from_host, rows)
        chunk = _sum_in_order([part[0] for part in arrived])
        for key in self._owned:
            in_order = []
            for host in self._hosts[key]:
                if host == self._position:
                    in_order.append(row(key))
                else:
                    in_order.append(arrived[host][1 + self._from_host[host].index(key)])
            row(key).copy_(_sum_in_order(in_order))
        parts = [[chunk, *map(row, self._from_host[other])] for other in range(size)]
        home = self._travel(parts, bounds, self._to_owner, rows)
        flat = torch.cat([part[0] for part in home])
        for other in range(size):
            for key, summed in zip(self._to_owner[other], home[other][1:], strict=True):
                row(key).copy_(summed)
        _store_dense(dense, flat)
        for bank, summed_rows in zip(banks, rows, strict=True):
            _store_expert_rows(bank, summed_rows)

    def _travel(
        self,
        parts: Sequence[Sequence[Tensor]],
        dense_sizes: int | Sequence[int],
        expected: Sequence[Sequence[ExpertKey]],
        rows: Sequence[Tensor],
    ) -> list[list[Tensor]]:
        """One all-to-all of ragged lists; what arrives from each member, cut up again."""
        size = len(parts)
        sent = [torch.cat(list(part)) if part else rows[0].new_empty(0) for part in parts]
        lengths = []
        for other in range(size):
            dense = (
                dense_sizes
                if isinstance(dense_sizes, int)
                else dense_sizes[other + 1] - dense_sizes[other]
            )
            lengths.append([dense, *(rows[key[0]].shape[1] for key in expected[other])])
        totals = [sum(length) for length in lengths]
        output = sent[0].new_empty(sum(totals))
        self._fabric.all_to_all(output, torch.cat(sent), totals, [len(part) for part in sent])
        return [
            list(part.split(length))
            for part, length in zip(output.split(totals), lengths, strict=True)
        ]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _expert_rows(bank: ExpertBank) -> Tensor:
    """[S, size of one expert]: gradients of each local expert as one row."""
    return torch.cat([_gradient(bank.w1).flatten(1), _gradient(bank.w2).flatten(1)], dim=1)


def _store_expert_rows(bank: ExpertBank, rows: Tensor) -> None:
    cut = bank.w1[0].numel() if len(bank.experts) else 0
    if cut:
        bank.w1.grad = rows[:, :cut].reshape(bank.w1.shape)
        bank.w2.grad = rows[:, cut:].reshape(bank.w2.shape)


def _store_dense(parameters: Iterable[nn.Parameter], flat: Tensor) -> None:
    at = 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
