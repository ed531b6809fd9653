"""Ranks that compute the same rows together: each has its heads, and a slice of the tokens.

What goes token by token (embedding, norms, router, experts, head) is done on slices, so nothing is
computed twice; attention gathers the tokens, and sums over heads come back as slices. A gradient is
then a partial sum on every holder of a block (ADR 37).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.layout import ShardRun, Stage
from pacekeeper.trainer.distributed.collectives import Collectives, all_to_all_autograd
from pacekeeper.trainer.toy.model.flop_counter import WorkPass


def token_slices(runs: Iterable[ShardRun], num_tokens: int) -> dict[int, tuple[int, int]]:
    """The tokens [first, end) of each rank of a group, ranks ascending, by its shards."""
    size = {run.rank: run.end - run.first for run in runs}
    ranks = sorted(size)
    ends = list(accumulate(apportion(num_tokens, [size[rank] for rank in ranks])))
    return dict(zip(ranks, zip([0, *ends[:-1]], ends, strict=True), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """`sizes`: virtual shards of each member, in the order of `fabric.ranks`."""

    fabric: Collectives
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, stage: Stage, fabric: Collectives) -> "TensorGroup":
        """The tensor group of a stage of `fabric.rank`; all ranks that run its layers ask alike."""
        size = {run.rank: run.end - run.first for run in stage.attention}
        own = fabric.group(tuple(sorted(size)))
        return cls(fabric=own, sizes=tuple(size[rank] for rank in own.ranks))

    @property
    def share(self) -> float:
        """This rank's part of the heads, and nearly so of the tokens."""
        return self.sizes[self._own] / sum(self.sizes)

    @property
    def _own(self) -> int:
        return self.fabric.ranks.index(self.fabric.rank)

    def slice_of(self, num_tokens: int) -> slice:
        """The tokens that are this rank's."""
        counts = apportion(num_tokens, self.sizes)
        first = sum(counts[: self._own])
        return slice(first, first + counts[self._own])

    def gather(self, own_SD: Tensor, num_tokens: int, work: WorkPass) -> Tensor:
        """All tokens [T, D] from everybody's slice [S, D]. Raises PeerLost."""
        size = len(self.sizes)
        if size == 1:
            return own_SD
        counts = list(apportion(num_tokens, self.sizes))
        copies = own_SD.repeat(size, 1)
        return all_to_all_autograd(copies, self.fabric, work, counts, [len(own_SD)] * size)

    def sum_back(self, partial_TD: Tensor, work: WorkPass) -> Tensor:
        """The sum of everybody's part [T, D], in rank order: this rank's slice. Raises PeerLost."""
        size = len(self.sizes)
        if size == 1:
            return partial_TD
        counts = list(apportion(len(partial_TD), self.sizes))
        own = counts[self._own]
        parts = all_to_all_autograd(partial_TD, self.fabric, work, [own] * size, counts)
        return parts.view(size, own, partial_TD.shape[1]).sum(0)

    def total(self, counts_R: Tensor) -> Tensor:
        """The sum over the group of numbers [R] that need no gradient. Raises PeerLost."""
        if len(self.sizes) == 1:
            return counts_R
        votes = self.fabric.exchange(counts_R.tolist())
        return votes.sum(0).to(counts_R)
