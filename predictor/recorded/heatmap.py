"""Heat map of the residuals of a recorded run: steps by ranks.

A cell is the log of a rank's compute time relative to the median of its stage in that step, after
division by the tokens if they are recorded.
"""

from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.recorded.trace import ComputeTable, Trace
from pacekeeper.predictor.stats.robust import column_medians

MIN_LIMIT = 0.05  # lower bound of the colour scale: smaller residuals are noise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heatmap:
    """log_ratio [steps, ranks], NaN where a rank has no time; colours saturate at +-`limit`.

    A row or column may represent several: `steps` and `ranks` name the first one of each.
    """

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    log_ratio: Array
    limit: float
    steps_per_cell: int = 1
    ranks_per_cell: int = 1


def heatmap_of(trace: Trace) -> Heatmap | None:
    """Return the heat map of a trace, None without compute times."""
    table = trace.compute
    if table is None or len(table.step) == 0:
        return None
    steps, row = np.unique(table.step, return_inverse=True)
    ranks, column = np.unique(table.rank, return_inverse=True)
    spent_s = np.zeros((len(steps), len(ranks)))
    np.add.at(spent_s, (row, column), table.compute_s)
    tokens = _log_tokens(table, spent_s.shape, row, column)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_time = np.log(np.where(spent_s > 0.0, spent_s, np.nan)) - tokens
    stage_of = {worker.rank: worker.stage for worker in trace.workers}
    stage = np.array([stage_of.get(int(rank), 0) for rank in ranks])
    residual = np.full_like(log_time, np.nan)
    for number in np.unique(stage):
        own = stage == number
        # Only the step's median is subtracted, no median per rank: a slow rank stays red.
        residual[:, own] = log_time[:, own] - _row_medians(log_time[:, own])
    largest = np.nanquantile(np.abs(residual), 0.995) if np.isfinite(residual).any() else 0.0
    return Heatmap(
        steps=tuple(steps.tolist()),
        ranks=tuple(ranks.tolist()),
        log_ratio=residual,
        limit=max(MIN_LIMIT, float(largest)),
    )


def reduced(heat: Heatmap, *, max_steps: int, max_ranks: int) -> Heatmap:
    """Downsample to at most `max_steps` by `max_ranks` cells.

    Takes the median of adjacent steps, then of adjacent ranks the value farthest from 0, so that a
    single slow rank stays visible.
    """
    per_step = -(-len(heat.steps) // max_steps)
    per_rank = -(-len(heat.ranks) // max_ranks)
    by_step = np.stack(
        [
            column_medians(heat.log_ratio[first : first + per_step])
            for first in range(0, len(heat.steps), per_step)
        ]
    )
    cells = np.full((len(by_step), -(-len(heat.ranks) // per_rank)), np.nan)
    for i, first in enumerate(range(0, len(heat.ranks), per_rank)):
        some = by_step[:, first : first + per_rank]
        farthest = np.nan_to_num(np.abs(some), nan=-1.0).argmax(axis=1)
        cells[:, i] = some[np.arange(len(some)), farthest]
    largest = np.nanquantile(np.abs(cells), 0.995) if np.isfinite(cells).any() else 0.0
    return replace(
        heat,
        steps=heat.steps[::per_step],
        ranks=heat.ranks[::per_rank],
        log_ratio=cells,
        limit=max(MIN_LIMIT, float(largest)),
        steps_per_cell=per_step,
        ranks_per_cell=per_rank,
    )


def _log_tokens(
    table: ComputeTable, shape: tuple[int, ...], row: Positions, column: Positions
) -> Array:
    """Log of the tokens of each rank and step, 0 where they are not recorded."""
    if not np.isfinite(table.tokens).all():
        return np.zeros(shape)
    tokens = np.zeros(shape)
    np.add.at(tokens, (row, column), table.tokens)
    logs: Array = np.log(np.maximum(tokens, 1.0))
    return logs


def _row_medians(values: Array) -> Array:
    known = np.isfinite(values).any(axis=1)
    medians = np.zeros((len(values), 1))
    medians[known, 0] = np.nanmedian(values[known], axis=1)
    return medians
