"""Hooks on the MoE layers of foreign models: the routers' counts and the experts' rows.

Nothing is read from a device: counts are summed there, and rows are taken from an input's shape.
While a graph is traced the hooks do nothing, since they would break it. Known are the layers of
torchtitan, DeepSpeed and Megatron-Core, and routers of published models that return their choice.
A router that returns only probabilities is not reported: repeating its choice here could differ
from what was computed.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pacekeeper.trainer.adapters.instrumentation.patching import Hook
from pacekeeper.trainer.adapters.reporter import Reporter

_LAYER = re.compile(r"layers\.(\d+)\.")
_CHOICES = (torch.int64, torch.int32)


def watch_experts(reporter: Reporter, model: nn.Module, *, is_sorted: bool = False) -> list[Any]:
    """Register hooks on all MoE layers of `model` that are known; return their handles.

    Args:
        reporter: Receives counts and rows.
        model: The model, or one of its parts.
        is_sorted: Whether the experts of any layer are called with [rows, hidden] in the order of
            experts; else only those of the layers named above.
    """
    handles: list[Any] = []
    layers = list(_moe_layers(model, is_sorted))
    numbers = [_number(name, router, i) for i, (name, router, _) in enumerate(layers)]
    if len(set(numbers)) < len(numbers):  # such as an encoder's and a decoder's
        numbers = list(range(len(layers)))
    for layer, (_, router, experts) in zip(numbers, layers, strict=True):
        counts = RouterHook(reporter, layer)
        if hasattr(router, "inner_experts"):  # torchtitan since 0.3: the counts are its argument
            hook = Hook(counts.of_arguments)
            handles.append(router.register_forward_pre_hook(hook, with_kwargs=True))
        else:
            handles.append(router.register_forward_hook(Hook(counts)))
        if experts is not None:
            handles.append(experts.register_forward_pre_hook(Hook(ExpertRowsHook(reporter))))
    return handles


def _moe_layers(model: nn.Module, is_sorted: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, router, experts) by layer, without experts whose calls are not known."""
    parts: list[tuple[str, Any]] = list(model.named_modules())
    found = []
    for name, part in parts:
        router = getattr(part, "router", None)
        if hasattr(part, "routed_experts") and router is not None:
            found.append((f"{name}.", part.routed_experts, part.routed_experts.inner_experts))
        elif type(part).__name__ == "MOELayer":
            found.append((f"{name}.", part.gate, part.experts))
        elif router is not None and hasattr(part, "experts"):
            is_known = is_sorted or hasattr(router, "layer_number")
            if is_known or type(part).__name__ == "AutoEPMoELayer":
                found.append((f"{name}.", router, part.experts))
    known = {id(router) for _, router, _ in found}
    for name, part in parts:
        is_router = type(part).__name__.endswith(("Router", "Gate")) and _num_experts(part)
        if is_router and id(part) not in known and not found:
            yield name, part, None
    yield from found


def _num_experts(router: Any) -> int:
    for name in ("num_experts", "n_routed_experts"):
        count = getattr(router, name, None)
        if isinstance(count, int):
            return count
    return 0


def _number(name: str, router: Any, ordinal: int) -> int:
    """Return a layer's index in the whole model, as far as that is known."""
    if isinstance(getattr(router, "layer_number", None), int):
        return max(0, int(router.layer_number) - 1)
    found = _LAYER.search(name)
    return int(found[1]) if found else ordinal


class RoutedCounters:
    """Reports what DeepSpeed's AutoEP layers count themselves, also within a compiled graph.

    Their counters run on from step to step and include evaluations and recomputation.
    """

    def __init__(self, reporter: Reporter, model: nn.Module) -> None:
        self._reporter = reporter
        named = [(n, part) for n, part in model.named_modules() if _counter_of(part) is not None]
        self._layers = [(_number(f"{n}.", None, i), part) for i, (n, part) in enumerate(named)]
        self._before = [_counter_of(part).clone() for _, part in self._layers]

    def report(self) -> None:
        """Add what was counted since the last call to the open step."""
        for i, (layer, part) in enumerate(self._layers):
            now = _counter_of(part)
            self._reporter.expert_counts.add(layer, now - self._before[i])
            self._before[i].copy_(now)


def _counter_of(part: Any) -> Any:
    return part.tokens_per_expert if type(part).__name__ == "AutoEPMoELayer" else None


class RouterHook:
    """Forward hook of one layer's router."""

    def __init__(self, reporter: Reporter, layer: int) -> None:
        self._reporter, self._layer = reporter, layer

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._reporter.is_computing:
            counts = self._reporter.run_guarded(counts_in, output, _num_experts(module))
            if counts is not None:
                self._reporter.add_expert_loads(self._layer, counts)

    def of_arguments(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the counts that the routed experts are called with."""
        self(module, args, (*args, *kwargs.values())[-1:])


def counts_in(output: Any, num_experts: int) -> Tensor | None:
    """Return this rank's tokens by expert, as a router's output holds them; None if it does not.

    They are its one-dimensional tensor, or the sum of a map [tokens, experts], or the count of its
    choices [tokens, choices], if exactly one tensor can be those.
    """
    parts = output if isinstance(output, tuple) else (output,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    by_expert = [t for t in tensors if t.dim() == 1 and t.numel() == (num_experts or t.numel())]
    if by_expert:
        own = by_expert[-1]
        local: Tensor = own.to_local() if hasattr(own, "to_local") else own  # a tensor group's part
        return local
    for part in tensors:
        if part.dim() == 2 and part.dtype is torch.bool:
            return part.sum(dim=0)
    chosen = [part for part in tensors if part.dtype in _CHOICES]
    if len(chosen) != 1 or not 0 < chosen[0].shape[-1] <= num_experts:
        return None
    flat = chosen[0].detach().reshape(-1).to(torch.int64)
    none = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return none.scatter_add_(0, flat, torch.ones_like(flat))


class ExpertRowsHook:
    """Forward pre-hook of one layer's experts on this rank: reports their rows.

    Their input is [ranks, experts, capacity, hidden], padded so that all experts compute the same,
    or [rows, hidden] in the order of experts; then rows by expert are known only if a second
    argument holds them in host memory.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def __call__(self, module: Any, args: Any) -> None:
        if not torch.compiler.is_compiling() and self._reporter.is_computing:
            self._reporter.run_guarded(self._tell, args)

    def _tell(self, args: Any) -> None:
        shape = args[0].shape
        if len(shape) == 4:
            self._reporter.add_expert_rows([shape[0] * shape[2]] * shape[1])
            return
        by_expert = args[1] if len(args) > 1 else None
        if isinstance(by_expert, Tensor) and by_expert.device.type == "cpu":
            by_expert = by_expert.tolist()
        if isinstance(by_expert, list) and 0 < sum(by_expert) <= shape[0]:  # the rest is padding
            self._reporter.add_expert_rows([int(n) for n in by_expert])
        else:
            self._reporter.add_expert_rows(shape[0])
