"""Finds the ranks of a recorded run that are slow now and then, as the detector of live jobs does.

By the number of slow spells beside those of the peers and beside fast spells of the rank itself. A
shift asks that the steps of a stretch agree; where they do not, it tells the largest spells as
slowdowns of their own, and their level instead of the mean that the job loses.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.detector.intermittent import (
    FEWEST_SPELLS,
    period,
    slow_steps,
    starts,
    steps_beyond_chance,
    usual_share,
)
from pacekeeper.predictor.detector.slowdown import DISSENT, of_mean
from pacekeeper.predictor.recorded.noise import Noise
from pacekeeper.predictor.recorded.residuals import Residuals
from pacekeeper.predictor.recorded.shift_test import Shift
from pacekeeper.predictor.stats.robust import column_medians


def with_intermittent(
    found: Sequence[Shift],
    residuals: Residuals,
    noise: Noise,
    *,
    lost: Array,
    begin: int,
    false_alarms: float,
) -> list[Shift]:
    """Return the shifts with those of ranks that are slow now and then in one layout.

    Such a shift takes the place of the rank's shifts that begin between its spells, if those are
    fewer than the spells. Shifts that are slow throughout stay, and their steps do not count.

    Args:
        found: of all layouts.
        residuals: of all compute in the layout, less what `found` explains.
        noise: of these residuals.
        lost: [steps, ranks] what `found` explains of them (log).
        begin: first step of the layout.
        false_alarms: expected in the layout, if nothing is wrong.
    """
    rest = residuals.by_step - column_medians(residuals.by_step)
    of_one = np.empty_like(noise.fast)  # not its own, which spells make larger
    for stage in np.unique(noise.stage):
        of_one[noise.stage == stage] = np.median(noise.fast[noise.stage == stage])
    sigmas = np.hypot(of_one, noise.wander)
    above = rest + lost
    is_slow = slow_steps(above, doubts=0.0, sigmas=sigmas)
    lasting = list[Shift]()
    for shift in found:
        steps = slice(max(0, shift.first - begin), max(0, shift.end - begin))
        own = is_slow[steps, shift.rank]
        if len(own) >= DISSENT and int((~own).sum()) <= len(own) // DISSENT:
            lasting.append(shift)
            above[steps, shift.rank] = rest[steps, shift.rank]
    is_slow = slow_steps(above, doubts=0.0, sigmas=sigmas)
    is_told, begun = np.isfinite(above), starts(is_slow)
    begun_fast = starts(slow_steps(-above, doubts=0.0, sigmas=sigmas))
    num_told, num_spells = is_told.sum(axis=0), begun.sum(axis=0)
    shifts = list(found)
    for rank in np.flatnonzero(num_spells >= FEWEST_SPELLS).tolist():
        told = np.flatnonzero(is_told[:, rank])
        told = told[: np.flatnonzero(is_slow[told, rank])[-1] + 1]
        spells_of_others = int(num_spells.sum() - num_spells[rank])
        steps_of_others = int(num_told.sum() - num_told[rank])
        usual = usual_share(spells_of_others, steps_of_others, begun_fast[told, rank])
        length = steps_beyond_chance(is_slow[told, rank], usual, num_told.sum() / false_alarms)
        if not length:
            continue
        stretch = told[-length:]
        first, end = begin + int(stretch[0]), begin + int(stretch[-1]) + 1
        parts = [
            one
            for one in shifts
            if one.rank == rank and first <= one.first < end and one not in lasting
        ]
        if len(parts) >= begun[stretch, rank].sum():
            continue
        mean = of_mean(above[stretch, rank], is_slow[stretch, rank], length)
        mean = replace(mean, every=period(is_slow[stretch, rank], stretch))
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
                num_before=int(stretch[0]),
                now_and_then=mean,
            )
        )
    return shifts
