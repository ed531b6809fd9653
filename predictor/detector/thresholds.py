"""Thresholds of the charts, from the false alarms per job-day that were asked for. Pure.

Set at each fit of the cost model. At first from the normal law, higher for charts of small shifts
as healthy ranks of real jobs ask for; then from how far the charts of the job's own healthy ranks
rose (excursions.py). Sigma is known the less the fewer steps it was measured on, so the charts
count it larger (Student's t); since no rate per day leaves a new job any power then, its first
steps have an allowance of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import exp, log, sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, StepSample
from pacekeeper.predictor.cost.model import split_at_onset
from pacekeeper.predictor.detector.excursions import EDGE_RATIO, Excursions, height
from pacekeeper.predictor.stats.cusum_design import (
    CLIPS,
    DAY_S,
    MOST_SAMPLES,
    REFERENCES,
    ChartRule,
    gaussian,
    samples_between_alarms,
    threshold,
)

LEAST_SAMPLES = 1e3  # between alarms, however many were asked for
RATE_GRID = 8  # thresholds are made for a rate rounded up to e^(1/8): few different ones
ONE_SAMPLE = 0.9  # of a threshold, at most: one wild sample never crosses
START_STEPS = 32  # the first of a job, which may raise as many false alarms as this part of a day
START_DAYS = 0.1
QUARTILE_EFFICIENCY = 0.6  # a scale by quartiles, in observations of a standard deviation
LEAST_FREEDOM = 2.0
# Thresholds of the charts on the residuals of a healthy MoE job (SmartMoE, 64 ranks), which have
# wild samples and come in bouts: times those of independent normal residuals, and beyond these.
BOUTS = ((2.5, 0.0), (2.5, 0.0), (3.0, 0.0), (1.0, 3.0))
OTHERS_STRENGTH = 16.0  # degrees of freedom that the noise of a job's other roles counts for
TRUSTED_SAMPLES, TRUSTED_FOLDS = 20_000, 256  # from which a job's own excursions count as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The rules of the charts, one for each of REFERENCES.

    Attributes:
        weight: of a standardised residual, below 1 where sigma is known from few steps.
        between: samples of a rank between two of its false alarms.
    """

    rules: tuple[ChartRule, ...]
    weight: float = 1.0
    between: float = LEAST_SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """One sigma of a step's log ratio, and the degrees of freedom it was measured with."""

    sigma: float
    freedom: float


def measured_noise(sigma: float, residuals: Array) -> StepNoise:
    """The noise of these residuals [steps, ranks], NaN where there is none; as known as that is."""
    changes = (np.diff(part, axis=0) for part in split_at_onset(residuals))
    num_changes = float(sum(np.isfinite(change).sum() for change in changes))
    return StepNoise(sigma=sigma, freedom=max(LEAST_FREEDOM, QUARTILE_EFFICIENCY * num_changes))


def mixed(own: StepNoise, others: Sequence[StepNoise]) -> StepNoise:
    """Combine a role's noise with that of the job's other roles, which run on the same devices.

    The median of theirs, weighted by how well each is known, is a prior of at most OTHERS_STRENGTH
    degrees of freedom: a single role may be noisier than its devices (a first stage that loads
    data).
    """
    freedom = sum(noise.freedom for noise in others)
    if not freedom:
        return own
    by_sigma = sorted(others, key=lambda noise: noise.sigma)
    below = accumulate(noise.freedom for noise in by_sigma)
    middle = next(noise for noise, sum_ in zip(by_sigma, below, strict=True) if 2 * sum_ > freedom)
    common = middle.sigma**2
    strength = min(freedom, OTHERS_STRENGTH)
    variance = (own.freedom * own.sigma**2 + strength * common) / (own.freedom + strength)
    return StepNoise(sigma=sqrt(variance), freedom=own.freedom + strength)


def weighted(limits: Thresholds, noise: StepNoise) -> Thresholds:
    """The thresholds where the noise is known as well as this."""
    return replace(limits, weight=1.0 / _inflation(limits.between, noise.freedom))


