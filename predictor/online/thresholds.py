"""The live charts' thresholds, from the false alarms per job-day that were asked for. Pure.

Set at each fit of the cost model: how many ranks, how long a step, how residuals lie. What is asked
for bounds what the charts raise where residuals lie as assumed (too few of them: normally). Sigma
is known the less the fewer steps it was measured on, so the charts count it larger (Student's t);
since no rate per day leaves a new job any power then, its first steps have an allowance of their
own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log, sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, StepSample
from pacekeeper.predictor.stats.cusum_design import (
    DAY_S,
    LEAST_HISTORY,
    MOST_SAMPLES,
    REFERENCES,
    WHITEN_ABOVE,
    ChartRule,
    autocorrelation,
    chart_rules,
    empirical,
    gaussian,
    has_heavy_tail,
    samples_between_alarms,
    whitened_shift,
)

LEAST_SAMPLES = 1e3  # between alarms, however many were asked for
RATE_GRID = 8  # thresholds are made for a rate rounded up to e^(1/8): few different ones
ONE_SAMPLE = 0.9  # of a threshold, at most: one wild sample never crosses
START_STEPS = 32  # the first of a job, which may raise as many false alarms as this part of a day
START_DAYS = 0.1
QUARTILE_EFFICIENCY = 0.6  # a scale by quartiles, in observations of a standard deviation
LEAST_FREEDOM = 2.0
MOST_LASTING = log(1.10)
LASTING_SIGMAS = 5.0  # what nothing explains comes in bouts: 6 % for ten steps where sigma is 1.3 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The rules of the charts.

    Attributes:
        rules: one for each of REFERENCES.
        weight: of a standardised residual, below 1 where the next one repeats a part of it
            (autocorrelation), and where sigma is known from few steps.
        least: smallest log slowdown that is told from noise that lasts.
    """

    rules: tuple[ChartRule, ...]
    weight: float = 1.0
    least: float = 0.0


def thresholds(
    false_alarms_per_job_day: float,
    samples: Sequence[StepSample],
    *,
    sigma: float,
    residuals: Array,
    parts: Array | None = None,
    parts_per_step: int = 1,
) -> Thresholds:
    """Return the thresholds for the job of these quiet steps.

    A step takes at least the computing of its slowest rank: that errs to too few alarms.

    Args:
        false_alarms_per_job_day: the rate asked for.
        samples: the steps that the cost model was fitted to.
        sigma: one sigma of a step's log ratio.
        residuals: log ratios of these steps [steps, ranks], NaN where there is none: how well sigma
            is known, how much one repeats the last, and the law of their tail.
        parts: the same of recent micro-batches [micro-batches, ranks], in place of the law.
        parts_per_step: micro-batches that are folded in each step.
    """
    step_s = float(np.median([sample.observed_s.max() for sample in samples]))
    if len(samples) < START_STEPS:
        step_s = max(step_s, START_DAYS * DAY_S / START_STEPS)
    between = samples_between_alarms(
        false_alarms_per_job_day,
        num_ranks=max(len(sample.ranks) for sample in samples),
        samples_per_rank_s=parts_per_step / max(step_s, 1e-6),
    )
    between = min(max(between, LEAST_SAMPLES), MOST_SAMPLES / (2.0 * len(REFERENCES)))
    between = exp(np.ceil(log(between) * RATE_GRID) / RATE_GRID)
    known = 1.0 / _inflation(between, residuals)
    least = min(LASTING_SIGMAS * sigma, MOST_LASTING)
    folded = residuals if parts is None else parts / sqrt(parts_per_step)
    if np.isfinite(folded).sum() < LEAST_HISTORY:
        return Thresholds(rules=_normal_rules(between), weight=known, least=least)
    repeated = autocorrelation(residuals)
    weight = known * (whitened_shift(1.0, repeated) if repeated > WHITEN_ABOVE else 1.0)
    law = empirical(weight / sigma * folded.ravel())
    rules = _normal_rules(between)
    if has_heavy_tail(law):  # else the formula knows the tail that few samples do not show
        rules = _guarded(chart_rules(law, samples=between))
    return Thresholds(rules=rules, weight=weight, least=least)


def _inflation(between: float, residuals: Array) -> float:
    """By how much a sigma measured on these residuals has to count larger: Student's t over the
    normal law at the chance of one sample.
    """
    from scipy.special import ndtri, stdtrit  # slow to import: not at start-up

    num_changes = float(np.isfinite(np.diff(residuals, axis=0)).sum())
    freedom = max(LEAST_FREEDOM, QUARTILE_EFFICIENCY * num_changes)
    return float(stdtrit(freedom, 1.0 / between) / ndtri(1.0 / between))


@lru_cache(maxsize=64)
def _normal_rules(samples: float) -> tuple[ChartRule, ...]:
    return _guarded(chart_rules(gaussian(), samples=samples))


def _guarded(rules: tuple[ChartRule, ...]) -> tuple[ChartRule, ...]:
    return tuple(replace(r, clip=min(r.clip, r.k + ONE_SAMPLE * r.h)) for r in rules)
