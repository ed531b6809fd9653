"""Reads what Megatron-LM writes: its console log, and its traces of routing.

The log has `iteration 12/ 100 | ... | elapsed time per iteration (ms): 512.3 | ... | global batch
size: 64 |`, and with `--timing-log-option all` the timers of all ranks: `times across ranks (ms):`,
then `  forward-compute:` and `     rank  3: 12.34` for each rank. A trace of routing
(`--moe-routing-trace-path`) has one JSON line per step, layer and micro-batch of a rank, with the
experts of each token.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.recorded.trace import (
    Chunk,
    ComputeTable,
    ExpertLoadTable,
    StepTable,
    Trace,
    Worker,
)
from pacekeeper.simulator.io.tables import MAX_S, MAX_WHOLE, left_out
from pacekeeper.simulator.io.text import lines_of

_NUMBER = r"(\d{1,15}(?:\.\d{0,15})?(?:[eE][+-]?\d{1,2})?)"
_ITERATION = re.compile(r"iteration\s+(\d{1,15})\s*/\s*\d+")
_ELAPSED = re.compile(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}")
_BATCH = re.compile(r"global batch size:\s*(\d{1,15})\b")
_LENGTH = re.compile(r"seq_length\s*\.+\s*(\d{1,15})\b")
_ALL_RANKS = "times across ranks (ms):"
_TIMER = re.compile(r"^\s{1,4}([a-z0-9-]+):\s*$")
_RANK = re.compile(rf"^\s+rank\s+(\d{{1,9}}):\s*{_NUMBER}\s*$")
_CHUNKS = {"forward-compute": Chunk.FORWARD, "backward-compute": Chunk.BACKWARD}
_MS = 1e-3
MAX_EXPERTS = 1 << 16
ROUTING_WORDS = (b'"top_indices"', b'"num_tokens"', b'"topk"')  # in each line of a routing trace
_Router = tuple[str, int, int]  # block, head of multi-token prediction, layer within it


@dataclass(slots=True)
class _Life:
    """What one start of the job has told."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)  # -> (seconds, tokens)
    timers: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """(iteration, rank, chunk) -> seconds"""


def read_megatron_log(path: Path) -> tuple[Trace, ...]:
    """The run in a log; where iteration numbers go back, the job began anew: one run per life.

    Raises DataError where it holds no iteration time.
    """
    notes: list[str] = []
    lives = [_Life()]
    length, iteration, chunk, is_timers = float("nan"), -1, None, False
    for line in lines_of(path, notes):
        if (found := _LENGTH.search(line)) is not None:
            length = float(found[1])
        number, elapsed = _ITERATION.search(line), _ELAPSED.search(line)
        if number is not None and elapsed is not None:
            batch = _BATCH.search(line)
            tokens = length * float(batch[1]) if batch is not None else float("nan")
            before, iteration, is_timers, chunk = iteration, int(number[1]), False, None
            if iteration < before:
                lives.append(_Life())
            if 0.0 < float(elapsed[1]) * _MS < MAX_S:
                lives[-1].steps[iteration] = (float(elapsed[1]) * _MS, tokens)
        elif _ALL_RANKS in line:
            is_timers, chunk = "(min, max)" not in line, None
        elif is_timers and (name := _TIMER.match(line)) is not None:
            chunk = _CHUNKS.get(name[1])
        elif is_timers and chunk is not None and (row := _RANK.match(line)) is not None:
            lives[-1].timers[iteration, int(row[1]), int(chunk)] = float(row[2]) * _MS
    lives = [life for life in lives if life.steps]
    if not lives:
        raise DataError(f"{path}: no line tells an elapsed time per iteration")
    stem = path.name.partition(".")[0]
    if len(lives) == 1:
        return (_trace(stem, lives[0], notes),)
    notes.append(f"iteration numbers go back {len(lives) - 1} times: each life is a run")
    return tuple(_trace(f"{stem}:{i}", life, notes) for i, life in enumerate(lives))


def _trace(name: str, life: _Life, notes: Sequence[str]) -> Trace:
    timers = {key: taken_s for key, taken_s in life.timers.items() if 0.0 < taken_s < MAX_S}
    if not timers:
        notes = [*notes, "no timers of all ranks (--timing-log-option all): no rank known"]
    return Trace(
        name=name,
        source="megatron-log",
        workers=tuple(Worker(rank=rank) for rank in sorted({key[1] for key in timers})),
        steps=_steps(life.steps),
        compute=_compute(timers) if timers else None,
        notes=tuple(notes),
    )


