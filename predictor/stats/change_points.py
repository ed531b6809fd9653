"""A noisy series as constant levels: where it changed and by how much. Pure; knows no cause."""

from dataclasses import dataclass
from math import inf, pi, sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA

SPIKE_WINDOW = 21  # neighbours a single value is compared with
SPIKE_SIGMAS = 4.0
SPIKE_FLOOR = 0.02  # of the value: nearer than this is no spike
PATTERN = 5  # neighbours that stick out as far: it is a pace that the series keeps, no spike
LONGEST_LEVEL = 2048  # blocks; a longer one is cut in pieces, to bound the work
PATIENT_BLOCKS = 4  # noise that lasts is measured over so many blocks together
LEAST_FOR_TWO = 3 * PATIENT_BLOCKS  # blocks that two levels are told apart in
TWO_LEVELS_LEAVE = sqrt(1.0 - 2.0 / pi)  # of the sigma of a normal distribution (Lloyd-Max)
# Lasting noise of a random walk over that of its differences. What exceeds it has edges.
WALK = sqrt((2.0 * PATIENT_BLOCKS**2 + 1.0) / 3.0)
# Which quantile of absolute differences tells the noise, and how many sigmas it has of a normal
# distribution. Where a fault comes and goes every few blocks, it is in most of the differences.
MIDDLE = (0.5, 1.0 / MAD_TO_SIGMA)
SMALLER_THIRD = (1.0 / 3.0, 0.4307)
FURTHEST = 2.5  # sigmas


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Blocks [begin, end) of a series, with their mean."""

    begin: int
    end: int
    mean: float

    @property
    def num_blocks(self) -> int:
        return self.end - self.begin


def without_spikes(values: Array, *, resolution: float | Array) -> Array:
    """The values, each drawn to its neighbours as far as it sticks out alone (Hampel, clipped).

    An edge between two levels stays where it is, and so do levels of a few values that come and go.
    What the clock's resolution explains is left alone: clipping it would lose the part of a unit
    that an average regains. Beyond its ends the series is mirrored. Positive values.
    """
    from scipy.ndimage import median_filter, rank_filter  # slow to import: not at start-up

    if values.size == 0:
        return values
    window = min(SPIKE_WINDOW, values.size)
    middle: Array = median_filter(values, size=window, mode="mirror")
    spread = MAD_TO_SIGMA * median_filter(np.abs(values - middle), size=window, mode="mirror")
    reach = np.maximum(np.maximum(SPIKE_SIGMAS * spread, SPIKE_FLOOR * middle), 1.5 * resolution)
    alike = min(PATTERN, window)
    low: Array = rank_filter(values, alike - 1, size=window, mode="mirror")
    high: Array = rank_filter(values, -alike, size=window, mode="mirror")
    clipped: Array = np.clip(
        values, np.minimum(low, middle - reach), np.maximum(high, middle + reach)
    )
    return clipped


def block_starts(num_values: int, size: int) -> Positions:
    """First index of each block of `size` values; what is left over joins the last block."""
    return np.arange(max(num_values // size, 1)) * size


def block_means(values: Array, size: int) -> Array:
    """Means of consecutive blocks; NaN where a block holds none. Values may be NaN."""
    known = np.isfinite(values)
    if values.size == 0:
        return values
    starts = block_starts(values.size, size)
    total = np.add.reduceat(np.where(known, values, 0.0), starts)
    count = np.add.reduceat(known.astype(np.float64), starts)
    means: Array = np.where(count > 0, total / np.maximum(count, 1.0), np.nan)
    return means


def noise(
    values: Array, lasting: float | None = None, *, quantile: tuple[float, float] = MIDDLE
) -> float:
    """Sigma of one block's mean, blind to levels and slopes; 0 for fewer than three values.

    From differences of neighbours. Noise that lasts (a slow host, a warm device) hides from them:
    `lasting` counts too where it is larger, as a mean over many blocks errs by sigma / sqrt(blocks)
    only if no noise is shared between them.

    Args:
        values: means of blocks; may be NaN.
        lasting: such noise as others tell it; default: `lasting_noise` of the values, but no more
            than around two levels that they go back and forth between, nor than of a random walk
            with the same differences, since what comes and goes may be the fault that is looked
            for.
        quantile: of differences, MIDDLE or SMALLER_THIRD.
    """
    known = values[np.isfinite(values)]
    of_differences = _of_differences(known, quantile)
    if lasting is None:
        walk = WALK * of_differences
        around = _around_two_levels(known, quantile)
        lasting = min(lasting_noise(known, quantile=quantile), around, walk)
    return max(of_differences, lasting)


def lasting_noise(values: Array, *, quantile: tuple[float, float] = MIDDLE) -> float:
    """Sigma of one block's mean as means of PATIENT_BLOCKS blocks tell it."""
    return _of_differences(_patient_means(values), quantile) * sqrt(PATIENT_BLOCKS)


