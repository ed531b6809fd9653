"""CUSUM thresholds for a given false-alarm rate, for residuals of any distribution.

A chart accumulates `min(x, clip) - k`, bounded below by zero, and alarms above `h`. Its mean run
length is computed as a Markov chain on cells of [0, h] (Brook and Evans 1972): under the healthy
distribution it is the mean number of samples between false alarms, under the shifted one it is the
detection delay. Several charts share one budget: each gets a part of the rate, and the sum bounds
the rate of all charts together.
"""

from dataclasses import dataclass
from functools import cache
from math import inf, sqrt

import numpy as np
import numpy.typing as npt

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA

DAY_S = 86_400.0
CELLS = 160  # of [0, h]: run lengths within 1 % of those of the integral equation
MOST_SAMPLES = 1e12  # between false alarms: limit of the linear system in double precision
# Allowances k: half of the shift that a chart is designed for, in sigma. CLIPS: limit of one
# sample in that chart.
REFERENCES = (0.5, 1.25, 2.25, 4.5)
CLIPS = (3.0, 4.0, 5.5, 8.0)
AUTOCORRELATION_CLIP = 3.0  # sigma: limits the influence of one outlying pair
WHITEN_ABOVE = 0.1  # autocorrelation that changes a rate by more than a factor of two


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResidualDistribution:
    """Distribution of healthy residuals in sigma: a fraction `below[i]` is at most `at[i]`.

    Both arrays ascend.
    """

    at: Array
    below: Array

    def share_below(self, x: npt.NDArray[np.floating]) -> Array:
        """Cumulative distribution at x, linear between the points."""
        share: Array = np.interp(x, self.at, self.below, left=0.0, right=1.0)
        return share


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartRule:
    """One chart: its allowance `k`, its `clip` and its threshold `h`, in sigma."""

    k: float
    clip: float
    h: float


@cache
def gaussian() -> ResidualDistribution:
    """The standard normal distribution."""
    at = np.linspace(-9.0, 9.0, 7201)
    from scipy.special import ndtr  # a quarter second to import: not at start-up

    below = ndtr(at)
    at.flags.writeable = below.flags.writeable = False
    return ResidualDistribution(at=at, below=below)


def samples_between_alarms(
    false_alarms_per_job_day: float, *, num_ranks: int, samples_per_rank_s: float
) -> float:
    """Mean samples of one rank between two of its false alarms, for a false-alarm rate of the job.

    A job with twice the ranks, or twice the samples per second, gets half the rate per sample.

    Raises:
        ValueError: an argument is not above 0.
    """
    if not (false_alarms_per_job_day > 0 and num_ranks > 0 and samples_per_rank_s > 0):
        raise ValueError("rate of false alarms, ranks and samples per second: expected above 0")
    return num_ranks * samples_per_rank_s * DAY_S / false_alarms_per_job_day


def mean_run_length(law: ResidualDistribution, *, k: float, clip: float, h: float) -> float:
    """Mean samples until a chart that starts at zero alarms; inf if it practically never does.

    Under a shifted distribution this is Lorden's worst-case delay, because a chart is never below
    zero.

    Args:
        law: distribution of the residuals.
        k: allowance, in sigma.
        clip: upper limit of one residual, in sigma.
        h: threshold, in sigma.
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
    # Cells above zero form a Toeplitz system, coupled through the state at zero.
    solved = solve_toeplitz((here - down, here - up), np.stack([np.ones(CELLS), to_zero], axis=1))
    length_above, back_to_zero = solved.T
    rise = np.diff(from_zero)
    leaves = 1.0 - float(from_zero[0]) - float(rise @ back_to_zero)
    if leaves <= 0.0:
        return inf
    length = (1.0 + float(rise @ length_above)) / leaves
    return length if 0.0 < length < MOST_SAMPLES**1.2 else inf


def threshold(law: ResidualDistribution, *, k: float, clip: float, samples: float) -> float:
    """Return the threshold h of a chart with a mean of `samples` between two false alarms.

    Args:
        law: distribution of healthy residuals.
        k: allowance, in sigma.
        clip: upper limit of one residual, in sigma.
        samples: mean number between false alarms.

    Raises:
        ValueError: the clip is not above k (such a chart stays at zero), or samples is outside 2 to
            MOST_SAMPLES.
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
    """Lag-1 autocorrelation of residuals [samples, ranks], NaN where missing.

    Computed from residuals about their median, clipped; limited to +-0.9; 0.0 with fewer than ten
    pairs.
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
    """Return the rest of a shift, in sigma, after removing AR(1) correlation from the residuals.

    sqrt((1 - r) / (1 + r)) of it, from the second slow sample on.
    """
    return shift * sqrt((1.0 - correlation) / (1.0 + correlation))
