"""Attention and dense MLPs of whole micro-batches, on ranks that have slices of their tokens.

A region is a module between whose entry and exit a rank needs all tokens: at its entry slices are
gathered, at its exit the ranks' partial outputs are added up and cut into slices again. The
backward pass does the same the other way round. A region that is not cut into shards is computed by
every rank, and each keeps its slice.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pacekeeper.core.layout.layout import BlockKind
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.hooks.compute_timers import SegmentClock
from pacekeeper.trainer.model.cuts import Region


class TokenSlices:
    """The micro-batch that a rank computes, and who has which of its tokens.

    Attributes:
        group: Ranks of the tensor group.
        clock: Pauses while tokens are exchanged.
        shape: (rows, tokens of a row) of the micro-batch.
        slices: Its tokens by rank, ascending in the order of runs, without gap.
        idle: Kinds of regions of which this rank has no shard.
    """

    def __init__(self, group: Group, clock: SegmentClock) -> None:
        self.group, self.clock = group, clock
        self.shape = (1, 1)
        self.slices: dict[int, range] = {}
        self.idle: frozenset[BlockKind] = frozenset()

    @property
    def own(self) -> range:
        """The tokens of this rank."""
        return self.slices[self.group.rank]

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.shape[0] * self.shape[1]

    def gather(self, rows: Tensor) -> Tensor:
        """Return all tokens' rows [N, ...] of the slices [n, ...]; not differentiable."""
        whole = rows.new_empty((self.num_tokens, *rows.shape[1:]))
        own = rows.contiguous()
        whole[self.own.start : self.own.stop] = own
        cuts = [(r, whole[cut.start : cut.stop]) for r, cut in self.slices.items() if cut]
        self._exchange(
            [(rank, own) for rank, _ in self._others() if self.own],
            [(rank, cut) for rank, cut in cuts if rank != self.group.rank],
        )
        return whole

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """Return this rank's slice [n, ...] of the sum of all ranks' rows [N, ...]."""
        rows, own = rows.contiguous(), self.own
        arriving = {rank: rows.new_empty((len(own), *rows.shape[1:])) for rank, _ in self._others()}
        self._exchange(
            [(rank, rows[cut.start : cut.stop]) for rank, cut in self._others() if cut],
            list(arriving.items()) if own else (),
        )
        arriving[self.group.rank] = rows[own.start : own.stop]
        total = torch.zeros_like(arriving[self.group.rank])
        for rank in sorted(arriving):
            total += arriving[rank]
        return total

    def _others(self) -> list[tuple[int, range]]:
        return [(rank, cut) for rank, cut in self.slices.items() if rank != self.group.rank]

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        self.clock.pause()
        self.group.point_to_point(sends, receives).wait()
        self.clock.resume()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slices: TokenSlices) -> Tensor:
        ctx.slices = slices
        return slices.gather(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.slices.scatter_sum(gradients[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slices: TokenSlices) -> Tensor:
        ctx.slices = slices
        return slices.scatter_sum(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.slices.gather(gradients[0]), None


class _TotalOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slices: TokenSlices) -> Tensor:
        ctx.slices = slices
        return _reduced(values, slices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _reduced(gradients[0], ctx.slices), None


def _reduced(values: Tensor, slices: TokenSlices) -> Tensor:
    slices.clock.pause()
    total = values.clone(memory_format=torch.contiguous_format)
    slices.group.all_reduce(total).wait()
    slices.clock.resume()
    return total


def _total_over_ranks(values: Tensor, slices: TokenSlices) -> Tensor:
    """Return the sum of the ranks' values, where each rank's result depends on all of them."""
    total: Tensor = _TotalOverRanks.apply(values, slices)  # type: ignore[no-untyped-call]
    return total


def compute_on_slices(region: Region, slices: TokenSlices) -> None:
    """Let a region compute whole micro-batches while its callers have slices of them.

    Args:
        region: The first argument of its module, or `hidden_states`, is [1, n, H], and so is its
            first output.
        slices: The micro-batch; while one rank has all of its tokens, nothing changes.
    """
    forward = region.module.forward

    def on_slices(*args: Any, **given: Any) -> Any:
        if len(slices.slices) < 2:
            return forward(*args, **given)
        rows = args[0] if args else given["hidden_states"]
        whole: Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
            rows.flatten(0, -2), slices
        )
        whole = whole.view(*slices.shape, -1)
        if region.is_cut and region.kind in slices.idle:
            output: Any = 0.0 * whole  # of the others; it takes part in their backward pass
        elif args:
            output = forward(whole, *args[1:], **given)
        else:
            output = forward(**given | {"hidden_states": whole})
        first = (output[0] if isinstance(output, tuple) else output).flatten(0, -2)
        if region.is_cut:
            own: Tensor = _Summed.apply(first, slices)  # type: ignore[no-untyped-call]
        else:
            own = first[slices.own.start : slices.own.stop]
        return (own[None], *output[1:]) if isinstance(output, tuple) else own[None]

    region.module.forward = on_slices
    for name in region.row_biases:
        _add_bias_once(region.module.get_submodule(name), slices)
    for norm in region.wide_norms:
        of_norm: Any = norm
        of_norm.sum_over_group = partial(_total_over_ranks, slices=slices)


def _add_bias_once(linear: Any, slices: TokenSlices) -> None:
    forward = linear.forward

    def on_one_rank(rows: Tensor) -> Tensor:
        if not slices.slices or next(iter(slices.slices)) == slices.group.rank:
            whole: Tensor = forward(rows)
            return whole
        # Zero, not absent: its gradient is then complete on all ranks at the same time.
        return nn.functional.linear(rows, linear.weight, 0.0 * linear.bias)

    linear.forward = on_one_rank
