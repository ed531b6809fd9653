"""Takes the lines of our own trace files into columns: many at once, what is odd one by one."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import (
    LOADS_PER_RECORD,
    ExpertLoadRecord,
    MicroBatchRecord,
    StepRecord,
)
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.core.telemetry.trace_jsonl import (
    Fact,
    TraceHeader,
    parse_columns,
    parse_fact,
    parse_object,
)
from pacekeeper.predictor.cost.features import Array
from pacekeeper.simulator.io.tables import MAX_S

MICRO_BATCH = (
    "step", "rank", "micro_batch", "compute_s", "tokens", "sum_len_squared", "expert_rows",
    "run_queue_s", "stall_s", "wait_s", "ended_mono_s", "generation",
)  # fmt: skip
STEP = (
    "step", "rank", "duration_s", "tokens", "ended_mono_s", "transfer_s", "transfer_bytes",
    "sum_len_squared", "input_wait_s",
)  # fmt: skip
LOAD = ("step", "rank", "layer", "first_expert")
SECONDS = ("compute_s", "duration_s")  # without which a record says nothing
MAX_NUMBER = 1 << 53  # of a field: a double holds it
AT_ONCE = 4096  # lines
MAX_MOMENT_S = 1e9  # of a clock that begins at boot


@dataclass(slots=True, kw_only=True)
class Gathered:
    """What all files together told, column by column: records are many."""

    header: TraceHeader
    node_of: dict[int, str] = field(default_factory=dict)
    attached: dict[int, Attachment] = field(default_factory=dict)
    micro_batches: list[Any] = field(default_factory=lambda: [array("d") for _ in MICRO_BATCH])
    steps: list[Any] = field(default_factory=lambda: [array("d") for _ in STEP])
    loads: list[Any] = field(default_factory=lambda: [array("d") for _ in (*LOAD, "rows")])
    devices: dict[str, dict[str, list[DeviceSample]]] = field(default_factory=dict)
    hosts: dict[str, list[HostSample]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def take_all(gathered: Gathered, path: Path, header: TraceHeader, lines: Iterator[str]) -> None:
    """All lines after the header. Damaged ones are left out, and counted in the notes.

    Records are many and nearly all whole: those are taken AT_ONCE, column by column.
    """
    damaged: dict[int, str] = {}
    waiting: dict[str, list[tuple[int, dict[str, Any]]]] = {kind: [] for kind in MANY}

    def take_one_by_one(numbered: Iterable[tuple[int, dict[str, Any]]]) -> None:
        for number, values in numbered:
            try:
                _take(gathered, header.node, parse_fact(values, header))
            except ValueError as error:
                damaged[number] = str(error)

    def take(kind: str) -> None:
        values = [values for _, values in waiting[kind]]
        if not values or not MANY[kind](gathered, header.node, values):
            take_one_by_one(waiting[kind])
        waiting[kind].clear()

    for number, line in enumerate(lines, start=2):
        try:
            values = parse_object(line)
        except ValueError as error:
            damaged[number] = str(error)
            continue
        kind = values.get("kind")
        if isinstance(kind, str) and kind in waiting:
            waiting[kind].append((number, values))
            if len(waiting[kind]) == AT_ONCE:
                take(kind)
        else:
            take_one_by_one([(number, values)])
    for kind in waiting:
        take(kind)
    if damaged:
        (why, _), first = Counter(damaged.values()).most_common(1)[0], min(damaged)
        gathered.notes.append(
            f"{path.name}: {len(damaged)} damaged lines left out ({why}), the first is line {first}"
        )


def _take_records(
    gathered: Gathered,
    node: str,
    columns: list[Any],
    names: Sequence[str],
    told: Mapping[str, Sequence[Any]] | None,
) -> bool:
    """Many records of one kind at once, if each of them is as `_append` takes it."""
    if told is None:
        return False
    rows = []
    for name in names:
        values = _numbers(told[name])
        if values is None:
            return False
        can_be = (values >= 0.0) & (values < (MAX_S if name in SECONDS else MAX_NUMBER))
        if not can_be.all():
            odd = (told[name][at] for at in np.flatnonzero(~can_be).tolist())
            if name in SECONDS or any(isinstance(value, int) for value in odd):
                return False
            values = np.where(can_be, values, nan)
        rows.append(values)
    for column, values in zip(columns, rows, strict=True):
        column.frombytes(values.tobytes())
    _place(gathered, node, told["rank"])
    return True


def _numbers(values: Sequence[Any]) -> Array | None:
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        return None


def _place(gathered: Gathered, node: str, ranks: Iterable[int]) -> None:
    for rank in dict.fromkeys(ranks):
        gathered.node_of.setdefault(rank, node)


def _take_micro_batches(gathered: Gathered, node: str, lines: Sequence[dict[str, Any]]) -> bool:
    told = parse_columns("micro_batch", lines)
    return _take_records(gathered, node, gathered.micro_batches, MICRO_BATCH, told)


def _take_steps(gathered: Gathered, node: str, lines: Sequence[dict[str, Any]]) -> bool:
    return _take_records(gathered, node, gathered.steps, STEP, parse_columns("step", lines))


def _take_loads(gathered: Gathered, node: str, lines: Sequence[dict[str, Any]]) -> bool:
    told = parse_columns("expert_load", lines)
    if told is None:
        return False
    sizes = np.array(list(map(len, told["counts"])))
    counts = list(chain.from_iterable(told["counts"]))
    if sizes.min() < 1 or sizes.max() > LOADS_PER_RECORD or set(map(type, counts)) != {int}:
        return False
    columns = [_numbers(told[name]) for name in LOAD] + [_numbers(counts)]
    if any(c is None or c.min() < 0.0 or c.max() >= MAX_NUMBER for c in columns):
        return False
    *places, rows = (column for column in columns if column is not None)
    places = [np.repeat(column, sizes) for column in places]
    places[-1] += np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    for column, values in zip(gathered.loads, (*places, rows), strict=True):
        column.frombytes(values.tobytes())
    _place(gathered, node, told["rank"])
    return True


MANY: dict[str, Callable[[Gathered, str, Sequence[dict[str, Any]]], bool]] = {
    "micro_batch": _take_micro_batches,
    "step": _take_steps,
    "expert_load": _take_loads,
}


def _take(gathered: Gathered, node: str, fact: Fact) -> None:
    """Raises ValueError for what no rank can have measured."""
    match fact:
        case DeviceSample():
            _check_moment(fact.sampled_s)
            known = gathered.devices.setdefault(node, {})
            known.setdefault(fact.device_uuid, []).append(fact)
            return
        case HostSample():
            _check_moment(fact.sampled_s)
            gathered.hosts.setdefault(node, []).append(fact)
            return
        case Attachment():
            gathered.attached[fact.rank] = fact
            gathered.node_of[fact.rank] = node
            return
        case MicroBatchRecord():
            _append(gathered.micro_batches, fact, MICRO_BATCH)
        case StepRecord():
            _append(gathered.steps, fact, STEP)
        case ExpertLoadRecord():
            for at, count in enumerate(fact.counts):
                expert = fact.first_expert + at
                values = (fact.step, fact.rank, fact.layer, expert, count)
                if not all(0 <= value < MAX_NUMBER for value in values):
                    raise ValueError("a number that can not be")
                for column, value in zip(gathered.loads, values, strict=True):
                    column.append(value)
    gathered.node_of.setdefault(fact.rank, node)


def _check_moment(moment_s: float) -> None:
    if not abs(moment_s) < MAX_MOMENT_S:
        raise ValueError("sampled_s: expected a finite number")


def _append(columns: list[Any], record: object, names: Sequence[str]) -> None:
    """What was not measured becomes NaN."""
    row = []
    for name in names:
        value = getattr(record, name)
        if value is None:
            value = nan
        elif not 0 <= value < MAX_NUMBER:
            if name in SECONDS or isinstance(value, int):
                raise ValueError(f"{name}: a number that can not be")
            value = nan
        if name in SECONDS and value >= MAX_S:
            raise ValueError(f"{name}: more than {MAX_S:g} s")
        row.append(value)
    for column, value in zip(columns, row, strict=True):
        column.append(value)
