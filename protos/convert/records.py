"""Converts records to columns of the wire and back: one group of columns per kind. NaN is None.

All columns of a message have the same length; another length is a ValueError that names the column.
A column of defaults is left out, so new columns cost nothing and old receivers need not know them.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import repeat
from typing import Any, TypeVar

from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable
from pacekeeper.core.telemetry.node_report import MAX_RECORDS_PER_REPORT
from pacekeeper.core.telemetry.records import (
    LOADS_PER_RECORD,
    MAX_S,
    TIME_BOUNDS,
    CheckpointRecord,
    ExpertLoadRecord,
    MicroBatchRecord,
    PairRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    SnapshotRecord,
    StepRecord,
)
from pacekeeper.core.text import one_line

MAX_RECORDS = 4 * MAX_RECORDS_PER_REPORT  # accepted in one report
KINDS: tuple[tuple[str, type[Any]], ...] = (
    ("micro_batches", MicroBatchRecord),
    ("steps", StepRecord),
    ("plans_applied", PlanAppliedRecord),
    ("plans_refused", PlanRefusedRecord),
    ("rank_exits", RankExitRecord),
    ("probes", ProbeRecord),
    ("pairs", PairRecord),
    ("checkpoints", CheckpointRecord),
    ("snapshots", SnapshotRecord),
)

T = TypeVar("T")
_BOUNDS = {**TIME_BOUNDS, "tensor_share": (0.0, MAX_S)}
# Read from the classes once: per report it would cost more than the report itself.
_NAMES = {kind: {field.name: field.type for field in fields(kind)} for _, kind in KINDS}
_DEFAULTS: dict[type[Any], dict[str, Any]] = {
    kind: {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    for _, kind in KINDS
}
_REQUIRED = {kind: _NAMES[kind].keys() - _DEFAULTS[kind].keys() for _, kind in KINDS}
# Slot setters of the kinds without a __post_init__ check.
_SLOTS: dict[type[Any], dict[str, Callable[[Any, Any], None]]] = {
    kind: {name: getattr(kind, name).__set__ for name in names}
    for kind, names in _NAMES.items()
    if not hasattr(kind, "__post_init__")
}


def fill_columns(columns: Any, records: Sequence[Any]) -> None:
    """Append the fields of records of one kind to their columns."""
    for field in fields(records[0]):
        values = [getattr(record, field.name) for record in records]
        if all(value == field.default for value in values):
            continue
        getattr(columns, field.name).extend(math.nan if v is None else v for v in values)


def records_in(columns: Any, kind: type[T], where: str) -> list[T]:
    """Decode columns to records.

    Args:
        columns: The message.
        kind: Class of the records.
        where: Job and column group, for the error.

    Raises:
        ValueError: Names the invalid column or value.
    """
    found = _column_values(columns, kind, where)
    if kind not in _SLOTS:
        rows = zip(*found.values(), strict=True)
        return [kind(**dict(zip(found, row, strict=True))) for row in rows]
    defaults = _DEFAULTS[kind]
    records = [object.__new__(kind) for _ in found["rank"]]
    # By column into the slots: a frozen dataclass's constructor takes three times as long.
    for name, put in _SLOTS[kind].items():
        values = found[name] if name in found else repeat(defaults[name])
        deque(map(put, records, values), maxlen=0)
    return records


def micro_batches_in(columns: Any, where: str) -> MicroBatchTable | None:
    """Decode columns to a table; None if they are empty. Raises ValueError as `records_in`."""
    found = _column_values(columns, MicroBatchRecord, where)
    return MicroBatchTable(columns=found) if found["rank"] else None


def num_rows(columns: Any, where: str) -> int:
    """Number of records in columns. Raises ValueError above MAX_RECORDS, before any is decoded."""
    length = len(columns.rank)
    if length > MAX_RECORDS:
        raise ValueError(
            f"{where}: {length} records, at most {MAX_RECORDS} are accepted in one report"
        )
    return length


def _column_values(columns: Any, kind: type[Any], where: str) -> dict[str, list[Any]]:
    """Values by column name; columns left out of the message are missing, they have defaults."""
    types, length = _NAMES[kind], num_rows(columns, where)
    found: dict[str, list[Any]] = {}
    for field, values in columns.ListFields():
        name, column = field.name, list(values)
        if len(column) != length:
            raise ValueError(f"{where}: column {name} has {len(column)} entries, not {length}")
        if types[name] == (float | None):
            column = [None if value != value else value for value in column]
            if name in _BOUNDS:
                _reject_impossible([one for one in column if one is not None], name, where)
        elif types[name] is float:
            _reject_impossible(column, name, where)
        elif types[name] is str:
            column = [one_line(value) for value in column]
        found[name] = column
    for name in _REQUIRED[kind] - found.keys():
        if length:
            raise ValueError(f"{where}: column {name} has 0 entries, not {length}")
        found[name] = []
    return found


def _reject_impossible(column: list[float], name: str, where: str) -> None:
    if not column:
        return
    floor, most = _BOUNDS.get(name, (-math.inf, math.inf))
    if math.isfinite(sum(column)) and min(column) >= floor and max(column) <= most:
        return
    for value in column:
        if not (math.isfinite(value) and floor <= value <= most):
            raise ValueError(f"{where}: impossible {name} {value}")


MAX_RANKS = 1024  # of one node


def loads_from_columns(columns: Any, job: str, *, most_counts: int) -> Iterator[ExpertLoadRecord]:
    """Decode expert loads; adjacent expert ranges of a rank and layer become one record.

    Raises:
        ValueError: A column has another length, or a value is impossible.
    """
    where = f"{job} expert_loads"
    length, num_counts = len(columns.rank), len(columns.counts)
    if num_counts > most_counts:
        raise ValueError(
            f"{where}: {num_counts} counts, at most {most_counts} are accepted in one report"
        )
    names = ["rank", "step", "generation", "layer", "first_expert", "num_counts"]
    names += ["num_ranks"] if columns.num_ranks else []
    for name in names:
        if len(getattr(columns, name)) != length:
            size = len(getattr(columns, name))
            raise ValueError(f"{where}: column {name} has {size} entries, not {length}")
    counts, begin, at = list(columns.counts), 0, 0
    values = [list(getattr(columns, name)) for name in names]
    values += [] if columns.num_ranks else [[1] * length]
    # A layer's experts take many ring records; joined they cost a sixteenth.
    place, first_expert = (0, 0, 0, 0, 0), 0
    for rank, step, generation, layer, first, number, num_ranks in zip(*values, strict=True):
        if at + number > len(counts):
            raise ValueError(f"{where}: num_counts sums to more than counts holds")
        if not 1 <= number <= LOADS_PER_RECORD:
            raise ValueError(f"{where}: impossible num_counts {number}")
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"{where}: impossible num_ranks {num_ranks}")
        here = rank, step, generation, layer, num_ranks
        if here != place or first != first_expert + at - begin:
            if begin < at:
                yield _load_record(place, first_expert, counts[begin:at])
            place, first_expert, begin = here, first, at
        at += number
    if begin < at:
        yield _load_record(place, first_expert, counts[begin:at])
    if at != len(counts):
        raise ValueError(f"{where}: counts holds {len(counts)} entries, num_counts sums to {at}")


def _load_record(
    place: tuple[int, int, int, int, int], first_expert: int, counts: Sequence[int]
) -> ExpertLoadRecord:
    rank, step, generation, layer, num_ranks = place
    return ExpertLoadRecord(
        rank=rank,
        step=step,
        generation=generation,
        layer=layer,
        first_expert=first_expert,
        counts=tuple(counts),
        num_ranks=num_ranks,
    )
