"""Hooks on the MoE layers of foreign models: what routers chose, and the rows that experts compute.

Nothing is read that lies on a device: counts go there into sums, rows are the shape of an input.
While a graph is traced the hooks are empty: they would break it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer.adapters.microbatch_reporter import MicrobatchReporter


class Routed:
    """The forward hook of one layer's router; `counts_of` its output: this rank's own tokens by
    expert.
    """

    def __init__(
        self, teller: MicrobatchReporter, layer: int, counts_of: Callable[[Any], Tensor | None]
    ) -> None:
        self._teller, self._layer, self._counts_of = teller, layer, counts_of

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._teller.in_pass is not None:
            counts = self._teller.run_guarded(self._counts_of, output)
            if counts is not None:
                self._teller.add_expert_loads(self._layer, counts)


class ExpertsBegin:
    """The hook before one layer's experts of this rank: their rows.

    Their input is [ranks, experts, capacity, hidden], padded so that all experts compute alike, or
    [rows, hidden], in the order of experts; then how many each has is told where a second argument
    says it in host memory.
    """

    def __init__(self, teller: MicrobatchReporter) -> None:
        self._teller = teller

    def __call__(self, module: Any, args: Any) -> None:
        if not torch.compiler.is_compiling() and self._teller.in_pass is not None:
            self._teller.run_guarded(self._tell, args)

    def _tell(self, args: Any) -> None:
        shape = args[0].shape
        if len(shape) == 4:
            self._teller.add_expert_rows([shape[0] * shape[2]] * shape[1])
            return
        by_expert = args[1] if len(args) > 1 else None
        if isinstance(by_expert, Tensor) and by_expert.device.type == "cpu":
            by_expert = by_expert.tolist()
        if isinstance(by_expert, list) and sum(by_expert) == shape[0]:
            self._teller.add_expert_rows([int(n) for n in by_expert])
        else:
            self._teller.add_expert_total(shape[0])


def hooked(
    teller: MicrobatchReporter,
    layer: int,
    router: Any,
    experts: Any,
    counts_of: Callable[[Any], Tensor | None],
) -> tuple[Any, Any]:
    """Both hooks of one layer; what comes back removes them."""
    return (
        router.register_forward_hook(Routed(teller, layer, counts_of)),
        experts.register_forward_pre_hook(ExpertsBegin(teller)),
    )
