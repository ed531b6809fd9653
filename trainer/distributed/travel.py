"""Rows that travel inside a pass: an all-to-all that autograd can walk back."""

from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer.distributed.collectives import Collectives
from pacekeeper.trainer.model.flop_counter import WorkPass


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose gradient is the opposite one; both are boundaries of the work meter."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        fabric: Collectives,
        work: WorkPass,
        output_splits: list[int],
        input_splits: list[int],
        is_together: bool,
    ) -> Tensor:
        ctx.route = (fabric, work, work.boundary(), output_splits, input_splits)
        output = rows.new_empty((sum(output_splits), rows.shape[1]))
        fabric.all_to_all(
            output, rows.contiguous(), output_splits, input_splits, is_together=is_together
        )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        fabric, work, number, output_splits, input_splits = ctx.route
        work.backward_boundary(number)
        (gradient,) = gradients
        back = gradient.new_empty((sum(input_splits), gradient.shape[1]))
        fabric.all_to_all(back, gradient.contiguous(), input_splits, output_splits)
        return back, None, None, None, None, None


def travel(
    rows: Tensor,
    fabric: Collectives,
    work: WorkPass,
    output_splits: list[int],
    input_splits: list[int],
    *,
    is_together: bool = False,
) -> Tensor:
    """Send `input_splits` rows [R, D] to the members of a group; what arrives, in rank order.

    Differentiable. `is_together`: as of `Collectives.all_to_all`. Raises PeerLost.
    """
    arrived: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        rows, fabric, work, output_splits, input_splits, is_together
    )
    return arrived
