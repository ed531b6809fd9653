"""Collectives of some ranks of a group, made of messages from rank to rank.

Layouts change between steps, and with them who shares a block or a layer: nothing is connected
anew. All members call the collectives that two of them share in the same order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pacekeeper.trainer.groups.group import Group, Messages, Pending, SingleProcess


def subgroup(group: Group, ranks: Sequence[int]) -> Group:
    """Return the group of these members of a group, this rank among them.

    Args:
        group: The group; it is returned where `ranks` are all of its members.
        ranks: In any order.
    """
    chosen = tuple(sorted(ranks))
    if chosen == group.ranks:
        return group
    return SingleProcess(group.rank) if len(chosen) == 1 else SubGroup(group, chosen)


class SubGroup:
    """Some ranks of a group; use `subgroup`.

    An all-reduce costs each member as many bytes as a ring: every member adds up an equal part.
    """

    def __init__(self, parent: Group, ranks: tuple[int, ...]) -> None:
        self._parent = parent
        self.rank, self.ranks = parent.rank, ranks

    def all_gather(self, values: Tensor) -> Tensor:
        gathered = values.new_empty((len(self.ranks), *values.shape))
        own = values.contiguous()
        gathered[self.ranks.index(self.rank)] = own
        copies = [own] * len(self.ranks)
        self.point_to_point(self.to_others(copies), self.to_others(list(gathered))).wait()
        return gathered

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Pending:
        place = self.ranks.index(self.rank)
        sent, arriving = rows.split(list(send)), output.split(list(receive))
        arriving[place].copy_(sent[place])
        return self.point_to_point(self.to_others(sent), self.to_others(arriving))

    def all_reduce(self, values: Tensor) -> Pending:
        return _Reducing(self, values)

    def point_to_point(self, sends: Messages, receives: Messages) -> Pending:
        return self._parent.point_to_point(sends, receives)

    def to_others(self, parts: Sequence[Tensor]) -> Messages:
        """Return one part for each member, without this rank's and those that are empty."""
        pairs = zip(self.ranks, parts, strict=True)
        return [(rank, part) for rank, part in pairs if rank != self.rank and part.numel()]


class _Reducing:
    """An all-reduce under way: each member adds up its part in rank order, then sends the sum."""

    def __init__(self, group: SubGroup, values: Tensor) -> None:
        self._group, self._values = group, values
        self._flat = values.reshape(-1)
        self._parts = self._flat.tensor_split(len(group.ranks))
        self._place = group.ranks.index(group.rank)
        own = self._parts[self._place]
        self._arriving = [torch.empty_like(own) for _ in group.ranks]
        self._pending = group.point_to_point(
            group.to_others(self._parts), group.to_others(self._arriving)
        )

    def wait(self) -> object:
        self._pending.wait()
        own = self._parts[self._place]
        self._arriving[self._place] = own
        total = torch.zeros_like(own)
        for part in self._arriving:
            total += part
        totals = [total] * len(self._parts)
        self._group.point_to_point(
            self._group.to_others(totals), self._group.to_others(self._parts)
        ).wait()
        own.copy_(total)
        if self._flat.data_ptr() != self._values.data_ptr():
            self._values.copy_(self._flat.view_as(self._values))
        return None
