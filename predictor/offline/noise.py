"""How much do the log ratios of healthy ranks differ: from step to step, over long, between ranks?

Measured on the trace itself, from differences that a lasting fault hardly touches, and mixed with
what everybody shows or what is known of healthy GPUs where there is little to measure. Pure.
"""

from dataclasses import dataclass, replace
from math import exp, log, log2, sqrt

import numpy as np
from scipy.special import ndtri_exp
from scipy.stats import norm, t

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.offline.residuals import Residuals
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA, column_medians, robust_scale

LEAST_NOISE = 0.001  # of a step: no clock is better
LEAST_WANDER = 0.002  # repeated runs of healthy GPUs differ by sqrt(2) x this and more
RANK_SPREAD = 0.02  # one sigma of the paces of healthy ranks, where the trace tells no better
LEAST_SPREAD = 0.01
# A scale by that quantile of absolute values: as precise as a standard deviation of so many fewer.
MEDIAN_EFFICIENCY = 0.37
QUARTILE_EFFICIENCY = 0.6
PRIOR_STRENGTH = 8.0  # as many observations as a common or assumed scale counts for
MOST_OWN = 3.0  # times its peers' wander: what comes and goes is a fault, not wander
LEAST_CHANGES = 10  # of a rank, for its own noise to count
LEAST_LOG_CHANCE = -600.0  # a float holds e to the -700
LEAST_RANKS = 16  # whose maxima have quartiles to speak of
LEAST_BLOCKS = 6  # means whose middle change no single fault can reach


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """Scales of log ratios [ranks]: `fast` of one step, `wander` of long means, `spread` of ranks.

    `measured`: `fast` before it was raised to what no clock betters.
    `freedom`: degrees of, in what everybody's steps tell of the fast noise. Ranks of one `stage` do
    the same work; `has_peers` [ranks]: somebody else does.
    """

    fast: Array
    measured: Array
    wander: Array
    spread: float
    freedom: float
    stage: Positions
    has_peers: Flags

    def of(self, ranks: Positions) -> "Noise":
        """Of these ranks only."""
        return replace(
            self,
            fast=self.fast[ranks],
            measured=self.measured[ranks],
            wander=self.wander[ranks],
            stage=self.stage[ranks],
            has_peers=self.has_peers[ranks],
        )


def noise_of(residuals: Residuals, stage: Positions) -> Noise:
    """Measured from differences, which a single lasting fault in a rank hardly touches."""
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
    """That a stretch's `fast` noise and `slow` wander must exceed; `sure`: `fast`, were the noise
    well known."""

    fast: float
    slow: float
    sure: float


def thresholds(num_steps: int, num_ranks: int, false_alarms: float, freedom: float) -> AlarmLevels:
    """Half of the false alarms each: over all stretches; over ranks and octaves of time.

    num_ranks: or of groups that may be looked at, as many as there can be; freedom: of the fast
    noise, which a short trace tells badly (Student's t). Bonferroni.
    """
    half = log(0.5 * false_alarms) - log(num_ranks)  # groups may be more than a float holds
    per_stretch = half - log(num_steps * (num_steps + 1) / 2)
    return AlarmLevels(
        fast=_t_beyond(per_stretch, freedom),
        slow=_normal_beyond(half - log(1.0 + log2(num_steps))),
        sure=_normal_beyond(per_stretch),
    )


def _normal_beyond(log_chance: float) -> float:
    """What a standard normal exceeds with this chance, given as its logarithm."""
    return float(-ndtri_exp(min(log(0.5), log_chance)))


def _t_beyond(log_chance: float, freedom: float) -> float:
    """The same of Student's t; of chances that no float holds by its normal twin (Wallace 1959)."""
    if log_chance > LEAST_LOG_CHANCE:
        return float(t.isf(min(0.5, exp(log_chance)), freedom))
    with np.errstate(over="ignore"):
        return float(np.sqrt(freedom * np.expm1(_normal_beyond(log_chance) ** 2 / freedom)))


