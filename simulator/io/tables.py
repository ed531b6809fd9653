"""Reads tables of others by the names of their columns: Parquet, CSV or JSON lines, also gzipped.

Types and order of columns do not matter. A cell that is no number is NaN; a row whose key columns
tell no possible number is left out by the reader of the format, and counted. Parquet files need the
extra `parquet`.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.stats.group_ids import grouped
from pacekeeper.simulator.io.text import head_of, lines_of

PARQUET_MAGIC = b"PAR1"
MAX_WHOLE = 2.0**53  # beyond it a double skips whole numbers
MAX_S = 1e9  # of an operation or a step: thirty years
HEAD_ROWS = 8  # of JSON lines, looked at for names
_NUMBERS = "iufb"  # kinds of numpy's types


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Columns [rows] by name; numbers where the file has a type for them, else objects."""

    path: Path
    columns: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def need(self, names: Iterable[str], what: str) -> None:
        """Raises DataError unless it has these columns."""
        missing = sorted(set(names) - set(self.columns))
        if missing:
            raise DataError(f"{self.path}: not {what}: no column {', '.join(missing)}")

    def numbers(self, name: str) -> Array:
        """The column, NaN where it tells no number; all NaN where there is none of that name."""
        if name not in self.columns:
            return np.full(self.num_rows, np.nan)
        values = self.columns[name]
        if values.dtype.kind in _NUMBERS:
            return values.astype(np.float64)  # type: ignore[no-any-return]
        return np.array([_number(value) for value in values], dtype=np.float64)

    def words(self, name: str) -> Any:
        """The column as text [rows], "" where it tells nothing."""
        values = self.columns[name]
        if values.dtype.kind in _NUMBERS:  # few different ones, as a rule
            numbers, at = np.unique(values, return_inverse=True)
            return np.array([*map(str, numbers.tolist()), None], dtype=np.object_)[at]
        values = values.tolist()
        return np.array(["" if value is None else str(value) for value in values], dtype=np.object_)


def read_table(path: Path) -> Table:
    """The table in a file. Raises DataError where it is none."""
    head = head_of(path, len(PARQUET_MAGIC))
    if head == PARQUET_MAGIC:
        return Table(path=path, columns=_parquet_columns(path))
    notes: list[str] = []
    lines = lines_of(path, notes)
    try:
        first = next(lines, "")
        if first.lstrip("\ufeff \t").startswith("{"):
            rows = _json_rows([first, *lines])
            names = list(dict.fromkeys(name for row in rows for name in row))
            cells = [[row.get(name) for row in rows] for name in names]
        else:
            names, cells = _csv_columns(first, lines)
    except csv.Error as error:
        raise DataError(f"{path}: {error}") from None
    columns = {
        name: np.array([*values, None], dtype=np.object_)[:-1]
        for name, values in zip(names, cells, strict=True)
    }
    return Table(path=path, columns=columns, notes=notes)


def names_in(path: Path, head: bytes) -> list[str]:
    """The names of its columns, as its first bytes tell them; [] where they tell none."""
    if head[: len(PARQUET_MAGIC)] == PARQUET_MAGIC:
        return _column_names(path)
    lines = head.decode("utf-8", errors="replace").lstrip("\ufeff").splitlines()
    if not lines:
        return []
    if lines[0].lstrip().startswith("{"):
        rows = _json_rows(islice(lines, HEAD_ROWS))
        return list(dict.fromkeys(name for row in rows for name in row))
    try:
        return [name.strip() for name in next(csv.reader(lines[:1], skipinitialspace=True), [])]
    except csv.Error:
        return []


def is_whole(values: Array, *, least: float = 0.0) -> Flags:
    """Which are whole numbers that an index may be."""
    with np.errstate(invalid="ignore"):
        flags: Flags = (np.floor(values) == values) & (values >= least) & (values < MAX_WHOLE)
    return flags


def is_time(taken_s: Array) -> Flags:
    """Which are times that something may take, 0 included."""
    with np.errstate(invalid="ignore"):
        flags: Flags = (taken_s >= 0.0) & (taken_s < MAX_S)
    return flags


def newest(keys: Sequence[Positions]) -> Flags:
    """Flags [rows]: the last row of each key."""
    kept = np.zeros(len(keys[0]), dtype=np.bool_)
    if len(kept):
        _, first = grouped(*(key[::-1] for key in keys))
        kept[len(kept) - 1 - first] = True
    return kept


def left_out(count: int, why: str) -> list[str]:
    """A note that so many rows were not used; none for none."""
    return [f"{count} {why}"] if count else []


def _read_parquet(path: Path) -> Any:
    """The file's table. Raises DataError where it is none."""
    return _opened(path, "read_table")


def _column_names(path: Path) -> list[str]:
    """The names of its columns, without reading them. Raises as `_read_parquet`."""
    names: list[str] = _opened(path, "read_schema").names
    return names


def _opened(path: Path, how: str) -> Any:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        return getattr(parquet, how)(path)
    except (OSError, arrow.ArrowException, ValueError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: damaged Parquet: {why}") from None


def _parquet_columns(path: Path) -> dict[str, Any]:
    table = _read_parquet(path)
    columns: dict[str, Any] = {}
    for name in table.schema.names:
        column = table.column(table.schema.get_field_index(name))
        try:
            values = column.to_numpy()
        except (ValueError, RuntimeError):  # a type that numpy has not
            values = np.array([*column.to_pylist(), None], dtype=np.object_)[:-1]
        columns[name] = values
    return columns


def _json_rows(lines: Iterable[str]) -> list[Mapping[str, Any]]:
    """One for each line that is not empty; {} for a damaged one."""
    rows: list[Mapping[str, Any]] = []
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        rows.append(row if isinstance(row, dict) else {})
    return rows


def _csv_columns(first: str, lines: Iterable[str]) -> tuple[list[str], list[list[str | None]]]:
    """Names and cells; what a row lacks is None."""
    (names,) = csv.reader([first.lstrip("\ufeff")], skipinitialspace=True)
    names = [name.strip() for name in names]
    cells: list[list[str | None]] = [[] for _ in names]
    for row in csv.reader((line.replace("\0", "") for line in lines), skipinitialspace=True):
        if row:
            for i, column in enumerate(cells):
                column.append(row[i] if i < len(row) else None)
    return names, cells


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
