"""Finds the ranks of a recorded run that are slow now and then, as the detector of live jobs does.

By the number of slow spells beside those of the peers and beside fast spells of the rank itself. A
shift asks that the steps of a stretch agree; where they do not, it tells the largest spells as
slowdowns of their own, and their level instead of the mean that the job loses.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.detector.cusum import WINDOW_STEPS
from pacekeeper.predictor.detector.intermittent import (
    FEWEST_SPELLS,
    slow_steps,
    starts,
    usual_share,
)
from pacekeeper.predictor.detector.slowdown import DISSENT, of_mean
from pacekeeper.predictor.recorded.noise import Noise
from pacekeeper.predictor.recorded.residuals import Residuals
from pacekeeper.predictor.recorded.shift_test import Shift
from pacekeeper.predictor.stats.robust import column_medians

# Share of steps in which a spell begins while a rank is slow now and then: so many times the usual
# one, within limits.
TIMES_USUAL = 8.0
LEAST_SHARE, MOST_SHARE = 1 / 8, 0.5
NEVER = -1e6  # score of a step that no stretch contains


def with_intermittent(
    found: Sequence[Shift],
    residuals: Residuals,
    noise: Noise,
    *,
    lost: Array,
    steps: Positions,
    begin: int,
    false_alarms: float,
) -> list[Shift]:
    """Return the shifts with those of ranks that are slow now and then in one layout.

    Such a shift takes the place of the rank's shifts of all compute that it overlaps. Shifts of
    several steps that are slow throughout stay, and these steps do not count.

    Args:
        found: of all layouts.
        residuals: of all compute in the layout, less what `found` explains.
        noise: of these residuals.
        lost: [steps, ranks] what `found` explains of them (log).
        steps: numbers of the layout's steps.
        begin: position of the first of them in the trace.
        false_alarms: expected in the layout, if nothing is wrong.
    """
    rest = residuals.by_step - column_medians(residuals.by_step)
    of_one = np.empty_like(noise.fast)  # not its own, which spells make larger
    for stage in np.unique(noise.stage):
        of_one[noise.stage == stage] = np.median(noise.fast[noise.stage == stage])
    sigmas = np.hypot(of_one, noise.wander)
    above = rest + lost
    is_slow = slow_steps(above, doubts=0.0, sigmas=sigmas)
    passing = list[Shift]()
    for shift in found:
        own = slice(max(0, shift.first - begin), max(0, shift.end - begin))
        if begin <= shift.first and shift.end <= begin + len(steps) and shift.chunk is None:
            slow = is_slow[own, shift.rank]
            if len(slow) < DISSENT or int((~slow).sum()) > len(slow) // DISSENT:
                passing.append(shift)
                continue
        above[own, shift.rank] = rest[own, shift.rank]
    is_slow = slow_steps(above, doubts=0.0, sigmas=sigmas)
    is_told, begun = np.isfinite(above), starts(is_slow)
    num_told, num_spells = is_told.sum(axis=0), begun.sum(axis=0)
    shifts = list(found)
    for rank in np.flatnonzero(num_spells >= FEWEST_SPELLS).tolist():
        told = np.flatnonzero(is_told[:, rank])
        spells_of_others = int(num_spells.sum() - num_spells[rank])
        steps_of_others = int(num_told.sum() - num_told[rank])
        is_fast = slow_steps(-above[told, rank], doubts=0.0, sigmas=sigmas[rank])
        usual = usual_share(spells_of_others, steps_of_others, starts(is_fast))
        most_chance = false_alarms / num_told.sum() / len(told)  # of each stretch of any rank
        for episode in _episodes(is_slow[told, rank], usual, most_chance):
            at = told[episode]
            first, end = begin + int(at[0]), begin + int(at[-1]) + 1
            parts = [p for p in passing if p.rank == rank and p.first < end and first < p.end]
            mean = of_mean(above[at, rank], is_slow[at, rank], len(at), steps[at])
            shifts = [one for one in shifts if one not in parts]
            shifts.append(
                Shift(
                    rank=rank,
                    chunk=None,
                    first=first,
                    end=end,
                    log_slowdown=log(mean.value),
                    error=mean.error,
                    strength=1.0,
                    num_before=int(at[0]),
                    now_and_then=mean,
                )
            )
    return shifts


def _episodes(is_slow: Flags, usual: float, most_chance: float) -> Iterator[slice]:
    """Yield the stretches of a rank's steps that hold more slow spells than chance gives.

    The stretch with the largest likelihood ratio first, then that of the steps that are left.

    Args:
        is_slow: its steps [steps].
        usual: share of healthy steps in which a spell begins.
        most_chance: of so many spells in a stretch.
    """
    from scipy.special import bdtrc  # slow to import: not at start-up

    begun = starts(is_slow)
    share = min(MOST_SHARE, max(LEAST_SHARE, TIMES_USUAL * usual))
    score = np.where(begun, log(share / usual), log((1.0 - share) / (1.0 - usual)))
    at = np.flatnonzero(begun)
    for first, end in pairwise(at.tolist()):
        if end - first > WINDOW_STEPS:  # the detector of live jobs does not see both
            score[first + 1 : end] = NEVER
    while True:
        total = np.concatenate([[0.0], np.cumsum(score)])
        end = int((total - np.minimum.accumulate(total)).argmax())
        first = int(total[: end + 1].argmin())
        num_spells = int(begun[first:end].sum())
        if num_spells < FEWEST_SPELLS or bdtrc(num_spells - 1, end - first, usual) > most_chance:
            return
        score[first:end] = NEVER
        while end < len(is_slow) and is_slow[end]:
            end += 1  # the last spell
        yield slice(first, end)
