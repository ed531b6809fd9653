"""The live charts' thresholds, from the false alarms per job-day that were asked for. Pure.

Set at each fit of the cost model: how many ranks, how long a step, how residuals lie. What is asked
for bounds what the charts raise where residuals lie as assumed (too few of them: normally); the
rules of slowdown.py then only take findings away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log, sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, StepSample
from pacekeeper.predictor.stats.cusum_design import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The rules of the charts; `weight`: of a standardised residual, below 1 where the next one
    repeats a part of it (autocorrelation)."""

    rules: tuple[ChartRule, ...]
    weight: float = 1.0


def thresholds(
    false_alarms_per_job_day: float,
    samples: Sequence[StepSample],
    *,
    sigma: float,
    residuals: Array,
    parts: Array | None = None,
    parts_per_step: int = 1,
) -> Thresholds:
    """Thresholds for the job these quiet steps are of.

    `residuals` [steps, ranks]: recent log ratios of ranks without a finding, NaN where there is
    none; long enough a table of them says their autocorrelation. `parts` [micro-batches, ranks]:
    the same of micro-batches, where `parts_per_step` of them are folded in each step; those say
    the law where its tail is heavier than a normal one; else, and where they are few, it is normal.
    A step takes at least the computing of its slowest rank: that errs to too few alarms.
    """
    step_s = float(np.median([sample.observed_s.max() for sample in samples]))
    between = samples_between_alarms(
        false_alarms_per_job_day,
        num_ranks=max(len(sample.ranks) for sample in samples),
        samples_per_rank_s=parts_per_step / max(step_s, 1e-6),
    )
    between = min(max(between, LEAST_SAMPLES), MOST_SAMPLES / (2.0 * len(REFERENCES)))
    between = exp(np.ceil(log(between) * RATE_GRID) / RATE_GRID)
    folded = residuals if parts is None else parts / sqrt(parts_per_step)
    if np.isfinite(folded).sum() < LEAST_HISTORY:
        return Thresholds(rules=_normal_rules(between))
    repeated = autocorrelation(residuals)
    weight = whitened_shift(1.0, repeated) if repeated > WHITEN_ABOVE else 1.0
    law = empirical(weight / sigma * folded.ravel())
    if not has_heavy_tail(law):  # the formula knows the tail that few samples do not show
        return Thresholds(rules=_normal_rules(between), weight=weight)
    return Thresholds(rules=_guarded(chart_rules(law, samples=between)), weight=weight)


@lru_cache(maxsize=64)
def _normal_rules(samples: float) -> tuple[ChartRule, ...]:
    return _guarded(chart_rules(gaussian(), samples=samples))


def _guarded(rules: tuple[ChartRule, ...]) -> tuple[ChartRule, ...]:
    return tuple(replace(r, clip=min(r.clip, r.k + ONE_SAMPLE * r.h)) for r in rules)
