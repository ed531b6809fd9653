"""Reads times of whole steps: a table of one run or of several, or an archive as differences."""

import zlib
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.recorded.trace import StepTable, Trace
from pacekeeper.simulator.io.tables import Table, is_time, is_whole, left_out, newest, read_table
from pacekeeper.simulator.io.text import head_of

ARCHIVE = ("offset", "step_delta", "ms_delta")
ARCHIVE_RESOLUTION_S = 1e-3  # whole milliseconds of a clock that runs on
ZIP_MAGIC = b"PK"  # of .npz
_BROKEN = (OSError, ValueError, EOFError, BadZipFile, RuntimeError, zlib.error)
STEPS = ("step", "iteration", "iter")  # names of the columns that are understood
DURATIONS = {"duration_s": 1.0, "seconds": 1.0, "iter_s": 1.0, "duration_ms": 1e-3, "ms": 1e-3}
RUNS = ("name", "run")
MAX_RUNS = 10_000


def is_steps(names: list[str]) -> bool:
    """Do columns of these names tell step times?"""
    return any(name in names for name in STEPS) and any(name in names for name in DURATIONS)


def read_runs(path: Path) -> tuple[Trace, ...]:
    """All runs of a table or an archive: columns step (iteration), duration_s (seconds, ms), and if
    known tokens, sum_len_squared, work_class (equal for steps of equal work), name and run.

    Rows without a step and a positive time are left out and counted in the notes. Raises DataError
    where a column is missing or no row is left.
    """
    if head_of(path, len(ZIP_MAGIC)) == ZIP_MAGIC:
        return read_archive(path)
    table = read_table(path)
    if not is_steps(list(table.columns)):
        raise DataError(
            f"{path}: no step times: needs the columns step and duration_s",
            remedy=f"it has {', '.join(table.columns)[:200] or 'none'}",
        )
    return tuple(_trace(table, name, rows) for name, rows in _runs(table))


def _runs(table: Table) -> list[tuple[str, Flags]]:
    """(name, rows) of each run, in the order of the file."""
    stem = table.path.name.partition(".")[0]
    columns = [table.words(name) for name in RUNS if name in table]
    if not columns or not table.num_rows:
        return [(stem, np.ones(table.num_rows, dtype=np.bool_))]
    labels = ["/".join(cells) for cells in zip(*columns, strict=True)]
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    if len(number) > MAX_RUNS:
        raise DataError(
            f"{table.path}: {len(number)} runs by the columns {', '.join(RUNS)}",
            remedy=f"give at most {MAX_RUNS} in one file",
        )
    of_row = np.array([number[label] for label in labels], dtype=np.intp)
    names = [stem] if len(number) == 1 else [f"{stem}:{label}" for label in number]
    return [(name, of_row == i) for i, name in enumerate(names)]


def _trace(table: Table, name: str, rows: Flags) -> Trace:
    step_name = next(one for one in STEPS if one in table)
    duration_name = next(one for one in DURATIONS if one in table)
    step = table.numbers(step_name)[rows]
    took = table.numbers(duration_name)[rows] * DURATIONS[duration_name]
    is_good = is_whole(np.abs(step)) & is_time(took) & (took != 0.0)
    if not is_good.any():
        raise DataError(f"{table.path}: {name}: no row with a step and a positive time")
    number = step[is_good].astype(np.intp)
    kept = newest([number])
    at = np.flatnonzero(is_good)[kept]
    duration_s = took[at]
    notes = [*table.notes]
    notes += left_out(int((~is_good).sum()), "rows without a step and a positive time left out")
    notes += left_out(int((~kept).sum()), "steps told twice: the last time counts")
    return Trace(
        name=name,
        source="steps",
        workers=(),
        steps=StepTable(
            step=number[kept],
            duration_s=duration_s,
            tokens=table.numbers("tokens")[rows][at],
            sum_len_squared=table.numbers("sum_len_squared")[rows][at],
            work_class=_classes(table, rows, at),
        ),
        resolution_s=_resolution_s(duration_s),
        notes=tuple(notes),
    )


def _classes(table: Table, rows: Flags, at: Positions) -> Positions | None:
    """Numbers of the work classes; None where they are not told of every step."""
    if "work_class" not in table:
        return None
    words = table.words("work_class")[rows][at].astype(np.str_)
    if (words == "").any():
        return None
    numbers: Positions = np.unique(words, return_inverse=True)[1].reshape(-1).astype(np.intp)
    return numbers


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
            offset, steps, times_ms = (_column(path, archive, name) for name in ARCHIVE)
    except (*_BROKEN, MemoryError) as error:  # memory: a header may tell any size
        raise DataError(f"{path}: {error}") from None
    offset = offset.astype(np.intp)
    is_cut = offset.size > 0 and offset[0] >= 0 and bool((np.diff(offset) >= 0).all())
    if not is_cut or steps.shape != times_ms.shape or offset[-1] > steps.size:
        raise DataError(f"{path}: offsets and columns do not fit together")
    return tuple(
        _run(f"{path.stem}:{i}", steps[begin:end], times_ms[begin:end])
        for i, (begin, end) in enumerate(pairwise(offset.tolist()))
    )


def _column(path: Path, archive: NpzFile, name: str) -> Array:
    """One-dimensional, of numbers; what is not finite counts as no time. Raises DataError."""
    values = archive[name]
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iuf":
        raise DataError(f"{path}: {name} is no column of numbers")
    return np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _run(name: str, step_delta: Array, ms_delta: Array) -> Trace:
    step = np.cumsum(step_delta)[1:]
    apart = step_delta[1:]
    took_s = ms_delta[1:] * 1e-3
    is_good = (apart > 0) & (took_s > 0.0) & is_time(took_s) & is_whole(np.abs(step))
    num_bad = int((~is_good).sum())
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
        notes=tuple(left_out(num_bad, "steps without a time left out")),
    )
