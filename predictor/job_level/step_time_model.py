"""Expected time of each step of a whole job, from what is known of its work. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.predictor.stats.change_points import (
    block_means,
    common_lasting_noise,
    without_spikes,
)
from pacekeeper.predictor.stats.robust import column_medians

WORK_PASSES = 20  # of the reweighted fit
KNOWN_SHARE = 0.5  # of the steps: fewer that tell their tokens do not stand for the run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """Observed and expected time of each step, ascending; observed is NaN after the record's end.

    Expected is right up to one common factor. `work_class`: steps of one class do equal work and
    have a level of their own. `lasting_noise`: sigma of one block, as replicates wander; None: not
    known.
    """

    step: Positions
    observed_s: Array
    expected_s: Array
    work_class: Positions
    resolution_s: float
    lasting_noise: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UsableSteps:
    """The steps of a run that can be judged, ascending; `duration_s` is without spikes."""

    step: Positions
    raw_s: Array
    duration_s: Array
    tokens: Array
    sum_len_squared: Array
    rows: Positions  # where they stood in the table


def usable_steps(trace: Trace) -> UsableSteps | None:
    """The usable steps of the trace, None where it has none: positive, finite, once each."""
    table = trace.steps
    if table is None:
        return None
    is_good = np.isfinite(table.duration_s) & (table.duration_s > 0.0)
    _, first = np.unique(table.step[is_good], return_index=True)
    rows = np.flatnonzero(is_good)[first]
    if rows.size == 0:
        return None
    return UsableSteps(
        step=table.step[rows],
        raw_s=table.duration_s[rows],
        duration_s=without_spikes(table.duration_s[rows], resolution=trace.resolution_s),
        tokens=table.tokens[rows],
        sum_len_squared=table.sum_len_squared[rows],
        rows=rows,
    )


def with_tokens(run: UsableSteps) -> UsableSteps | None:
    """Return the steps with reported tokens; None: fewer than half of them."""
    told = np.isfinite(run.tokens)
    if told.mean() < KNOWN_SHARE:
        return None
    return UsableSteps(**{name: getattr(run, name)[told] for name in UsableSteps.__slots__})


def unknown(run: UsableSteps, resolution_s: float) -> StepTimes:
    """Nothing known: all steps are expected to take one second, which judges levels only."""
    return _beside(run, np.ones(run.step.size), resolution_s)


def from_schedule(run: UsableSteps, schedule: Positions, resolution_s: float) -> StepTimes:
    """By work class: `schedule` [steps of the run] names each step's class.

    A class's level is measured in the run itself. Equal durations of interleaved classes come out
    as one pace, which a plain mean over a block would not give.
    """
    expected = np.ones(run.step.size)
    for work_class in np.unique(schedule):
        among = schedule == work_class
        own = run.raw_s[among]
        expected[among] = without_spikes(own, resolution=resolution_s).mean()
    return replace(_beside(run, expected, resolution_s), work_class=schedule.astype(np.intp))


def from_work(run: UsableSteps, resolution_s: float) -> StepTimes:
    """By the tokens and squared lengths of each step; all of them tell their tokens."""
    expected, _ = work_seconds(run.raw_s, run.tokens, run.sum_len_squared)
    return _beside(run, expected, resolution_s)


def work_seconds(
    took_s: Array, tokens: Array, sum_len_squared: Array, is_healthy: Flags | None = None
) -> tuple[Array, Array]:
    """Expected time of each step, c0 + a tokens + b sum(len^2), up to one common factor.

    Least absolute relative error by reweighting: a fault that holds for less than half of the steps
    is not learnt.

    Args:
        took_s: what each step took [steps].
        tokens: of each step.
        sum_len_squared: NaN where not told; counts where all steps tell it.
        is_healthy: the steps that are fitted to; default: all.

    Returns:
        The expected time of each step, and the variance of its log in those of a fitted step's.
    """
    fitted = np.ones(took_s.size, dtype=np.bool_) if is_healthy is None else is_healthy
    columns = [np.ones(took_s.size), tokens, sum_len_squared]
    features = np.stack([one for one in columns if np.isfinite(one).all()], axis=1)
    features = features / np.maximum(np.abs(features).max(axis=0), 1e-300)
    relative = features[fitted] / took_s[fitted, None]
    weight = np.ones(len(relative))
    for _ in range(WORK_PASSES):
        coefficients = np.linalg.lstsq(relative * weight[:, None], weight, rcond=1e-9)[0]
        weight = 1.0 / np.sqrt(np.maximum(np.abs(relative @ coefficients - 1.0), 1e-4))
    expected: Array = np.maximum(features @ coefficients, 0.1 * took_s)
    work = features / expected[:, None]
    spread = np.linalg.pinv(relative.T @ relative, rcond=1e-12, hermitian=True)
    variance: Array = ((work @ spread) * work).sum(axis=1)
    return expected, variance


def _beside(run: UsableSteps, expected_s: Array, resolution_s: float) -> StepTimes:
    """Times of steps of one class, without spikes, told from work that differs by the step."""
    over = without_spikes(run.raw_s / expected_s, resolution=resolution_s / expected_s)
    return StepTimes(
        step=run.step,
        observed_s=expected_s * over,
        expected_s=expected_s,
        work_class=np.zeros(run.step.size, dtype=np.intp),
        resolution_s=resolution_s,
    )


def from_replicates(
    run: UsableSteps, replicates: Sequence[UsableSteps], resolution_s: float, size: int
) -> StepTimes:
    """By the median of runs of the same recipe at the same step, `size` steps to a block.

    Each replicate is first brought to the run's pace by one factor: it may have had other devices
    or another number of them. Means of blocks are compared, not steps: on a coarse clock the median
    of single steps sticks to the clock's units. Goes on after the run's end where replicates do.
    """
    longest = max(replicates, key=lambda other: int(other.step[-1]))
    later = longest.step[longest.step > run.step[-1]]
    step = np.concatenate([run.step, later])
    observed = np.concatenate([run.duration_s, np.full(later.size, np.nan)])
    others = np.stack(
        [
            np.interp(step, other.step, other.duration_s, left=np.nan, right=np.nan)
            for other in replicates
        ]
    )
    means = np.stack([block_means(row, size) for row in others])
    own = block_means(observed, size)
    factors = np.array([factor(own, row) for row in means])
    usable = np.isfinite(factors)
    by_block = column_medians(means[usable] * factors[usable, None])
    by_step = column_medians(others[usable] * factors[usable, None])
    # One value per block keeps the mean right, one per step keeps an edge of the schedule sharp.
    block = np.minimum(np.arange(step.size) // size, by_block.size - 1)
    expected = by_step * (by_block / block_means(by_step, size))[block]
    return StepTimes(
        step=step,
        observed_s=np.where(np.isfinite(expected), observed, np.nan),
        expected_s=expected,
        work_class=np.zeros(step.size, dtype=np.intp),
        resolution_s=resolution_s,
        lasting_noise=_wander(np.log(means[usable])),
    )


def _wander(others: Array) -> float | None:
    """Lasting noise of a replicate beside the rest [replicates, blocks], as of one block.

    What a system does by habit all its runs do. None where there are no two to compare. The run
    itself does not count: beside few others its fault would.
    """
    if len(others) < 2:
        return None
    rest = [column_medians(np.delete(others, at, axis=0)) for at in range(len(others))]
    return common_lasting_noise(others - np.stack(rest))


def factor(own: Array, other: Array) -> float:
    """The common factor own / other of two series of blocks, NaN where they share none."""
    both = np.isfinite(own) & np.isfinite(other)
    if not both.any():
        return float("nan")
    return float(np.exp(np.median(np.log(own[both] / other[both]))))
