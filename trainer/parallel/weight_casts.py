"""Weights in a narrower type, cast once for all micro-batches of a step.

Gradients are those of a cast in every micro-batch. Copies are dropped by `forget`; whoever changes
weights calls it.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient.to(ctx.dtype), None


class WeightCasts:
    """Copies of weights that were cast since the last `forget`."""

    def __init__(self) -> None:
        self._copies: dict[nn.Parameter, Tensor] = {}

    def __call__(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return the weight in another type; differentiable."""
        if weight.dtype == dtype:
            return weight
        copy = self._copies.get(weight)
        if copy is None or copy.dtype != dtype:
            copy = self._copies[weight] = weight.detach().to(dtype)
        cast: Tensor = _Cast.apply(weight, copy)  # type: ignore[no-untyped-call]
        return cast

    def forget(self) -> None:
        """Drop all copies."""
        self._copies.clear()