def needed_strength(highest: Array, false_alarms: float) -> float:
    """What a stretch must exceed to accuse its rank, in the strength that normal noise asks for.

    highest [ranks]: of each rank's strongest stretch. Heavy tails and noise that comes in bouts
    bring healthy ranks further than the normal law says; how far is seen on the ranks themselves.
    Squares of maxima have an exponential tail (Gumbel 1958), placed by their quartiles and followed
    to `false_alarms` of all ranks together. Ranks beyond 1.0 are suspects and tell nothing; the
    normal law counts for as much as PRIOR_STRENGTH ranks, and less than it never suffices: the
    quartiles know nothing of single wild steps.
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
    """One sigma of a rank's step: its own and everybody's, weighted by how much each is based on.

    By the middle of the changes between steps and by their tail: shared hosts have heavy ones.
    """
    changes = np.diff(residuals.by_step, axis=0)
    typical = _scale_of_changes(changes)
    if not np.isfinite(changes).any():  # a single step: its micro-batches have to do
        within = residuals.samples - column_medians(residuals.samples)
        typical = robust_scale(within) / sqrt(max(1.0, float(np.median(residuals.counts))))
    common = np.maximum(typical, _scatter(residuals))
    own = _scales_of_changes(changes)
    weight = np.isfinite(changes).sum(axis=0)
    weight = np.where(weight >= LEAST_CHANGES, QUARTILE_EFFICIENCY * weight, 0.0)
    mixed: Array = np.sqrt(
        (PRIOR_STRENGTH * common**2 + weight * own**2) / (PRIOR_STRENGTH + weight)
    )
    return mixed


def _freedom(residuals: Residuals) -> float:
    """Degrees of it in what all ranks tell of the fast noise, from where `_fast_noise` has it."""
    changes = np.isfinite(np.diff(residuals.by_step, axis=0)).sum()
    if changes:
        return QUARTILE_EFFICIENCY * float(changes)
    told = np.isfinite(residuals.samples)
    return MEDIAN_EFFICIENCY * float(told.sum() - told.any(axis=0).sum())


def _scatter(residuals: Residuals) -> Array:
    """One sigma of a step by how far a rank's micro-batches are apart [ranks]; 0: not told."""
    scatter = column_medians(np.where(residuals.errors > 0.0, residuals.errors, np.nan))
    known: Array = np.nan_to_num(scatter, nan=0.0)
    return known


def _scale_of_changes(changes: Array) -> float:
    changes = np.abs(changes[np.isfinite(changes)]) / sqrt(2.0)
    if not len(changes):
        return 0.0
    return max(
        float(np.quantile(changes, share)) / float(norm.isf(0.5 - 0.5 * share))
        for share in (0.5, 0.75)
    )


def _scales_of_changes(changes: Array) -> Array:
    """`_scale_of_changes` of each column; at once where nothing is missing."""
    if not changes.size or not np.isfinite(changes).all():
        return np.array([_scale_of_changes(column) for column in changes.T])
    shares = np.array([0.5, 0.75])
    reached = np.quantile(np.abs(changes) / sqrt(2.0), shares, axis=0)
    scales: Array = (reached / norm.isf(0.5 - 0.5 * shares)[:, None]).max(axis=0)
    return scales


def _wander(by_step: Array, fast: Array, stage: Positions) -> Array:
    """What means over many steps still differ by, beyond the fast noise (Allan 1966)."""
    wander = np.full(by_step.shape[1], LEAST_WANDER)
    length = 2
    while LEAST_BLOCKS * length <= len(by_step):
        blocks = len(by_step) // length
        changes = np.diff(_block_means(by_step, blocks, length), axis=0)
        own = MAD_TO_SIGMA * np.nan_to_num(column_medians(np.abs(changes))) / sqrt(2.0)
        common = robust_scale(changes) / sqrt(2.0)
        own = np.minimum(own, MOST_OWN * np.maximum(_of_peers(own, stage), LEAST_WANDER))
        count = MEDIAN_EFFICIENCY * np.isfinite(changes).sum(axis=0)
        mixed = (PRIOR_STRENGTH * common**2 + count * own**2) / (PRIOR_STRENGTH + count)
        wander = np.maximum(wander, np.sqrt(np.maximum(mixed - fast**2 / length, 0.0)))
        length *= 2
    return wander


def _of_peers(values: Array, stage: Positions) -> Array:
    """Of each rank the median of its stage; of all where a stage has too few to have a middle."""
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
    """One sigma of the ranks' levels beside their peers'."""
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
