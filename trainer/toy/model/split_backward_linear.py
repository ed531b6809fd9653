"""Matrix products whose weight gradients may wait for a turn of their own (zero bubble)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pacekeeper.trainer.toy.model.flop_counter import WorkPass


@dataclass(frozen=True, slots=True)
class _Weight:
    """Hides a weight from autograd, which would else walk back to it at once."""

    whole_OI: Tensor


class _Product(torch.autograd.Function):
    """rows_RI @ weight_OI.T; the gradient of the weight is left in `later`, with all it needs."""

    @staticmethod
    def forward(
        ctx: Any, rows_RI: Tensor, weight: "_Weight", later: list[Callable[[], None]]
    ) -> Tensor:
        ctx.parts = (rows_RI.detach(), weight.whole_OI, later)
        return F.linear(rows_RI, weight.whole_OI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows_RI, weight_OI, later = ctx.parts
        (gradient_RO,) = gradients
        later.append(partial(_accumulate, weight_OI, rows_RI, gradient_RO))
        return gradient_RO @ weight_OI, None, None


def product(rows_RI: Tensor, weight_OI: Tensor, work: WorkPass) -> Tensor:
    """rows @ weight.T: [R, O]. `weight_OI` is a parameter or a view of one.

    Where the pass is split, its gradient comes with `work.later`.
    """
    if work.later is None:
        return F.linear(rows_RI, weight_OI)
    result: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        rows_RI, _Weight(weight_OI), work.later
    )
    return result


def _accumulate(weight_OI: Tensor, rows_RI: Tensor, gradient_RO: Tensor) -> None:
    torch.autograd.backward([weight_OI], [gradient_RO.T @ rows_RI])
