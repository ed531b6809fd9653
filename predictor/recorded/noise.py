"""Noise of healthy log ratios: from step to step, of long means, and between ranks.

Estimated from the trace itself, from differences that a lasting fault hardly affects, and shrunk
towards the pooled estimate of all ranks, or towards values of healthy GPUs, where there are few
observations.
"""

from dataclasses import dataclass, replace
from math import exp, log, log2, sqrt

import numpy as np
from scipy.special import ndtri_exp
from scipy.stats import t

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.recorded.residuals import Residuals
from pacekeeper.predictor.stats.robust import (
    MAD_TO_SIGMA,
    column_medians,
    robust_scale,
    tailed_scale,
)

LEAST_NOISE = 0.001  # of a step: lower bound of clock noise
LEAST_WANDER = 0.002  # repeated runs of healthy GPUs differ by at least sqrt(2) x this
RANK_SPREAD = 0.02  # one sigma of the paces of healthy ranks, unless the trace measures it
LEAST_SPREAD = 0.01
MEDIAN_EFFICIENCY = 0.37
QUARTILE_EFFICIENCY = 0.6
PRIOR_STRENGTH = 8.0  # weight of a pooled or assumed scale, in observations
MOST_OWN = 3.0  # times its peers' wander: more is an intermittent fault, not wander
LEAST_CHANGES = 10  # of a rank, for its own noise to be used
LEAST_LOG_CHANCE = -600.0  # a float holds e to the -700
LEAST_RANKS = 16  # needed to estimate the quartiles of their maxima
LEAST_BLOCKS = 6  # means: a single fault does not reach the median of their changes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """Noise scales of log ratios, one sigma.

    Attributes:
        fast: [ranks] of one step.
        measured: [ranks] `fast` before it was raised to the lower bound of clock noise.
        wander: [ranks] of long means.
        spread: of the levels of healthy ranks.
        freedom: degrees of freedom of the pooled estimate of the fast noise.
        stage: [ranks] ranks of one stage do the same work.
        has_peers: [ranks] whether another rank does the same work.
    """

    fast: Array
    measured: Array
    wander: Array
    spread: float
    freedom: float
    stage: Positions
    has_peers: Flags

    def of(self, ranks: Positions) -> "Noise":
        """Return the noise of these ranks only."""
        return replace(
            self,
            fast=self.fast[ranks],
            measured=self.measured[ranks],
            wander=self.wander[ranks],
            stage=self.stage[ranks],
            has_peers=self.has_peers[ranks],
        )


def noise_of(residuals: Residuals, stage: Positions) -> Noise:
    """Estimate the noise from differences, which a single lasting fault in a rank hardly affects.

    Args:
        residuals: of the trace.
        stage: [ranks].
    """
    by_step = residuals.by_step
    measured = _fast_noise(residuals)
    fast = np.maximum(measured, LEAST_NOISE)
    num_peers = np.array([int((stage == own).sum()) - 1 for own in stage])
    return Noise(
        fast=fast,
        measured=measured,
        wander=_wander(by_step, fast, stage),
        spread=_spread(by_step, stage),
        freedom=max(1.0, _freedom(residuals)),
        stage=stage,
        has_peers=num_peers > 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmLevels:
    """Alarm thresholds of a stretch of steps, in sigmas.

    `fast` applies to the fast noise, `slow` to the wander; `sure` is `fast` if the fast noise were
    known exactly.
    """

    fast: float
    slow: float
    sure: float


def thresholds(num_steps: int, num_ranks: int, false_alarms: float, freedom: float) -> AlarmLevels:
    """Return the alarm thresholds for a false-alarm budget (Bonferroni correction).

    Half of the budget is for fast noise, over all stretches and ranks; half for wander, over ranks
    and octaves of time.

    Args:
        num_steps: of the trace.
        num_ranks: of the trace, or the number of groups that can be tested.
        false_alarms: expected number per trace of a healthy job.
        freedom: degrees of freedom of the fast noise; a short trace estimates it poorly (Student's
            t).
    """
    half = log(0.5 * false_alarms) - log(num_ranks)  # groups may be more than a float holds
    per_stretch = half - log(num_steps * (num_steps + 1) / 2)
    return AlarmLevels(
        fast=_t_beyond(per_stretch, freedom),
        slow=_normal_beyond(half - log(1.0 + log2(num_steps))),
        sure=_normal_beyond(per_stretch),
    )


def _normal_beyond(log_chance: float) -> float:
    """Upper quantile of the standard normal for a tail probability given as its logarithm."""
    return float(-ndtri_exp(min(log(0.5), log_chance)))


def _t_beyond(log_chance: float, freedom: float) -> float:
    """Upper quantile of Student's t for a log tail probability; far out from the normal's (Wallace
    1959).
    """
    if log_chance > LEAST_LOG_CHANCE:
        return float(t.isf(min(0.5, exp(log_chance)), freedom))
    with np.errstate(over="ignore"):
        return float(np.sqrt(freedom * np.expm1(_normal_beyond(log_chance) ** 2 / freedom)))


def needed_strength(highest: Array, false_alarms: float) -> float:
    """Calibrate the strength that a stretch must exceed to accuse its rank; at least 1.0.

    Strength 1.0 is the threshold under normal noise. Heavy tails and bursts of noise carry healthy
    ranks further; how far is estimated from the ranks themselves. Squares of maxima have an
    exponential tail (Gumbel 1958), which is located by their quartiles and extrapolated to
    `false_alarms` over all ranks. Ranks beyond 1.0 are suspects and are left out. The normal
    threshold has the weight of PRIOR_STRENGTH ranks and remains the minimum, because quartiles do
    not reflect single outlying steps.

    Args:
        highest: [ranks] strength of each rank's strongest stretch.
        false_alarms: expected number per trace of a healthy job.
    """
    squares = highest[np.isfinite(highest) & (highest < 1.0)] ** 2
    if len(squares) < LEAST_RANKS:
        return 1.0
    low, middle, high = np.quantile(squares, (0.25, 0.5, 0.75))
    unit = (high - low) / (log(log(4.0)) - log(log(4.0 / 3.0)))
    mode = middle + unit * log(log(2.0))
    reached = mode + unit * log(len(highest) / false_alarms)
    mixed = (PRIOR_STRENGTH + len(squares) * reached) / (PRIOR_STRENGTH + len(squares))
    return sqrt(max(mixed, 1.0))


def _fast_noise(residuals: Residuals) -> Array:
    """One sigma of a rank's step: its own estimate and the pooled one, weighted by sample size."""
    changes = np.diff(residuals.by_step, axis=0)
    typical = float(_scales(changes.ravel()))
    if not np.isfinite(changes).any():  # a single step: only its micro-batches are there
        within = residuals.samples - column_medians(residuals.samples)
        typical = robust_scale(within) / sqrt(max(1.0, float(np.median(residuals.counts))))
    scatter = column_medians(np.where(residuals.errors > 0.0, residuals.errors, np.nan))
    common = np.maximum(typical, np.nan_to_num(scatter))
    weight = np.isfinite(changes).sum(axis=0)
    weight = np.where(weight >= LEAST_CHANGES, QUARTILE_EFFICIENCY * weight, 0.0)
    squares = PRIOR_STRENGTH * common**2 + weight * _scales(changes) ** 2
    mixed: Array = np.sqrt(squares / (PRIOR_STRENGTH + weight))
    return mixed


