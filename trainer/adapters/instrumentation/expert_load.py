"""Tokens per expert of a foreign model's routers, read after the device has computed them.

Counts are summed over the micro-batches of a step. A router that returns only probabilities is not
reported: repeating its choice here could differ from what was computed.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pacekeeper.core.telemetry.records import LOADS_PER_RECORD
from pacekeeper.trainer.adapters.instrumentation.module_passes import is_in_backward
from pacekeeper.trainer.adapters.reporter import StepReporter
from pacekeeper.trainer.hooks.hooks import Hooks

MAX_RECORDS_PER_STEP = 128  # of the ring's 1,024 slots; with more, layers take turns by step


MAX_LATE_STEPS = 8  # pending copies; a device further behind loses counts


class _PendingCopy(NamedTuple):
    step: int
    layers: tuple[int, ...]
    lengths: tuple[int, ...]  # experts of each layer
    counts: Any  # of all layers, concatenated, in host memory
    is_there: Any  # event of the copy; None: complete


@dataclass(slots=True)
class ExpertCounts:
    """Sums one rank's expert counts by layer and reports them once they are on the host."""

    hooks: Hooks
    _sums: dict[int, Any] = field(default_factory=dict)
    _copies: deque[_PendingCopy] = field(default_factory=lambda: deque(maxlen=MAX_LATE_STEPS))

    def add(self, layer: int, counts: Any) -> None:
        """Add the tokens of this rank's batch that `layer` routed to each expert: [experts]."""
        counts = counts.detach()
        known = self._sums.get(layer)
        # Copy the first one: trainers reuse their counters.
        self._sums[layer] = counts.clone() if known is None else known + counts

    def forget(self) -> None:
        """Drop the counts of the open step."""
        self._sums.clear()

    def end_step(self, step: int) -> None:
        """Start copying the counts of `step` to the host, and report completed copies."""
        sums, self._sums = self._sums, {}
        layers = _layers_to_report(step, sums)
        if layers:
            self._copies.append(_copy_to_host(step, layers, [sums[layer] for layer in layers]))
        self.tell()

    def tell(self) -> None:
        """Report all completed copies, oldest first."""
        while self._copies:
            step, layers, lengths, counts, is_there = self._copies[0]
            if is_there is not None and not is_there.query():
                return
            self._copies.popleft()
            rows = iter([round(n) for n in counts.tolist()])
            for layer, length in zip(layers, lengths, strict=True):
                self.hooks.report_expert_loads(layer, list(islice(rows, length)), step=step)


def _layers_to_report(step: int, sums: dict[int, Any]) -> tuple[int, ...]:
    """Return the layers to report in `step`: all if the ring has room, else each in its turn."""
    num_records = sum(-(-row.numel() // LOADS_PER_RECORD) for row in sums.values())
    num_turns = max(1, -(-num_records // MAX_RECORDS_PER_STEP))
    return tuple(layer for i, layer in enumerate(sorted(sums)) if i % num_turns == step % num_turns)


def _copy_to_host(step: int, layers: tuple[int, ...], rows: Sequence[Any]) -> _PendingCopy:
    lengths = tuple(row.numel() for row in rows)
    counts = torch.cat([row.reshape(-1) for row in rows])
    if not counts.is_cuda:
        return _PendingCopy(step, layers, lengths, counts, None)
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return _PendingCopy(step, layers, lengths, host, event)


_CHOICES = (torch.int64, torch.int32)


def routers_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int]]:
    """Yield (router, number of experts) by layer, found by class names and attributes."""
    for module in model.modules():
        experts = getattr(module, "num_experts", None) or getattr(module, "n_routed_experts", None)
        if type(module).__name__.endswith(("Router", "Gate")) and isinstance(experts, int):
            yield module, experts


class RoutingWatch:
    """Counts the choices of a model's routers and reports them per step."""

    def __init__(self, reporter: StepReporter, model: torch.nn.Module) -> None:
        self._reporter = reporter
        self._counts = ExpertCounts(reporter.pace)
        self._handles = [
            router.register_forward_hook(_Counter(self, layer, experts))
            for layer, (router, experts) in enumerate(routers_of(model))
        ]

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def end_step(self) -> None:
        """Report the counts of the step and of earlier ones; call it before the step's end."""
        try:
            if self._reporter.step is not None:
                self._counts.end_step(self._reporter.step)
        except Exception as error:
            self._reporter.pace.ring.count_error(error)

    def abandon_step(self) -> None:
        """Drop the counts of the open step."""
        self._counts.forget()

    def saw(self, layer: int, experts: int, output: Any) -> None:
        """Add the choices in a router's output, if it contains them, to the step's counts."""
        if not self._reporter.is_computing or is_in_backward():
            return
        try:
            chosen = _choices(output, experts)
            if chosen is not None:
                flat = chosen.detach().reshape(-1).to(torch.int64)
                none = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
                self._counts.add(layer, none.scatter_add_(0, flat, torch.ones_like(flat)))
        except Exception as error:
            self._reporter.pace.ring.count_error(error)


class _Counter:
    """Forward hook of one router."""

    def __init__(self, watch: RoutingWatch, layer: int, experts: int) -> None:
        self._watch, self._layer, self._experts = watch, layer, experts

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():  # a hook would break the graph
            self._watch.saw(self._layer, self._experts, output)


def _choices(output: Any, experts: int) -> Tensor | None:
    """Return the chosen experts [tokens, choices]: the only integer tensor of the output."""
    parts = output if isinstance(output, tuple) else (output,)
    found = [part for part in parts if isinstance(part, Tensor) and part.dtype in _CHOICES]
    return found[0] if len(found) == 1 and found[0].shape[-1] <= experts else None