def common_lasting_noise(rows: Array) -> float:
    """The same of several series of one kind [rows, blocks], few of which hold a fault.

    By mean squares, of which the furthest count as FURTHEST sigmas: differences are few.

    Args:
        rows: may be NaN.
    """
    steps = np.abs(np.diff(_patient_means(rows)))
    steps = steps[np.isfinite(steps)]
    if steps.size < 2:
        return 0.0
    most = FURTHEST * MAD_TO_SIGMA * float(np.median(steps))
    return float(np.sqrt(np.mean(np.minimum(steps, most) ** 2) / 2.0)) * sqrt(PATIENT_BLOCKS)


def _patient_means(values: Array) -> Array:
    whole = values.shape[-1] // PATIENT_BLOCKS * PATIENT_BLOCKS
    parts = values[..., :whole].reshape(*values.shape[:-1], -1, PATIENT_BLOCKS)
    means: Array = parts.mean(axis=-1)
    return means


def _of_differences(values: Array, quantile: tuple[float, float]) -> float:
    steps = np.diff(values)
    if steps.size < 2:
        return 0.0
    share, sigmas = quantile
    around = np.abs(steps - np.median(steps))
    return float(np.quantile(around, share)) / sigmas / sqrt(2.0)


def _around_two_levels(values: Array, quantile: tuple[float, float]) -> float:
    """Lasting noise around the two levels that explain the values best.

    Without the blocks beside a change, which hold steps of both. Values that only wander are not
    split in vain: two levels take TWO_LEVELS_LEAVE of a normal distribution's sigma.
    """
    if values.size < LEAST_FOR_TWO:
        return inf
    ordered = np.sort(values)
    total, square = np.cumsum(ordered), np.cumsum(ordered * ordered)
    below = np.arange(2, values.size - 1)
    rest = total[-1] - total[below - 1]
    left = square[-1] - total[below - 1] ** 2 / below - rest**2 / (values.size - below)
    is_high = values > ordered[below[left.argmin()] - 1]
    if not is_high.any():
        return inf
    around = np.where(
        is_high, values - np.median(values[is_high]), values - np.median(values[~is_high])
    )
    changes = np.flatnonzero(is_high[1:] != is_high[:-1])
    is_edge = np.zeros(values.size, dtype=np.bool_)
    is_edge[changes] = is_edge[changes + 1] = True
    inside = around[~is_edge]
    if inside.size < LEAST_FOR_TWO // 2:
        inside = around
    lasting = lasting_noise(inside, quantile=quantile)
    return max(lasting, _of_differences(inside, quantile)) / TWO_LEVELS_LEAVE


def levels(values: Array, *, sigma: float, penalty: float) -> tuple[Level, ...]:
    """The levels that explain finite `values` best: least squares in sigma, `penalty` a change.

    Exact optimal partitioning with pruning (Killick, Fearnhead and Eckley 2012, PELT): time grows
    with the number of values, since no level may be longer than LONGEST_LEVEL.
    """
    if values.size == 0:
        return ()
    assert sigma > 0.0 and penalty > 0.0
    z = values / sigma
    total = np.concatenate([[0.0], np.cumsum(z)])
    square = np.concatenate([[0.0], np.cumsum(z * z)])
    best = np.zeros(values.size + 1)
    best[0] = -penalty
    came_from = np.zeros(values.size + 1, dtype=np.intp)
    begins = np.zeros(1, dtype=np.intp)
    for end in range(1, values.size + 1):
        inside = total[end] - total[begins]
        costs = best[begins] + square[end] - square[begins] - inside * inside / (end - begins)
        at = int(costs.argmin())
        best[end] = costs[at] + penalty
        came_from[end] = begins[at]
        begins = np.append(begins[costs <= best[end]], end)[-LONGEST_LEVEL:]
    found: list[Level] = []
    end = values.size
    while end > 0:
        begin = int(came_from[end])
        found.append(Level(begin=begin, end=end, mean=float(values[begin:end].mean())))
        end = begin
    return tuple(reversed(found))


def slope(values: Array) -> float:
    """Rise per block of a steady ramp, blind to a level that comes or goes.

    The median rise over a fifth of the series: one edge is seen by a quarter of such pairs, a box
    by less than a half, so neither passes for a ramp.
    """
    lag = values.size // 5
    if lag < 2:
        return 0.0
    return float(np.median(values[lag:] - values[:-lag])) / lag
