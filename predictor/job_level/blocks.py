"""The pace of a job over its healthy pace, in blocks of steps. Pure.

Blocks, since single steps drown in the clock's units and in hiccups; edges are found again in the
steps themselves.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.job_level.step_time_model import StepTimes, UsableSteps
from pacekeeper.predictor.stats.change_points import (
    PATIENT_BLOCKS,
    SMALLER_THIRD,
    block_means,
    block_starts,
    noise,
    slope,
)

BLOCK_STEPS = 10  # averaged before anything is judged
RESOLUTION_SHARE = 0.01  # of a block: a coarser clock gets larger blocks
SIGMA_FLOOR = 0.005  # of a block's mean: no host is steadier
HEALTHY_SHARE = 0.2  # of a run (or of a work class), at least: the pace of its fastest steps
NORMAL_20TH = 0.8416  # sigmas that the 20th percentile lies below the mean
LEAST_LASTING = 8 * PATIENT_BLOCKS  # that show how noise lasts, where no work is left unexplained
MIN_CLASS_BLOCKS = 8  # fewer have no level of their own to be judged by


class Knowledge(StrEnum):
    """The knowledge that the expectation is based on, as text."""

    REPLICATES = "runs of the same recipe at the same steps"
    WORK = "the tokens of each step"
    SCHEDULE = "other steps of the same work class"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Columns of the blocks that can be judged, ascending.

    `excess`: log of observed / expected, less `health` (of its kind of work); `expected_s`: of all
    blocks, also those that can not be judged; `number`: place among them; steps at the indices
    [begin, end) belong to it. `sigma`: noise of one block's excess.
    """

    excess: Array
    health: Array
    expected_s: Array
    number: Positions
    begin: Positions
    end: Positions
    sigma: float


def block_size(run: UsableSteps, resolution_s: float) -> int:
    """Return steps per block, so that the clock's resolution is small against a block."""
    fine_enough = resolution_s / (RESOLUTION_SHARE * float(np.median(run.duration_s)))
    return max(BLOCK_STEPS, ceil(fine_enough))


def blocks_of(pace: StepTimes, size: int, known_by: Knowledge) -> Blocks:
    """Return the pace in blocks of `size` steps, relative to the healthy pace of their work."""
    observed = block_means(pace.observed_s, size)
    expected = block_means(pace.expected_s, size)
    begin = block_starts(pace.step.size, size)
    end = np.append(begin[1:], pace.step.size)
    ratio: Array = np.log(observed / expected)
    lowest = np.minimum.reduceat(pace.work_class, begin)
    is_pure = lowest == np.maximum.reduceat(pace.work_class, begin)
    kind = np.where(is_pure, lowest, np.iinfo(np.intp).min)  # a mixture is a kind of its own
    can_judge = np.isfinite(ratio)
    ratio, kind = ratio[can_judge], kind[can_judge]
    grain = pace.resolution_s / (size * float(np.nanmedian(pace.observed_s)))
    lasting = pace.lasting_noise
    if known_by is Knowledge.WORK and ratio.size < LEAST_LASTING:
        lasting = 0.0  # what so few blocks show of it is chance, or the fault itself
    spread = max(grain, noise(ratio, lasting, quantile=SMALLER_THIRD))
    sigma = max(SIGMA_FLOOR, spread)
    health = np.zeros(ratio.size)
    for one in np.unique(kind):
        among = kind == one
        health[among] = _health(ratio[among], spread, known_by)
    return Blocks(
        excess=ratio - health,
        health=health,
        expected_s=expected,
        number=np.flatnonzero(can_judge),
        begin=begin[can_judge],
        end=end[can_judge],
        sigma=sigma,
    )


def _health(ratio: Array, sigma: float, known_by: Knowledge) -> Array:
    """Return the healthy log ratio to the expected time of each block of one kind of work.

    The pace of the fastest fifth: a fault may hold for the rest. Work may grow steadily within a
    class of a schedule (a window that widens): a ramp is its work, not a fault.
    """
    if known_by is Knowledge.NOTHING:
        return np.full(ratio.size, np.median(ratio))
    if ratio.size < MIN_CLASS_BLOCKS and known_by is Knowledge.SCHEDULE:
        return ratio
    rise = slope(ratio) if known_by is Knowledge.SCHEDULE else 0.0
    ramp = rise * np.arange(ratio.size, dtype=np.float64)
    fast = float(np.quantile(ratio - ramp, HEALTHY_SHARE))
    health: Array = ramp + (fast + NORMAL_20TH * sigma)
    return health


def edge(pace: StepTimes, blocks: Blocks, at: int, *, before: float, after: float) -> int:
    """Index of the first step of the new level that begins near block `at`.

    The split of the steps around it that leaves least squares between the two levels.
    """
    first, last = max(at - 2, 0), min(at + 2, blocks.begin.size)
    steps = np.arange(blocks.begin[first], blocks.end[last - 1])
    block = np.searchsorted(blocks.begin, steps, side="right") - 1
    ratio = np.log(pace.observed_s[steps] / pace.expected_s[steps]) - blocks.health[block]
    beyond = np.where(np.isfinite(ratio), ratio - 0.5 * (before + after), 0.0)
    beyond = np.clip(beyond, -abs(after - before), abs(after - before))
    gain = np.concatenate([[0.0], np.cumsum(beyond if after < before else -beyond)])
    return int(blocks.begin[first]) + int(gain.argmax())


def paced_over(pace: StepTimes, blocks: Blocks, begin: int, end: int) -> float:
    """Log slowdown over health of the steps [begin, end) together: exact where blocks straddle.

    That of their blocks where no replicate has these steps.
    """
    steps = np.arange(begin, end)
    block = np.maximum(np.searchsorted(blocks.begin, steps, side="right") - 1, 0)
    health_s = pace.expected_s[steps] * np.exp(blocks.health[block])
    known = np.isfinite(pace.observed_s[steps]) & np.isfinite(health_s)
    if not known.any():
        return float(blocks.excess[block].mean())
    return float(np.log(pace.observed_s[steps][known].sum() / health_s[known].sum()))