def _scales(changes: Array) -> Array:
    """One sigma of step-to-step changes, along the first axis; 0 without any."""
    return tailed_scale(np.abs(changes), 0.75) / sqrt(2.0)


def _freedom(residuals: Residuals) -> float:
    """Degrees of freedom of the pooled fast noise, from the same data as `_fast_noise`."""
    changes = np.isfinite(np.diff(residuals.by_step, axis=0)).sum()
    if changes:
        return QUARTILE_EFFICIENCY * float(changes)
    known = np.isfinite(residuals.samples)
    return MEDIAN_EFFICIENCY * float(known.sum() - known.any(axis=0).sum())


def _wander(by_step: Array, fast: Array, stage: Positions) -> Array:
    """Standard deviation of long means beyond the fast noise, over octaves (Allan 1966) [ranks]."""
    wander = np.full(by_step.shape[1], LEAST_WANDER)
    length = 2
    while LEAST_BLOCKS * length <= len(by_step):
        blocks = len(by_step) // length
        changes = np.diff(_block_means(by_step, blocks, length), axis=0)
        own = MAD_TO_SIGMA * np.nan_to_num(column_medians(np.abs(changes))) / sqrt(2.0)
        common = robust_scale(changes) / sqrt(2.0)
        own = np.minimum(own, MOST_OWN * np.maximum(_peer_medians(own, stage), LEAST_WANDER))
        count = MEDIAN_EFFICIENCY * np.isfinite(changes).sum(axis=0)
        mixed = (PRIOR_STRENGTH * common**2 + count * own**2) / (PRIOR_STRENGTH + count)
        wander = np.maximum(wander, np.sqrt(np.maximum(mixed - fast**2 / length, 0.0)))
        length *= 2
    return wander


def _peer_medians(values: Array, stage: Positions) -> Array:
    """Median of each rank's stage [ranks]; of all ranks where the stage has fewer than three."""
    medians = np.full(len(values), np.median(values))
    for own in np.unique(stage):
        at = stage == own
        if at.sum() > 2:
            medians[at] = np.median(values[at])
    return medians


def _block_means(by_step: Array, blocks: int, length: int) -> Array:
    cut = by_step[-blocks * length :].reshape(blocks, length, -1)
    count = np.isfinite(cut).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Array = np.nansum(cut, axis=1) / count
    return means


def _spread(by_step: Array, stage: Positions) -> float:
    """One sigma of the ranks' levels relative to the median of their stage."""
    levels = column_medians(by_step)
    apart = []
    for own in np.unique(stage):
        peers = levels[stage == own]
        peers = peers[np.isfinite(peers)]
        if len(peers) > 2:
            apart += [*(peers - np.median(peers))]
    measured = robust_scale(np.array(apart))
    weight = PRIOR_STRENGTH
    squared = (weight * RANK_SPREAD**2 + len(apart) * measured**2) / (weight + len(apart))
    return max(LEAST_SPREAD, sqrt(squared))
