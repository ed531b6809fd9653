"""How does the job-level detector do on the Numenta Anomaly Benchmark, beside the published ones?

Counted as the peers' were (`nab/SOURCE.md`): after the probation of 15 % (750 points at most) the
windows with a flagged point in them, and the runs of flagged points outside of all windows. Values
count as step times, nothing is known of the work; a finding flags its points, first to last. NAB
feeds point by point, ours sees the whole series, which flatters it. It looks for what takes longer
and lasts: in the rows "both ways" it is also given the reciprocals, where a fall is a rise.
"""

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pacekeeper.predictor.cost.features import Array, Flags
from pacekeeper.predictor.job_level.detect import judge_job
from pacekeeper.predictor.recorded.trace import StepTable, Trace

PROBATION_SHARE, MOST_PROBATION = 0.15, 750
BAR_HITS, BAR_FALSE_RUNS = 22, 22  # the best published: as many hits, fewer false runs than these


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One labelled series; windows are points [begin, end) of it."""

    name: str
    values: Array
    windows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What became of a series' windows."""

    hits: int
    windows: int
    false_runs: int


def series_in(folder: Path) -> list[Series]:
    """All series of the folder, by name."""
    labels = json.loads((folder / "labels.json").read_text())
    found = []
    for path in sorted(folder.glob("*.csv.gz")):
        with gzip.open(path, "rt") as file:
            rows = list(csv.DictReader(file))
        when = [datetime.fromisoformat(row["timestamp"]) for row in rows]
        name = path.name.removesuffix(".gz")
        windows = []
        for first, last in labels[name]["windows"]:
            begin, end = datetime.fromisoformat(first), datetime.fromisoformat(last)
            inside = [i for i, moment in enumerate(when) if begin <= moment <= end]
            windows.append((inside[0], inside[-1] + 1))
        values = np.array([float(row["value"]) for row in rows])
        found.append(Series(name=name, values=values, windows=tuple(windows)))
    return found


def peers_in(folder: Path) -> list[dict[str, str]]:
    """What other detectors found on the same series, where that was counted."""
    path = folder / "peer_detectors_on_this_half.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def counted(flagged: Flags, windows: tuple[tuple[int, int], ...]) -> Count:
    """Windows hit, and runs of flagged points outside, after the probation; flagged [points]."""
    counts = flagged.copy()
    counts[: min(int(PROBATION_SHARE * len(flagged)), MOST_PROBATION)] = False
    outside = counts.copy()
    for begin, end in windows:
        outside[begin:end] = False
    runs = int(outside[0]) + int((outside[1:] & ~outside[:-1]).sum())
    hits = sum(bool(counts[begin:end].any()) for begin, end in windows)
    return Count(hits=hits, windows=len(windows), false_runs=runs)


def flagged(values: Array, *, is_steady: bool) -> Flags:
    """The points of the findings in a series; is_steady: all points are of one work class."""
    points = np.arange(len(values))
    unknown = np.full(len(values), np.nan)
    table = StepTable(step=points, duration_s=values, tokens=unknown, sum_len_squared=unknown)
    trace = Trace(name="series", source="nab", workers=(), steps=table)
    schedule = np.zeros(len(values), dtype=np.intp) if is_steady else None
    flags = np.zeros(len(values), dtype=np.bool_)
    for trouble in judge_job(trace, schedule=schedule).anomalies:
        last = len(values) - 1 if trouble.last_step is None else trouble.last_step
        flags[trouble.first_step : last + 1] = True
    return flags


def _both_ways(values: Array, *, is_steady: bool) -> Flags:
    with np.errstate(divide="ignore"):
        falls = flagged(1.0 / values, is_steady=is_steady)
    return flagged(values, is_steady=is_steady) | falls


AS_SHIPPED = "ours, longer"  # as replay judges step times of which nothing else is known
OURS: dict[str, Callable[[Array], Flags]] = {
    AS_SHIPPED: lambda values: flagged(values, is_steady=False),
    "ours, both ways": lambda values: _both_ways(values, is_steady=False),
    "ours, steady work, longer": lambda values: flagged(values, is_steady=True),
    "ours, steady work, both ways": lambda values: _both_ways(values, is_steady=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    folder = parser.parse_args().data / "nab"
    all_series = series_in(folder)
    rows = []
    for name, rule in OURS.items():
        counts = [counted(rule(series.values), series.windows) for series in all_series]
        hits, windows, runs = (
            sum(getattr(one, what) for one in counts) for what in ("hits", "windows", "false_runs")
        )
        rows.append({"detector": name, "hits": hits, "windows": windows, "false_runs": runs})
    for row in peers_in(folder):
        hits, windows, runs = (int(row[name]) for name in ("windows_hit", "windows", "false_runs"))
        rows.append(
            {"detector": row["detector"], "hits": hits, "windows": windows, "false_runs": runs}
        )
    table = Table(
        title=f"{len(all_series)} series, {sum(len(s.values) for s in all_series)} points"
    )
    for column in ("detector", "windows hit", "windows", "false runs"):
        table.add_column(column, justify="left" if column == "detector" else "right")
    for one in sorted(rows, key=lambda row: (-int(row["hits"]), int(row["false_runs"]))):
        table.add_row(*(str(one[name]) for name in ("detector", "hits", "windows", "false_runs")))
    Console(width=100).print(table)
    holds = {
        str(one["detector"]): int(one["hits"]) >= BAR_HITS
        and int(one["false_runs"]) < BAR_FALSE_RUNS
        for one in rows
        if one["detector"] in OURS
    }
    print(json.dumps({"rows": rows, "bar": [BAR_HITS, BAR_FALSE_RUNS], "holds": holds}))
    return 0 if holds[AS_SHIPPED] else 1


if __name__ == "__main__":
    sys.exit(main())
