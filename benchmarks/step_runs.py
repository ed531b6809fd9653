"""Healthy jobs as step times with what is known beside them, and slowdowns spliced into them."""

import csv
import gzip
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.job_level.detect import judge_job
from pacekeeper.predictor.recorded.anomalies import Anomaly
from pacekeeper.predictor.recorded.trace import StepTable, Trace
from pacekeeper.predictor.stats.change_points import levels, noise, without_spikes
from pacekeeper.simulator.readers.step_times import read_archive

DESIGNED_JUMP = 1.15  # of the others' pace: taken for a change of the schedule
MIN_CLASS_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One healthy run with what is known beside it; None where it is not."""

    name: str
    record: str
    trace: Trace
    replicates: tuple[Trace, ...] = ()
    schedule: Positions | None = None
    after_pause: Flags | None = None  # an evaluation or a checkpoint lies before the step

    @property
    def num_steps(self) -> int:
        assert self.trace.steps is not None
        return int(self.trace.steps.step.size)

    def can(self, knowledge: str) -> bool:
        if knowledge == "replicates":
            return bool(self.replicates)
        return knowledge == "nothing" or self.schedule is not None

    def judged(self, knowledge: str, trace: Trace | None = None) -> tuple[Anomaly, ...]:
        """The troubles in `trace` (or the run itself), which may end before the run."""
        trace = self.trace if trace is None else trace
        assert trace.steps is not None
        if knowledge == "replicates":
            return judge_job(trace, replicates=self.replicates).anomalies
        if knowledge == "schedule":
            assert self.schedule is not None
            return judge_job(trace, schedule=self.schedule[: trace.steps.step.size]).anomalies
        return judge_job(trace).anomalies


def durations(trace: Trace) -> Array:
    assert trace.steps is not None
    return trace.steps.duration_s


def last_step(trace: Trace) -> int:
    assert trace.steps is not None
    return int(trace.steps.step[-1])


def schedule_of(others: Sequence[Trace], trace: Trace) -> Positions | None:
    """A class for each step, new where the median pace of the others makes a large jump."""
    assert trace.steps is not None
    alike = [other for other in others if last_step(other) == last_step(trace)]
    if not alike:
        return None
    step = trace.steps.step
    paces = [
        np.interp(step, other.steps.step, without_spikes(durations(other), resolution=1e-3))
        for other in alike
        if other.steps is not None
    ]
    pace = np.log(np.median(paces, axis=0))
    found = levels(pace, sigma=max(noise(pace), 0.01), penalty=50.0)
    classes = np.zeros(step.size, dtype=np.intp)
    before = found[0].mean
    for level in found[1:]:
        if level.num_blocks >= MIN_CLASS_STEPS:
            classes[level.begin :] += abs(level.mean - before) >= log(DESIGNED_JUMP)
            before = level.mean
    return classes


def nanogpt_runs(folder: Path) -> list[Run]:
    traces = read_archive(folder / "steps.npz")
    with (folder / "runs.csv").open() as file:
        records = [f"{row['track']}/{row['record']}" for row in csv.DictReader(file)]
    members: dict[str, list[int]] = defaultdict(list)
    for i, record in enumerate(records):
        members[record].append(i)
    runs = []
    for i, (trace, record) in enumerate(zip(traces, records, strict=True)):
        others = tuple(traces[j] for j in members[record] if j != i)
        runs.append(
            Run(
                name=f"{record}/{i}",
                record=record,
                trace=trace,
                replicates=others,
                schedule=schedule_of(others, trace),
            )
        )
    return runs


def smartmoe_runs(folder: Path) -> list[Run]:
    """Iteration times; one run per configuration, and all steps are of one work class."""
    times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    with gzip.open(folder / "iteration_ms.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            times[row["name"], row["run"]].append((int(row["iteration"]), float(row["ms"]) * 1e-3))
    runs = []
    for (name, number), pairs in times.items():
        step, duration_s = (np.array(column) for column in zip(*sorted(pairs), strict=True))
        unknown = np.full(step.size, np.nan)
        table = StepTable(step=step, duration_s=duration_s, tokens=unknown, sum_len_squared=unknown)
        trace = Trace(name=name, source="smartmoe", workers=(), steps=table, resolution_s=1e-4)
        schedule = np.zeros(step.size, dtype=np.intp)
        runs.append(Run(name=f"{name}/{number}", record=name, trace=trace, schedule=schedule))
    return runs


def with_durations(trace: Trace, duration_s: Array) -> Trace:
    """The trace with these times, cut to as many steps."""
    assert trace.steps is not None
    n = duration_s.size
    table = StepTable(
        step=trace.steps.step[:n],
        duration_s=duration_s,
        tokens=trace.steps.tokens[:n],
        sum_len_squared=trace.steps.sum_len_squared[:n],
    )
    return replace(trace, steps=table)


def spliced(trace: Trace, begin: int, num_steps: int, slowdown: float) -> Array:
    """The step times with `num_steps` of them slowed, told by the same clock again."""
    took_s = durations(trace).copy()
    took_s[begin : begin + num_steps] *= slowdown
    clock_s = np.concatenate([[0.0], np.cumsum(took_s)])
    if trace.resolution_s:
        clock_s = np.round(clock_s / trace.resolution_s) * trace.resolution_s
    return np.diff(clock_s)
