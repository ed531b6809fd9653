"""Tokens per expert as the routers of a foreign model chose, read when the device is through.

A router that says nothing of its choice but probabilities is left untold: to choose again here
could differ from what was computed. Counts are summed over the micro-batches of a step.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer.adapters.instrumentation.expert_counts import ExpertCounts
from pacekeeper.trainer.adapters.instrumentation.module_passes import is_in_backward
from pacekeeper.trainer.adapters.reporter import Teller

_CHOICES = (torch.int64, torch.int32)


def routers_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int]]:
    """(router, number of experts) in the order of layers, by their names and what they hold."""
    for module in model.modules():
        experts = getattr(module, "num_experts", None) or getattr(module, "n_routed_experts", None)
        if type(module).__name__.endswith(("Router", "Gate")) and isinstance(experts, int):
            yield module, experts


class RoutingWatch:
    """Counts the choices of a model's routers, and tells them step by step."""

    def __init__(self, teller: Teller, model: torch.nn.Module) -> None:
        self._teller = teller
        self._counts = ExpertCounts(teller.pace)
        self._handles = [
            router.register_forward_hook(_Counter(self, layer, experts))
            for layer, (router, experts) in enumerate(routers_of(model))
        ]

    def close(self) -> None:
        """The model is as it was."""
        for handle in self._handles:
            handle.remove()

    def step_ends(self) -> None:
        """Just before the step's end is told: its counts, and those of others that came late."""
        try:
            if self._teller.step is not None:
                self._counts.step_ended(self._teller.step)
        except Exception as error:
            self._teller.pace.ring.count_error(error)

    def abandon(self) -> None:
        """What was counted belongs to no step."""
        self._counts.forget()

    def saw(self, layer: int, experts: int, output: Any) -> None:
        """A router's output: its choices, where it says them, are added to the step's."""
        if not self._teller.is_computing or is_in_backward():
            return
        try:
            chosen = _choices(output, experts)
            if chosen is not None:
                flat = chosen.detach().reshape(-1).to(torch.int64)
                none = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
                self._counts.add(layer, none.scatter_add_(0, flat, torch.ones_like(flat)))
        except Exception as error:
            self._teller.pace.ring.count_error(error)


class _Counter:
    """The hook of one router."""

    def __init__(self, watch: RoutingWatch, layer: int, experts: int) -> None:
        self._watch, self._layer, self._experts = watch, layer, experts

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():  # no hook breaks a graph
            self._watch.saw(self._layer, self._experts, output)


def _choices(output: Any, experts: int) -> Tensor | None:
    """Numbers of experts, [tokens, choices]: the one tensor of whole numbers in the output."""
    parts = output if isinstance(output, tuple) else (output,)
    found = [part for part in parts if isinstance(part, Tensor) and part.dtype in _CHOICES]
    return found[0] if len(found) == 1 and found[0].shape[-1] <= experts else None
