"""Reads times of whole steps: CSV, JSON lines, or an archive of many runs as differences."""

import csv
import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.trace import StepTable, Trace
from pacekeeper.predictor.workload import Array, Positions

ARCHIVE = ("offset", "step_delta", "ms_delta")
ARCHIVE_RESOLUTION_S = 1e-3  # whole milliseconds of a clock that runs on
DURATIONS = ("duration_s", "seconds")  # names of the column that are understood


def read_steps(path: Path) -> Trace:
    """One run: a CSV file with a header, or JSON lines; columns step, duration_s (or seconds), and
    if known tokens, sum_len_squared.

    Rows without a step and a positive time are left out and counted in the notes. Raises DataError
    where a column is missing or no row is left.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from None
    return _trace(path, _json_lines(text) if text.lstrip().startswith("{") else _csv_rows(text))


def _csv_rows(text: str) -> list[Mapping[str, Any]]:
    return list(csv.DictReader(text.splitlines(), skipinitialspace=True))


def _json_lines(text: str) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for line in filter(str.strip, text.splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        rows.append(row if isinstance(row, dict) else {})
    return rows


def _trace(path: Path, rows: list[Mapping[str, Any]]) -> Trace:
    names = {name for row in rows for name in row}
    duration = next((name for name in DURATIONS if name in names), None)
    if "step" not in names or duration is None:
        raise DataError(f"{path}: no step times: needs the columns step and {DURATIONS[0]}")
    step, took = _numbers(rows, "step"), _numbers(rows, duration)
    is_good = (np.abs(step) < 2.0**53) & (np.floor(step) == step) & np.isfinite(took) & (took > 0.0)
    if not is_good.any():
        raise DataError(f"{path}: no row with a step and a positive time")
    left_out = len(rows) - int(is_good.sum())
    return Trace(
        name=path.stem,
        source="steps",
        workers=(),
        steps=StepTable(
            step=step[is_good].astype(np.intp),
            duration_s=took[is_good],
            tokens=_numbers(rows, "tokens")[is_good],
            sum_len_squared=_numbers(rows, "sum_len_squared")[is_good],
        ),
        resolution_s=_resolution_s(took[is_good]),
        notes=(f"{left_out} rows without a step and a positive time left out",) if left_out else (),
    )


def _numbers(rows: Iterable[Mapping[str, Any]], name: str) -> Array:
    def number(value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return float("nan")

    return np.array([number(row.get(name)) for row in rows], dtype=np.float64)


def _resolution_s(took: Array) -> float:
    """The decimal unit that all times are whole multiples of, if it is coarse; else 0.

    Times that are all the same tell nothing of the clock.
    """
    if np.ptp(took) == 0.0:
        return 0.0
    for unit_s in (1.0, 0.1, 1e-2, 1e-3):
        if np.allclose(took / unit_s, np.round(took / unit_s), rtol=0.0, atol=1e-6):
            return unit_s
    return 0.0


def read_archive(path: Path) -> tuple[Trace, ...]:
    """All runs of an archive (.npz): `offset` [runs + 1] cuts `step_delta` and `ms_delta`, first
    differences of the step number and of the cumulative time of training in ms.

    The first row of a run has no duration. Where the clock was set back, or a log line repeated,
    the step has no time and is left out; more than one step between two lines share their time.
    Raises DataError for anything else.
    """
    try:
        with path.open("rb") as file, NpzFile(file, allow_pickle=False) as archive:
            missing = sorted(set(ARCHIVE) - set(archive.files))
            if missing:
                raise DataError(f"{path}: not an archive of step times: no {', '.join(missing)}")
            offset, steps, times_ms = (archive[name] for name in ARCHIVE)
    except (OSError, ValueError, BadZipFile) as error:
        raise DataError(f"{path}: {error}") from None
    is_cut = offset.size > 0 and offset[0] >= 0 and bool((np.diff(offset) >= 0).all())
    if not is_cut or steps.shape != times_ms.shape or offset[-1] > steps.size:
        raise DataError(f"{path}: offsets and columns do not fit together")
    return tuple(
        _run(f"{path.stem}:{i}", steps[begin:end], times_ms[begin:end])
        for i, (begin, end) in enumerate(pairwise(offset.tolist()))
    )


def _run(name: str, step_delta: Positions, ms_delta: Positions) -> Trace:
    step = np.cumsum(step_delta.astype(np.int64))[1:]
    apart = step_delta[1:].astype(np.float64)
    took_s = ms_delta[1:].astype(np.float64) * 1e-3
    is_good = (apart > 0) & (took_s > 0.0)
    left_out = int((~is_good).sum())
    unknown = np.full(int(is_good.sum()), np.nan)
    return Trace(
        name=name,
        source="steps",
        workers=(),
        steps=StepTable(
            step=step[is_good].astype(np.intp),
            duration_s=took_s[is_good] / apart[is_good],
            tokens=unknown,
            sum_len_squared=unknown,
        ),
        resolution_s=ARCHIVE_RESOLUTION_S,
        notes=(f"{left_out} steps without a time left out",) if left_out else (),
    )
