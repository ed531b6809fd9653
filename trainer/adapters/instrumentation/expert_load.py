"""Tokens per expert as the routers of a foreign model chose, read when the device is through.

A router that says nothing of its choice but probabilities is left untold: to choose again here
could differ from what was computed. Counts are summed over the micro-batches of a step.
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

MAX_RECORDS_PER_STEP = 128  # of the 1,024 that a ring holds; above, layers take turns


MAX_LATE_STEPS = 8  # copies under way; a device further behind loses counts, not memory


class _Copied(NamedTuple):
    step: int
    layers: tuple[int, ...]
    lengths: tuple[int, ...]  # experts of each layer
    counts: Any  # those of all layers, one after the other, in host memory
    is_there: Any  # a device event; None: it is


@dataclass(slots=True)
class ExpertCounts:
    """Of one rank. Counts are tensors; layers are numbered from 0, in any order."""

    hooks: Hooks
    _sums: dict[int, Any] = field(default_factory=dict)
    _copies: deque[_Copied] = field(default_factory=lambda: deque(maxlen=MAX_LATE_STEPS))

    def add(self, layer: int, counts: Any) -> None:
        """`layer` routed so many tokens of this rank's own batch to each expert."""
        counts = counts.detach()
        known = self._sums.get(layer)
        # A copy of the first: trainers reuse and clear what they count in.
        self._sums[layer] = counts.clone() if known is None else known + counts

    def forget(self) -> None:
        """The step was given up."""
        self._sums.clear()

    def end_step(self, step: int) -> None:
        """Tell what is there by now; begin the copy of the counts of `step`."""
        sums, self._sums = self._sums, {}
        layers = _whose_turn(step, sums)
        if layers:
            self._copies.append(_copied(step, layers, [sums[layer] for layer in layers]))
        self.tell()

    def tell(self) -> None:
        """All copies that have arrived, in order."""
        while self._copies:
            step, layers, lengths, counts, is_there = self._copies[0]
            if is_there is not None and not is_there.query():
                return
            self._copies.popleft()
            rows = iter([round(n) for n in counts.tolist()])
            for layer, length in zip(layers, lengths, strict=True):
                self.hooks.report_expert_loads(layer, list(islice(rows, length)), step=step)


def _whose_turn(step: int, sums: dict[int, Any]) -> tuple[int, ...]:
    """The layers that are told of in `step`: all, where the ring has room for all of every step."""
    num_records = sum(-(-row.numel() // LOADS_PER_RECORD) for row in sums.values())
    num_turns = max(1, -(-num_records // MAX_RECORDS_PER_STEP))
    return tuple(layer for i, layer in enumerate(sorted(sums)) if i % num_turns == step % num_turns)


def _copied(step: int, layers: tuple[int, ...], rows: Sequence[Any]) -> _Copied:
    lengths = tuple(row.numel() for row in rows)
    counts = torch.cat([row.reshape(-1) for row in rows])
    if not counts.is_cuda:
        return _Copied(step, layers, lengths, counts, None)
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return _Copied(step, layers, lengths, host, event)


_CHOICES = (torch.int64, torch.int32)


def routers_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int]]:
    """(router, number of experts) in the order of layers, by their names and what they hold."""
    for module in model.modules():
        experts = getattr(module, "num_experts", None) or getattr(module, "n_routed_experts", None)
        if type(module).__name__.endswith(("Router", "Gate")) and isinstance(experts, int):
            yield module, experts


class RoutingWatch:
    """Counts the choices of a model's routers, and tells them step by step."""

    def __init__(self, teller: StepReporter, model: torch.nn.Module) -> None:
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

    def end_step(self) -> None:
        """Just before the step's end is told: its counts, and those of others that came late."""
        try:
            if self._teller.step is not None:
                self._counts.end_step(self._teller.step)
        except Exception as error:
            self._teller.pace.ring.count_error(error)

    def abandon_step(self) -> None:
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
