"""Thresholds of CUSUM charts from a wanted rate of false alarms, for residuals of any law. Pure.

A chart adds up `min(x, clip) - k`, never below zero, and alarms above `h`. Its mean run length is
solved as a Markov chain on cells of [0, h] (Brook and Evans 1972): under the healthy law that is
the mean number of samples between false alarms, under the shifted law it is the delay. Several
charts share one budget: each gets its part of the rate, and the sum bounds what all of them raise.
"""

from dataclasses import dataclass
from functools import cache
from math import inf, sqrt

import numpy as np
import numpy.typing as npt

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA

DAY_S = 86_400.0
CELLS = 160  # of [0, h]: run lengths within 1 % of the integral equation's
MOST_SAMPLES = 1e12  # between false alarms: the linear system says no more in double precision
# Half of the shifts to be found soon, in sigma, and what one sample may add to that chart.
REFERENCES = (0.5, 1.25, 2.25, 4.5)
CLIPS = (3.0, 4.0, 5.5, 8.0)
AUTOCORRELATION_CLIP = 3.0  # sigma: one wild pair must not make an autocorrelation
WHITEN_ABOVE = 0.1  # autocorrelation that moves a rate by more than a factor of two


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResidualDistribution:
    """How healthy residuals lie, in sigma: `below[i]` of them are at most `at[i]`, ascending."""

    at: Array
    below: Array

    def share_below(self, x: npt.NDArray[np.floating]) -> Array:
        """Of residuals that are at most x; linear between the points."""
        share: Array = np.interp(x, self.at, self.below, left=0.0, right=1.0)
        return share

    def shifted(self, sigmas: float) -> "ResidualDistribution":
        """The law of a rank that is slow by so many sigma."""
        return ResidualDistribution(at=self.at + sigmas, below=self.below)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartRule:
    """One chart: its allowance `k`, its `clip` and its threshold `h`, in sigma."""

    k: float
    clip: float
    h: float


@cache
def gaussian() -> ResidualDistribution:
    """The standard normal law."""
    at = np.linspace(-9.0, 9.0, 7201)
    from scipy.special import ndtr  # a quarter second to import: not at start-up

    below = ndtr(at)
    at.flags.writeable = below.flags.writeable = False
    return ResidualDistribution(at=at, below=below)


def samples_between_alarms(
    false_alarms_per_job_day: float, *, num_ranks: int, samples_per_rank_s: float
) -> float:
    """Mean samples of one rank between two of its false alarms, so that the job has so many a day.

    A job of twice the ranks, or twice the samples a second, may raise half as many on each sample.
    Raises ValueError where a value is not above 0.
    """
    if not (false_alarms_per_job_day > 0 and num_ranks > 0 and samples_per_rank_s > 0):
        raise ValueError("rate of false alarms, ranks and samples per second: expected above 0")
    return num_ranks * samples_per_rank_s * DAY_S / false_alarms_per_job_day


def mean_run_length(law: ResidualDistribution, *, k: float, clip: float, h: float) -> float:
    """Mean samples until a chart that starts at zero alarms; inf where it practically never does.

    Under a shifted law this is Lorden's worst-case delay: a chart is never lower than zero.
    """
    from scipy.linalg import solve_toeplitz

    width = h / CELLS
    # A step from the middle of cell i to the upper edge of cell j depends on j - i only.
    offsets = (np.arange(-CELLS, CELLS + 1) + 0.5) * width + k
    between = np.where(offsets >= clip, 1.0, law.share_below(offsets))
    from_zero_at = np.arange(CELLS + 1) * width + k
    from_zero = np.where(from_zero_at >= clip, 1.0, law.share_below(from_zero_at))
    to_zero = between[CELLS - 1 :: -1]
    steps = np.diff(between)  # probability of going up by so many cells, -CELLS + 1 to CELLS
    up, down = steps[CELLS - 1 : -1], steps[CELLS - 1 :: -1][:CELLS]
    here = np.zeros(CELLS)
    here[0] = 1.0
    # Cells above zero are a Toeplitz system; the state at zero is what couples it.
    solved = solve_toeplitz((here - down, here - up), np.stack([np.ones(CELLS), to_zero], axis=1))
    length_above, back_to_zero = solved.T
    rise = np.diff(from_zero)
    leaves = 1.0 - float(from_zero[0]) - float(rise @ back_to_zero)
    if leaves <= 0.0:
        return inf
    length = (1.0 + float(rise @ length_above)) / leaves
    return length if 0.0 < length < MOST_SAMPLES**1.2 else inf


def threshold(law: ResidualDistribution, *, k: float, clip: float, samples: float) -> float:
    """The h at which a chart has `samples` between two false alarms in the mean.

    Raises ValueError for a clip that is not above k (such a chart stays at zero), and for samples
    outside 2 to MOST_SAMPLES.
    """
    if not clip > k:
        raise ValueError(f"clip: expected above k = {k}, got {clip}")
    if not 2.0 <= samples <= MOST_SAMPLES:
        raise ValueError(f"samples: expected 2 to {MOST_SAMPLES:g}, got {samples:g}")
    low, high = 0.0, 1.0
    while mean_run_length(law, k=k, clip=clip, h=high) < samples:
        low, high = high, 2.0 * high
    while high - low > 1e-4 * max(1.0, high):
        middle = 0.5 * (low + high)
        if mean_run_length(law, k=k, clip=clip, h=middle) < samples:
            low = middle
        else:
            high = middle
    return high


def autocorrelation(residuals: Array) -> float:
    """Of one sample with the next of the same rank: [samples, ranks], NaN where there is none.

    Of clipped residuals about their median; within -0.9 and 0.9; 0.0 of less than ten pairs.
    """
    centred = residuals - np.nanmedian(residuals)
    scale = float(np.nanmedian(np.abs(centred))) * MAD_TO_SIGMA
    if not scale > 0.0:
        return 0.0
    limit = AUTOCORRELATION_CLIP * scale
    clipped = np.clip(centred, -limit, limit)
    first, second = clipped[:-1], clipped[1:]
    both = np.isfinite(first) & np.isfinite(second)
    if both.sum() < 10:
        return 0.0
    spread = sqrt(float((first[both] ** 2).mean() * (second[both] ** 2).mean()))
    return max(-0.9, min(0.9, float((first[both] * second[both]).mean()) / spread))


def whitened_shift(shift: float, correlation: float) -> float:
    """What is left of a shift, in sigma, once an AR(1) correlation was taken out of the residuals.

    Of the second slow sample and all later ones: sqrt((1 - r) / (1 + r)) of it.
    """
    return shift * sqrt((1.0 - correlation) / (1.0 + correlation))
