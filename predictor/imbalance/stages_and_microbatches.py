"""How the work of a run is distributed over stages and micro-batches, separated from slow devices.

A slow device is slow for any work; the work of a micro-batch passes through all stages of its
data-parallel rank, at different times and on different devices. Only what *other* devices confirm
about a micro-batch therefore counts as its work, and only what all data-parallel ranks of a stage
show as the stage's.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.cost.model import PRIOR
from pacekeeper.predictor.cost.regression import regress
from pacekeeper.predictor.imbalance.agreement import Agreement, agreement
from pacekeeper.predictor.recorded.trace import Chunk, ComputeTable, Worker
from pacekeeper.predictor.stats.group_ids import grouped
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA, MEDIAN_ERROR, column_medians

PARTS_OF_RUN = 4  # the fastest part is a rank's healthy level
PACE_STEPS = 21  # maximum width of the running median that is a rank's level
PACE_CHANCE = 1e-3  # p-value of a level: a rank's work may look like a level of its own
SMALLEST_SHARE = 0.01  # of the mean of the stages: lower bound of a stage's time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputeRows:
    """The usable rows of a ComputeTable with the place of their rank; all arrays [rows].

    `view` numbers the comparable rows of a rank: (chunk, model chunk).
    """

    kept: Positions  # of the table
    step: Positions
    rank: Positions
    stage: Positions
    dp: Positions
    view: Positions
    micro_batch: Positions
    forward: Array  # 1.0 for forward, 0.0 for the rest
    compute_s: Array

    @property
    def num_stages(self) -> int:
        return len(np.unique(self.stage))

    @property
    def num_dps(self) -> int:
        return len(np.unique(self.dp))


def compute_rows(table: ComputeTable, workers: tuple[Worker, ...]) -> ComputeRows:
    """Select the rows with a finite, positive time, of ranks with a place."""
    place = {worker.rank: worker for worker in workers}
    kept = np.flatnonzero(table.usable(place))
    rank = table.rank[kept]
    at, first = grouped(rank)
    places = [place[number] for number in rank[first].tolist()]
    stages = np.array([worker.stage for worker in places], dtype=np.intp)
    dps = np.array([worker.dp for worker in places], dtype=np.intp)
    return ComputeRows(
        kept=kept,
        step=table.step[kept],
        rank=rank,
        stage=stages[at],
        dp=dps[at],
        view=table.chunk[kept] + len(Chunk) * table.model_chunk[kept],
        micro_batch=table.micro_batch[kept],
        forward=(table.chunk[kept] == Chunk.FORWARD).astype(np.float64),
        compute_s=table.compute_s[kept],
    )


def even_stages(rows: ComputeRows) -> tuple[Array, dict[int, float]]:
    """Compute factors that even out the stages.

    A rank's excess over a healthy rank of its stage is excluded from the mean and stays on the
    rank. The healthy level is the best quarter of the run for a rank, and the lower median of the
    ranks for a stage. Neither a device that is slow throughout nor one that becomes slow makes its
    stage heavy, if other ranks of the stage are not slow.

    Returns:
        Factors [rows] that give each stage the mean, over stages, of a micro-batch's time; and each
        stage's work over that mean.
    """
    log_s = np.log(rows.compute_s)
    pace = _usual_log_s(rows, log_s)
    excess = np.exp(pace - _healthy_levels(rows, pace))
    work_s = rows.compute_s / excess
    cell, _ = grouped(rows.step, rows.dp, rows.micro_batch, rows.view)
    sizes = np.bincount(cell)
    whole = sizes[cell] == rows.num_stages
    mean_s = (np.bincount(cell, work_s) / sizes)[cell]
    usual_s = _fit_to_mean(grouped(rows.stage, rows.view)[0], mean_s, work_s, whole)
    factors = np.where(whole, mean_s / usual_s, 1.0)
    heaviness = {
        int(stage): float(work_s[mine].sum() / mean_s[mine].sum())
        for stage in np.unique(rows.stage)
        if (mine := whole & (rows.stage == stage)).any()
    }
    return factors, heaviness


def shared_work(rows: ComputeRows) -> tuple[Array, Agreement] | None:
    """Estimate the part of the times that belongs to micro-batches; None if no view can confirm it.

    The views of a micro-batch are its stages, or forward and backward if there is one stage. Its
    work is the mean of its views, shrunk by their noise. They are compared among micro-batches of
    one data-parallel rank in one step, so that ranks and steps that are slow as a whole have no
    effect; among those of a step if each rank has one micro-batch in it.

    Returns:
        Log of the work relative to the mean of its step [rows], and the agreement of the views.
    """
    residual = np.log(rows.compute_s)
    residual = residual - _usual_log_s(rows, residual)
    view = rows.stage if rows.num_stages > 1 else rows.forward.astype(np.intp)
    _, view = np.unique(view, return_inverse=True)
    num_views = int(view.max()) + 1
    cell, first = grouped(rows.step, rows.dp, rows.micro_batch)
    seen = np.bincount(cell * num_views + view, minlength=len(first) * num_views)
    sums = np.bincount(cell * num_views + view, residual, minlength=len(first) * num_views)
    whole = (seen.reshape(-1, num_views) > 0).all(axis=1)
    table = (sums / np.maximum(seen, 1)).reshape(-1, num_views)
    step, dp = rows.step[first][whole], rows.dp[first][whole]
    found = agreement(table[whole], grouped(step, dp)[0], step)
    if found is None:
        return None
    return np.where(whole, found.trust * table.mean(axis=1), 0.0)[cell], found


def even_work(rows: ComputeRows, log_work: Array) -> Array:
    """Factors [rows] that give each micro-batch of a step the mean work of the step."""
    amount = np.exp(log_work)
    group, _ = grouped(rows.step, rows.stage, rows.view)
    factors: Array = (np.bincount(group, amount) / np.bincount(group))[group] / amount
    return factors


def even_known(rows: ComputeRows, work: Array, evened: list[int]) -> Array | None:
    """Factors [rows] that give each row the step's mean of some columns of its recorded work.

    The cost of the work is fitted for each (stage, view), by the cost model's regression.

    Args:
        rows: of the run.
        work: [rows, (tokens, sum of squared lengths, expert rows) or the first of them], all known.
        evened: the columns.

    Returns:
        None if the work is unknown or does not vary.
    """
    if not np.isfinite(work).all() or not np.ptp(work[:, evened], axis=0).any():
        return None
    role, _ = grouped(rows.stage, rows.view)
    step, _ = grouped(rows.step)
    factors = np.ones(len(step))
    for number in range(int(role.max()) + 1):
        mine = np.flatnonzero(role == number)
        observed_s = rows.compute_s[mine]
        features = np.column_stack([np.ones(len(mine)), work[mine]])
        prior = PRIOR.of_first(features.shape[1])
        cost = regress(features, observed_s, rows.rank[mine], prior).coefficients
        even = features.copy()
        for column in evened:
            count = np.maximum(np.bincount(step[mine]), 1)
            means = np.bincount(step[mine], work[mine, column]) / count
            even[:, column + 1] = means[step[mine]]
        expected_s = features @ cost
        if (expected_s > 0.0).all():
            factors[mine] = (even @ cost) / expected_s
    return factors


def _usual_log_s(rows: ComputeRows, log_s: Array) -> Array:
    """Log of the usual time of each row's rank in its view [rows].

    The sum of the stage's median, the rank's level relative to the other stages of the same
    micro-batches, and the level of its whole data-parallel rank (a node may hold all of it). Each
    level is a running median over steps, set to 0 where step-to-step variation can explain it. Of
    two stages the faster one represents the micro-batch: devices become slow, not fast.
    """
    role, _ = grouped(rows.stage, rows.view)
    usual = _group_medians(role, log_s)[role]
    cell, _ = grouped(rows.step, rows.dp, rows.micro_batch, rows.view)
    common = _group_medians(cell, log_s - usual, lower=True)[cell]
    # Relative to the other stages work cancels, and a short window is enough.
    of_dp = _level(grouped(rows.dp, rows.view)[0], rows.step, common, windows=2)
    relative = log_s - usual - common
    own = _level(grouped(rows.rank, rows.view)[0], rows.step, relative, windows=4)
    pace: Array = usual + of_dp + own
    return pace


def _level(owner: Positions, step: Positions, values: Array, *, windows: int) -> Array:
    """Running median over steps of each owner's values [rows], 0 where it may be chance.

    At least so many `windows` in the run.
    """
    from scipy.ndimage import median_filter  # slow to import: not at start-up

    step, first = grouped(step)
    cell, at = grouped(owner, step)
    medians = np.full((int(owner.max()) + 1, len(first)), np.nan)
    medians[owner[at], step[at]] = _group_medians(cell, values)
    width = min(max(len(first) // windows, 3), PACE_STEPS) | 1
    usual = column_medians(medians, axis=1)[:, None]  # where an owner is missing
    level = median_filter(np.where(np.isfinite(medians), medians, usual), (1, width))
    spread = MAD_TO_SIGMA * column_medians(np.abs(medians - level), axis=1)
    seen = np.maximum(np.isfinite(medians).sum(axis=1), 2)
    error = MEDIAN_ERROR * spread / np.sqrt(np.minimum(seen, width))
    reach = student.isf(PACE_CHANCE / 2.0, seen - 1) * error
    kept: Array = np.where(np.abs(level) > reach[:, None], level, 0.0)[owner, step]
    return kept


def _group_medians(group: Positions, values: Array, *, lower: bool = False) -> Array:
    """Median of each group, numbered from 0 without gaps; `lower`: the smaller middle value."""
    order = np.argsort(values)
    place = np.empty(len(values), dtype=np.intp)
    place[order] = np.arange(len(values))
    # Sorting one combined key (group, place) is many times faster than sorting by two keys.
    ordered = values[order[np.sort(group * len(values) + place) % len(values)]]
    size = np.bincount(group)
    begin = np.cumsum(size) - size
    medians: Array = ordered[begin + (size - 1) // 2]
    return medians if lower else (medians + ordered[begin + size // 2]) / 2.0


def _fit_to_mean(group: Positions, mean_s: Array, work_s: Array, used: Flags) -> Array:
    """Fit each group's time to the mean over stages [rows]: a line, since a head adds a fixed cost.

    The lines of all stages add up to their sum, so that the total work is preserved.
    """
    usual_s = work_s.copy()
    for number in range(int(group.max()) + 1):
        mine = np.flatnonzero((group == number) & used)
        columns = np.column_stack([np.ones(len(mine)), mean_s[mine]])
        line_s = columns @ np.linalg.lstsq(columns, work_s[mine], rcond=None)[0]
        usual_s[mine] = np.maximum(line_s, SMALLEST_SHARE * mean_s[mine])
    return usual_s


def _healthy_levels(rows: ComputeRows, pace: Array) -> Array:
    """Level of a healthy rank of the row's stage, in the row's view [rows]."""
    step, steps = grouped(rows.step)
    part = step * PARTS_OF_RUN // len(steps)
    rank, first_of_rank = grouped(rows.stage, rows.view, rows.rank)
    cell, first_of_cell = grouped(rank, part)
    medians = _group_medians(cell, pace)
    best = np.full(len(first_of_rank), np.inf)
    np.minimum.at(best, rank[first_of_cell], medians)
    role, _ = grouped(rows.stage, rows.view)
    healthy = _group_medians(role[first_of_rank], best, lower=True)
    levels: Array = healthy[role]
    return levels
