"""Tokens per expert of a foreign model's routers, read after the device has computed them.

Counts are summed over the micro-batches of a step.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch

from pacekeeper.core.telemetry.records import LOADS_PER_RECORD
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
