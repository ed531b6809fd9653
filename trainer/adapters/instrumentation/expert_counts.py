"""How many tokens each expert got, told without waiting for the device that counted them.

Counts of a step's micro-batches are added up where they are. When the step ends, their copy to host
memory begins; it is told once it is there, with the number of the step it is of.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch

from pacekeeper.core.telemetry.records import LOADS_PER_RECORD
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

    def step_ended(self, step: int) -> None:
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
                self.hooks.expert_loads(layer, list(islice(rows, length)), step=step)


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
