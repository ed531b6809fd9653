"""Heat map of the residuals of a recorded run: steps by ranks.

A cell is the log of a rank's compute time relative to the median of its stage in that step, after
division by the tokens if they are recorded.
"""

from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.recorded.trace import Trace
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
    spent_s, tokens = np.zeros((2, len(steps), len(ranks)))
    np.add.at(spent_s, (row, column), table.compute_s)
    if np.isfinite(table.tokens).all():
        np.add.at(tokens, (row, column), table.tokens)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.log(np.where(spent_s > 0.0, spent_s, np.nan) / np.maximum(tokens, 1.0))
    stage_of = {worker.rank: worker.stage for worker in trace.workers}
    stage = np.array([stage_of.get(rank, 0) for rank in ranks.tolist()])
    for number in np.unique(stage):
        own = stage == number
        # Only the step's median is subtracted, no median per rank: a slow rank stays red.
        log_ratio[:, own] -= column_medians(log_ratio[:, own], axis=1)[:, None]
    return Heatmap(
        steps=tuple(steps.tolist()),
        ranks=tuple(ranks.tolist()),
        log_ratio=log_ratio,
        limit=_limit(log_ratio),
    )


def reduced(heat: Heatmap, *, max_steps: int, max_ranks: int) -> Heatmap:
    """Downsample to at most `max_steps` by `max_ranks` cells.

    Takes the median of adjacent steps, then of adjacent ranks the value farthest from 0, so that a
    single slow rank stays visible.
    """
    per_step, per_rank = -(-len(heat.steps) // max_steps), -(-len(heat.ranks) // max_ranks)
    starts = range(0, len(heat.steps), per_step)
    medians = np.stack([column_medians(heat.log_ratio[at : at + per_step]) for at in starts])
    cells = []
    for at in range(0, len(heat.ranks), per_rank):
        some = medians[:, at : at + per_rank]
        farthest = np.nan_to_num(np.abs(some), nan=-1.0).argmax(axis=1)
        cells.append(some[np.arange(len(some)), farthest])
    log_ratio = np.stack(cells, axis=1)
    return replace(
        heat,
        steps=heat.steps[::per_step],
        ranks=heat.ranks[::per_rank],
        log_ratio=log_ratio,
        limit=_limit(log_ratio),
        steps_per_cell=per_step,
        ranks_per_cell=per_rank,
    )


def _limit(log_ratio: Array) -> float:
    known = np.abs(log_ratio[np.isfinite(log_ratio)])
    return max(MIN_LIMIT, float(np.quantile(known, 0.995)) if len(known) else 0.0)
