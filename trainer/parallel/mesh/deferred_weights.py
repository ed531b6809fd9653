"""Gradients of weights apart from those of inputs: for schedules that fill bubbles with them.

Linear layers and grouped experts compute the gradient of their inputs when the backward pass
reaches them, and that of their weights when they are told to. What has few parameters (norms,
embeddings) is not worth it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Compute = Callable[..., Tensor]
"""Computes an output from rows and weights."""


class DeferredWeights:
    """Gradients of weights that wait, by micro-batch.

    Attributes:
        is_on: Whether forward passes prepare it.
        number: Of the micro-batch whose backward pass runs.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.number = 0
        self._waiting: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self._trained = torch.zeros((), requires_grad=True)

    def run(self, compute: Compute, rows: Tensor, *weights: Tensor) -> Tensor:
        """Return `compute(rows, *weights)`; weights get gradients by `compute_waiting`."""
        if not (self.is_on and torch.is_grad_enabled()):
            return compute(rows, *weights)
        is_trained = any(weight.requires_grad for weight in weights)
        output: Tensor = _Deferred.apply(  # type: ignore[no-untyped-call]
            self, compute, weights, rows, self._trained if is_trained else None
        )
        return output

    def add(self, accumulate: Callable[[], None]) -> None:
        """Let this wait, of the micro-batch whose backward pass runs."""
        self._waiting[self.number].append(accumulate)

    def compute_waiting(self, number: int) -> None:
        """Accumulate the gradients of weights of a micro-batch."""
        for accumulate in self._waiting.pop(number, ()):
            accumulate()

    def forget(self) -> None:
        """Drop what waits of an interrupted step."""
        self._waiting.clear()

    def watch(self, model: nn.Module) -> None:
        """Let the linear layers of a model defer."""
        for module in model.modules():
            if type(module) is nn.Linear:
                self._watch_linear(module)

    def _watch_linear(self, module: nn.Linear) -> None:
        forward = module.forward

        def linear(rows: Tensor) -> Tensor:
            if not self.is_on:
                return forward(rows)
            weights = [module.weight] if module.bias is None else [module.weight, module.bias]
            return self.run(nn.functional.linear, rows, *weights)

        module.forward = linear  # type: ignore[assignment,method-assign]


class _Deferred(torch.autograd.Function):
    """A product whose weights are no inputs of the graph.

    Autograd would go on to what a weight was made of (expert biases by row), and free it, though it
    has no gradient yet. A scalar that is trained takes the weights' place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredWeights,
        compute: Compute,
        weights: Sequence[Tensor],
        rows: Tensor,
        _: Tensor | None,
    ) -> Tensor:
        with torch.enable_grad():
            given = rows.detach().requires_grad_(rows.requires_grad)
            leaves = [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]
            output = compute(given, *leaves)
        ctx.deferred, ctx.weights = deferred, weights
        ctx.given, ctx.leaves, ctx.output = given, leaves, output
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        output, given = ctx.output, ctx.given
        pairs = zip(ctx.weights, ctx.leaves, strict=True)
        trained = [(weight, leaf) for weight, leaf in pairs if leaf.requires_grad]
        of_rows = None
        if given.requires_grad:
            (of_rows,) = torch.autograd.grad(output, given, gradient, retain_graph=bool(trained))

        def accumulate() -> None:
            found = torch.autograd.grad(output, [leaf for _, leaf in trained], gradient)
            torch.autograd.backward([weight for weight, _ in trained], found)

        if trained:
            ctx.deferred.add(accumulate)
        return None, None, None, of_rows, None
