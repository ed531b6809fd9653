"""Differentiable moves of rows: permutations on this rank, and all-to-alls between ranks.

A permutation knows its inverse, so that its gradient is a gather as well: scatters that add up
cost several times as much on CPU, and their order varies on CUDA.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.hooks.compute_timers import SegmentClock


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: "_Places", rows: Tensor, source: Tensor, inverse: Tensor, copies: int
    ) -> Tensor:
        ctx.inverse, ctx.copies = inverse, copies
        return rows.index_select(0, source // copies if copies > 1 else source)

    @staticmethod
    def backward(ctx: "_Places", *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        back = gradient.index_select(0, ctx.inverse)
        if ctx.copies > 1:
            back = back.view(-1, ctx.copies, *back.shape[1:]).sum(1)
        return back, None, None, None


class _Places:
    inverse: Tensor
    copies: int


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: "_Route",
        rows: Tensor,
        group: Group,
        receive: list[int],
        send: list[int],
        clock: SegmentClock,
    ) -> Tensor:
        ctx.group, ctx.receive, ctx.send, ctx.clock = group, receive, send, clock
        return exchange(rows, group, receive, send)

    @staticmethod
    def backward(ctx: "_Route", *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        ctx.clock.pause()
        back = exchange(gradient, ctx.group, ctx.send, ctx.receive)
        ctx.clock.resume()
        return back, None, None, None, None


class _Route:
    group: Group
    receive: list[int]
    send: list[int]
    clock: SegmentClock


def take_rows(rows: Tensor, source: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Return row `source // copies` of `rows` at each place; differentiable.

    Args:
        rows: [N, H].
        source: A permutation of [0, N * copies).
        inverse: Its inverse.
        copies: How often each row is taken.
    """
    taken: Tensor = _Taken.apply(rows, source, inverse, copies)  # type: ignore[no-untyped-call]
    return taken


def exchange(rows: Tensor, group: Group, receive: Sequence[int], send: Sequence[int]) -> Tensor:
    """Return the rows [sum(receive), ...] that the members of the group sent here, in rank order.

    Args:
        rows: [sum(send), ...], in rank order.
        group: The members.
        receive: Number of rows from each member.
        send: Number of rows to each member.
    """
    output = rows.new_empty((sum(receive), *rows.shape[1:]))
    group.all_to_all_rows(output, rows.contiguous(), receive, send).wait()
    return output


def exchange_rows(
    rows: Tensor, group: Group, receive: list[int], send: list[int], clock: SegmentClock
) -> Tensor:
    """As `exchange`, differentiable; the clock pauses in the backward pass.

    In the forward pass the caller pauses it, together with what comes before and after.
    """
    arrived: Tensor = _Exchanged.apply(  # type: ignore[no-untyped-call]
        rows, group, receive, send, clock
    )
    return arrived
