"""A noisy series as constant levels: where it changed and by how much. Pure; knows no cause."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA

SPIKE_WINDOW = 21  # neighbours a single value is compared with
SPIKE_SIGMAS = 4.0
SPIKE_FLOOR = 0.02  # of the value: nearer than this is no spike
LONGEST_LEVEL = 2048  # blocks; a longer one is cut in pieces, to bound the work
PATIENT_BLOCKS = 4  # noise that lasts is measured over so many blocks together


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
    """The values, each drawn to its neighbours as far as it sticks out (Hampel, clipped).

    An edge between two levels stays where it is. What the clock's resolution explains is left
    alone: clipping it would lose the part of a unit that an average regains. Positive values.
    """
    from scipy.ndimage import median_filter  # slow to import: not at start-up

    if values.size == 0:
        return values
    window = min(SPIKE_WINDOW, values.size)
    middle: Array = median_filter(values, size=window, mode="nearest")
    spread = MAD_TO_SIGMA * median_filter(np.abs(values - middle), size=window, mode="nearest")
    reach = np.maximum(np.maximum(SPIKE_SIGMAS * spread, SPIKE_FLOOR * middle), 1.5 * resolution)
    clipped: Array = np.clip(values, middle - reach, middle + reach)
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


def noise(values: Array) -> float:
    """Sigma of one block's mean, blind to levels and slopes; 0 for fewer than three values.

    From differences of neighbours. Noise that lasts (a slow host, a warm device) hides from them,
    so means of PATIENT_BLOCKS are asked too, and the larger answer counts: a mean over many blocks
    errs by sigma / sqrt(blocks) only if no noise is shared between them.
    """

    def scale(series: Array) -> float:
        steps = np.diff(series)
        if steps.size < 2:
            return 0.0
        around = np.abs(steps - np.median(steps))
        return MAD_TO_SIGMA * float(np.median(around)) / sqrt(2.0)

    known = values[np.isfinite(values)]
    patient = known[: known.size // PATIENT_BLOCKS * PATIENT_BLOCKS].reshape(-1, PATIENT_BLOCKS)
    return max(scale(known), scale(patient.mean(axis=1)) * sqrt(PATIENT_BLOCKS))


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