def thresholds(
    false_alarms_per_job_day: float,
    samples: Sequence[StepSample],
    *,
    noise: StepNoise,
    excursions: Excursions,
    parts_per_step: int = 1,
) -> Thresholds:
    """Return the thresholds for the job of these quiet steps.

    A step takes at least the computing of its slowest rank: that errs to too few alarms.

    Args:
        false_alarms_per_job_day: the rate asked for.
        samples: the steps that the cost model was fitted to.
        noise: of a step.
        excursions: of the job's healthy ranks so far.
        parts_per_step: micro-batches that are folded in each step.
    """
    step_s = float(np.median([sample.observed_s.max() for sample in samples]))
    # A large job learns from fewer steps than it has shown.
    if max(len(samples), excursions.num_folds // parts_per_step) < START_STEPS:
        step_s = max(step_s, START_DAYS * DAY_S / START_STEPS)
    between = samples_between_alarms(
        false_alarms_per_job_day,
        num_ranks=max(len(sample.ranks) for sample in samples),
        samples_per_rank_s=parts_per_step / max(step_s, 1e-6),
    )
    between = min(max(between, LEAST_SAMPLES), MOST_SAMPLES / (2.0 * len(REFERENCES)))
    between = exp(np.ceil(log(between) * RATE_GRID) / RATE_GRID)
    rules = chart_rules(between, excursions)
    return weighted(Thresholds(rules=rules, between=between), noise)


def _inflation(between: float, freedom: float) -> float:
    """By how much a sigma of so many degrees of freedom has to count larger: Student's t over the
    normal law at the chance of one sample.
    """
    from scipy.special import ndtri, stdtrit  # slow to import: not at start-up

    return float(stdtrit(freedom, 1.0 / between) / ndtri(1.0 / between))


def trust(excursions: Excursions, trusted_samples: int = TRUSTED_SAMPLES) -> float:
    """How far a job's own excursions count, 0 to 1: half where it has shown `trusted_samples`."""
    seen = min(
        excursions.num_samples / trusted_samples,
        excursions.num_folds / TRUSTED_FOLDS,  # a long excursion takes its time
    )
    return seen**2 / (1.0 + seen**2)


def chart_rules(
    between: float, excursions: Excursions, trusted_samples: int = TRUSTED_SAMPLES
) -> tuple[ChartRule, ...]:
    """The charts that together raise one false alarm in `between` samples of a healthy rank.

    A chart that is as high as one sample rises has next to no alarms: its part goes to the others.
    """
    rules = _raised_rules(between, excursions, trusted_samples)
    num_free = sum(rule.h > EDGE_RATIO * _one_sample_height(rule) for rule in rules)
    if 0 < num_free < len(rules):
        between *= num_free / len(rules)
        return _raised_rules(between, excursions, trusted_samples)
    return rules


def _raised_rules(
    between: float, excursions: Excursions, trusted_samples: int
) -> tuple[ChartRule, ...]:
    """Return the charts, an equal part of the rate each, none lower than one sample rises."""
    known = trust(excursions, trusted_samples)
    rules = []
    for chart, rule in enumerate(_prior_rules(between)):
        own = height(excursions, chart, between * len(REFERENCES))
        h = rule.h if own is None else (1.0 - known) * rule.h + known * own
        rules.append(replace(rule, h=max(h, _one_sample_height(rule))))
    return tuple(rules)


def _one_sample_height(rule: ChartRule) -> float:
    """Return the height that one sample, however wild, does not cross."""
    return (rule.clip - rule.k) / ONE_SAMPLE


@lru_cache(maxsize=64)
def _prior_rules(between: float) -> tuple[ChartRule, ...]:
    own = between * len(REFERENCES)
    return tuple(
        ChartRule(
            k=k, clip=clip, h=more + times * threshold(gaussian(), k=k, clip=clip, samples=own)
        )
        for k, clip, (times, more) in zip(REFERENCES, CLIPS, BOUTS, strict=True)
    )
