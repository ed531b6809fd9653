"""Hooks on the MoE layers of foreign models: the routers' counts and the experts' rows.

Nothing is read from a device: counts are summed there, and rows are taken from an input's shape.
While a graph is traced the hooks do nothing, since they would break it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer.adapters.microbatch_reporter import MicrobatchReporter


class RouterHook:
    """Forward hook of one layer's router.

    Args:
        reporter: Receives the counts.
        layer: Index of the layer.
        counts_of: Returns, from the router's output, this rank's tokens by expert.
    """

    def __init__(
        self, reporter: MicrobatchReporter, layer: int, counts_of: Callable[[Any], Tensor | None]
    ) -> None:
        self._reporter, self._layer, self._counts_of = reporter, layer, counts_of

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._reporter.in_pass is not None:
            counts = self._reporter.run_guarded(self._counts_of, output)
            if counts is not None:
                self._reporter.add_expert_loads(self._layer, counts)


class ExpertRowsHook:
    """Forward pre-hook of one layer's experts on this rank: reports their rows.

    Their input is [ranks, experts, capacity, hidden], padded so that all experts compute the same,
    or [rows, hidden] in the order of experts; then rows by expert are known only if a second
    argument holds them in host memory.
    """

    def __init__(self, reporter: MicrobatchReporter) -> None:
        self._reporter = reporter

    def __call__(self, module: Any, args: Any) -> None:
        if not torch.compiler.is_compiling() and self._reporter.in_pass is not None:
            self._reporter.run_guarded(self._tell, args)

    def _tell(self, args: Any) -> None:
        shape = args[0].shape
        if len(shape) == 4:
            self._reporter.add_expert_rows([shape[0] * shape[2]] * shape[1])
            return
        by_expert = args[1] if len(args) > 1 else None
        if isinstance(by_expert, Tensor) and by_expert.device.type == "cpu":
            by_expert = by_expert.tolist()
        if isinstance(by_expert, list) and sum(by_expert) == shape[0]:
            self._reporter.add_expert_rows([int(n) for n in by_expert])
        else:
            self._reporter.add_expert_total(shape[0])


def register_expert_hooks(
    reporter: MicrobatchReporter,
    layer: int,
    router: Any,
    experts: Any,
    counts_of: Callable[[Any], Tensor | None],
) -> tuple[Any, Any]:
    """Register both hooks of one layer; return their handles."""
    return (
        router.register_forward_hook(RouterHook(reporter, layer, counts_of)),
        experts.register_forward_pre_hook(ExpertRowsHook(reporter)),
    )