def _steps(steps: dict[int, tuple[float, float]]) -> StepTable:
    numbers = sorted(steps)
    return StepTable(
        step=np.array(numbers, dtype=np.intp),
        duration_s=np.array([steps[number][0] for number in numbers]),
        tokens=np.array([steps[number][1] for number in numbers]),
        sum_len_squared=np.full(len(numbers), np.nan),
    )


def _compute(timers: dict[tuple[int, int, int], float]) -> ComputeTable:
    keys = np.array(sorted(timers), dtype=np.intp)
    whole, unknown = np.zeros(len(keys), dtype=np.intp), np.full(len(keys), np.nan)
    return ComputeTable(
        step=keys[:, 0],
        rank=keys[:, 1],
        micro_batch=whole,
        chunk=keys[:, 2],
        model_chunk=whole,
        compute_s=np.array([timers[key] for key in sorted(timers)]),
        tokens=unknown,
        sum_len_squared=unknown,
        expert_rows=unknown,
    )


def read_megatron_routing(paths: Sequence[Path]) -> Trace:
    """Read the expert loads that the ranks of one run traced, added over ranks and micro-batches.

    Raises:
        DataError: no line holds the experts of a token.
    """
    notes: list[str] = []
    counts: dict[tuple[int, _Router], Array] = {}  # (step, router) -> tokens by expert
    ranks: set[int] = set()
    num_damaged = 0
    for path in paths:
        for line in filter(None, map(str.strip, lines_of(path, notes))):
            found = _routed(line)
            if found is None:
                num_damaged += 1
                continue
            rank, step, router, rows = found
            ranks.add(rank)
            known = counts.get((step, router))
            counts[step, router] = rows if known is None else _added(known, rows)
    if not counts:
        raise DataError(f"{', '.join(map(str, paths)) or 'no file'}: no line routes a token")
    num_experts = max(map(len, counts.values()))
    routers = sorted({router for _, router in counts})
    number = {router: router[2] for router in routers if router[0] == "decoder"}
    others = [router for router in routers if router not in number]
    after = max(number.values(), default=-1) + 1
    number |= {router: after + i for i, router in enumerate(others)}
    if others:
        notes.append(f"{len(others)} routers of multi-token prediction: layers from {after} on")
    cells = sorted((step, number[router], router) for step, router in counts)
    notes += left_out(num_damaged, "damaged lines left out")
    notes.append(
        f"{num_experts} experts: the highest number that a token was sent to; layers are counted "
        "within a pipeline stage"
    )
    return Trace(
        name=paths[0].parent.name if len(paths) > 1 else paths[0].name.partition(".")[0],
        source="megatron-routing",
        workers=tuple(Worker(rank=rank) for rank in sorted(ranks)),
        expert_loads=ExpertLoadTable(
            step=np.repeat(np.array([cell[0] for cell in cells], dtype=np.intp), num_experts),
            layer=np.repeat(np.array([cell[1] for cell in cells], dtype=np.intp), num_experts),
            expert=np.tile(np.arange(num_experts, dtype=np.intp), len(cells)),
            rows=np.concatenate(
                [_added(np.zeros(num_experts), counts[step, router]) for step, _, router in cells]
            ),
        ),
        notes=tuple(notes),
    )


def _added(one: Array, other: Array) -> Array:
    """Add tokens by expert of lists that may differ in length."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def _routed(line: str) -> tuple[int, int, _Router, Array] | None:
    """Return (rank, step, router, tokens by expert) of a line; None: damaged."""
    try:
        document: Any = json.loads(line)
        rank, step, layer, head = (
            int(document.get(name, 0) if name == "mtp_idx" else document[name])
            for name in ("rank", "step", "layer", "mtp_idx")
        )
        chosen = np.array(document["top_indices"])
        block = str(document.get("block", "decoder"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return None
    if not all(0 <= n < MAX_WHOLE for n in (rank, step, layer, head)):
        return None
    if chosen.ndim != 2 or chosen.dtype.kind != "i" or not chosen.size:
        return None
    if chosen.min() < 0 or chosen.max() >= MAX_EXPERTS:
        return None
    return rank, step, (block, head, layer), np.bincount(chosen.ravel()).astype(np.float64)
