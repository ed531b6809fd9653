"""Did all ranks of a job, or all of one stage, become slower at once, unexplained by their work?

Nobody is named: what slows everybody is the host, the power, the fabric or the code. Each rank's
steps are put beside its own typical step, and the median over ranks is judged like one rank that
has no peers: by its past. Pure.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import exp

import numpy as np

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.job_level.detect import MIN_SLOWDOWN
from pacekeeper.predictor.job_level.step_time_model import KNOWN_SHARE, work_seconds
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind, TraceReport
from pacekeeper.predictor.recorded.noise import noise_of
from pacekeeper.predictor.recorded.residuals import Residuals, layouts_of
from pacekeeper.predictor.recorded.shift_scan import strongest_shifts
from pacekeeper.predictor.recorded.shift_test import Shift
from pacekeeper.predictor.recorded.trace import ComputeTable, Trace
from pacekeeper.predictor.stats.robust import column_medians, ratio_interval

FALSE_ALARMS = 0.01  # per trace, if nothing is wrong
MIN_STEPS = 8  # of a layout: fewer have no past to speak of
MOST_JUMPS = 8  # of one series
ITS_OWN = 0.5  # of what a stage lost beside the others it must have lost by the clock, too


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Paces:
    """Of the steps of one layout: what each rank took [steps, ranks], over its typical step; NaN
    where it told nothing. The same of its tokens and squared lengths.
    """

    steps: Positions
    stage: Positions
    compute: Array
    tokens: Array
    squares: Array

    def of_stage(self, stage: int) -> Array:
        """The middle of its ranks in each step [steps]."""
        return column_medians(self.compute[:, self.stage == stage], axis=1)


def global_slowdowns(trace: Trace, *, slow: Collection[int] = ()) -> TraceReport:
    """Slowdowns of everybody (kind HOST, no rank) and, of all ranks of a stage (its number told).

    `slow`: ranks that have findings of their own and say nothing here.

    Where tokens are not told, a slower job is a note: its work may have grown. A stage is judged
    beside the others, which do the same work. Each layout is judged by itself.
    """
    anomalies, notes = list[Anomaly](), list[str]()
    if trace.compute is None:
        return TraceReport(anomalies=(), what_if=None, notes=())
    steps = np.unique(trace.compute.step)
    spans = [span for span in layouts_of(trace, steps) if span[1] - span[0] >= MIN_STEPS]
    last_step = int(steps[-1]) if len(steps) else 0
    for begin, end in spans:
        paces = _paces(trace, trace.compute, steps[begin:end], slow)
        if not len(paces.stage):
            continue
        share = FALSE_ALARMS / len(spans) / 2.0
        expected, is_known = _expected(paces)
        observed = column_medians(paces.compute, axis=1)
        whole = np.log(observed / expected)
        for shift in _jumps(whole, share):
            words = _in_words(paces, shift, None)
            if is_known:
                anomalies.append(_anomaly(paces, shift, None, words, last_step))
            else:
                notes.append(f"{words}; what they worked is not told: not judged")
        for stage, shift in _of_stages(paces, whole, share):
            words = _in_words(paces, shift, stage)
            anomalies.append(_anomaly(paces, shift, stage, words, last_step))
    return TraceReport(anomalies=tuple(anomalies), what_if=None, notes=tuple(notes))


def _paces(trace: Trace, table: ComputeTable, steps: Positions, slow: Collection[int]) -> _Paces:
    stage_of = {worker.rank: worker.stage for worker in trace.workers if worker.rank not in slow}
    kept = np.isin(table.step, steps) & np.isin(table.rank, list(stage_of))
    ranks, column = np.unique(table.rank[kept], return_inverse=True)
    row = np.searchsorted(steps, table.step[kept])
    shape = len(steps), len(ranks)

    def typical(values: Array) -> Array:
        sums = np.bincount(row * shape[1] + column, values[kept], minlength=shape[0] * shape[1])
        told = np.where(sums > 0.0, sums, np.nan).reshape(shape)
        with np.errstate(invalid="ignore"):
            return np.asarray(told / column_medians(told))

    return _Paces(
        steps=steps,
        stage=np.array([stage_of[rank] for rank in ranks.tolist()], dtype=np.intp),
        compute=typical(table.compute_s),
        tokens=typical(table.tokens),
        squares=typical(table.sum_len_squared),
    )


def _expected(paces: _Paces) -> tuple[Array, bool]:
    """What the work of each step should take [steps], up to a factor, NaN where a step does not
    tell it; is the work told at all?"""
    took_s, tokens, squares = (
        column_medians(one, axis=1) for one in (paces.compute, paces.tokens, paces.squares)
    )
    told = np.isfinite(took_s) & np.isfinite(tokens)
    if told.mean() < KNOWN_SHARE:
        return np.ones(len(took_s)), False
    expected = np.full(len(took_s), np.nan)
    expected[told], _ = work_seconds(took_s[told], tokens[told], squares[told])
    return expected, True


def _of_stages(paces: _Paces, whole: Array, false_alarms: float) -> list[tuple[int, Shift]]:
    """Stages of several ranks that became slower than the others; (stage, shift)."""
    stages = np.unique(paces.stage).tolist()
    logs = {stage: np.log(paces.of_stage(stage)) for stage in stages}
    found = []
    for stage in stages if len(stages) > 1 else ():
        if (paces.stage == stage).sum() < 2:
            continue  # a rank: it is judged as one
        others = np.stack([logs[other] for other in stages if other != stage], axis=1)
        beside = logs[stage] - column_medians(others, axis=1)
        for shift in _jumps(beside, false_alarms / len(stages)):
            # Others that became faster make nobody slower.
            by_clock = _rise(logs[stage], shift), _rise(beside + whole, shift)
            if min(by_clock) >= ITS_OWN * shift.log_slowdown:
                found.append((stage, shift))
    return found


def _jumps(series: Array, false_alarms: float) -> list[Shift]:
    """Stretches above what came before [steps], the strongest first."""
    left, found = series.copy(), list[Shift]()
    for _ in range(MOST_JUMPS):
        residuals = Residuals.of_steps((left - np.nanmedian(left))[:, None])
        shifts = strongest_shifts(
            residuals,
            noise_of(residuals, np.zeros(1, dtype=np.intp)),
            false_alarms=false_alarms,
            min_slowdown=MIN_SLOWDOWN,
        )
        if not shifts:
            break
        found += shifts
        left[shifts[0].first : shifts[0].end] -= shifts[0].log_slowdown
    return found


def _rise(series: Array, shift: Shift) -> float:
    inside, before = series[shift.first : shift.end], series[: shift.first]
    return float(np.nanmedian(inside) - np.nanmedian(before))


def _in_words(paces: _Paces, shift: Shift, stage: int | None) -> str:
    own = np.ones(len(paces.stage), dtype=np.bool_) if stage is None else paces.stage == stage
    logs = np.log(paces.compute[:, own])
    rises = column_medians(logs[shift.first : shift.end]) - column_medians(logs[: shift.first])
    slow = int((rises > 0.5 * shift.log_slowdown).sum())
    where = "" if stage is None else f" of stage {stage}"
    first, last = (int(paces.steps[at]) for at in (shift.first, shift.end - 1))
    return (
        f"{slow} of {int(own.sum())} ranks{where} together computed x{exp(shift.log_slowdown):.3f} "
        f"of their time from step {first} to {last}, after {shift.num_before} steps at their pace"
    )


def _anomaly(paces: _Paces, shift: Shift, stage: int | None, words: str, last_step: int) -> Anomaly:
    value, low, high = ratio_interval(shift.log_slowdown, shift.error)
    last = int(paces.steps[shift.end - 1])
    why = "their tokens do not explain it" if stage is None else "the other stages did not"
    return Anomaly(
        kind=AnomalyKind.HOST,
        rank=None,
        stage=stage,
        slowdown=value,
        low=low,
        high=high,
        first_step=int(paces.steps[shift.first]),
        last_step=None if last == last_step else last,
        tier=Tier.PROBABLE,
        reason=f"{words}; {why}: host, power, fabric or code, no rank's device",
    )
