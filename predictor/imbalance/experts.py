"""How unevenly experts are loaded, from the times of expert layers or from recorded loads.

Groups of ranks that hold the same experts are different devices with the same routing. The common
part of their times of one layer, relative to the other layers of the same step, is due to routing:
a slow device, host or network would not affect the same layer in another group.
"""

from dataclasses import replace

import numpy as np

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.imbalance.agreement import Agreement, agreement, centre
from pacekeeper.predictor.recorded.trace import ComputeTable, ExpertLoadTable, Worker
from pacekeeper.predictor.stats.group_ids import grouped

EVENEST = 0.05  # quantile of the layers' times that represents evenly loaded experts


def expert_spread(
    table: ComputeTable, workers: tuple[Worker, ...], groups: tuple[tuple[int, ...], ...]
) -> tuple[Array, Agreement] | None:
    """Compare the expert-layer times of groups that hold the same experts.

    Args:
        table: times of expert layers; `model_chunk` counts layers within a stage.
        workers: places of the ranks.
        groups: the ranks of each expert-parallel group.

    Returns:
        Factors [rows] that would make all expert layers as fast as the evenest ones, and the
        agreement of the groups. None if no two groups hold the same experts (have the same stage),
        or with fewer than two layers or three steps: a slow device is then indistinguishable from
        loaded experts.
    """
    stage_of = {worker.rank: worker.stage for worker in workers}
    group_of = {rank: at for at, ranks in enumerate(groups) for rank in ranks if rank in stage_of}
    kept = np.flatnonzero(table.usable(group_of))
    if not len(kept):
        return None
    ranks = table.rank[kept].tolist()
    group = np.array([group_of[rank] for rank in ranks], dtype=np.intp)
    stage = np.array([stage_of[rank] for rank in ranks], dtype=np.intp)
    chunk, layer, step = (c[kept] for c in (table.chunk, table.model_chunk, table.step))
    log_s = np.log(table.compute_s[kept])
    # The views of a cell (one layer in one step) are the groups of its stage.
    cell, first = grouped(stage, chunk, layer, step)
    seat, first_of_seat = grouped(stage, group)
    view = seat - np.searchsorted(stage[first_of_seat], stage)
    shape = len(first), int(view.max()) + 1
    at = cell * shape[1] + view
    with np.errstate(invalid="ignore"):
        views = np.bincount(at, log_s, np.prod(shape)) / np.bincount(at, minlength=np.prod(shape))
    views = views.reshape(shape)
    # Only steps that all layers of a stage were recorded in, by all groups.
    role, _ = grouped(stage[first], chunk[first])
    line, first_of_line = grouped(role, layer[first])
    moment, _ = grouped(role, step[first])
    num_layers = np.bincount(role[first_of_line])
    seen = np.bincount(moment, np.isfinite(views).all(axis=1))
    whole = seen[moment] == num_layers[role]
    relative = centre(views[whole], moment[whole])
    free = line[whole] < np.cumsum(num_layers)[role[whole]] - 1  # the last layer is the others' sum
    relative, line = relative[free], line[whole][free]
    # A drift has few degrees of freedom over any number of steps: test its changes.
    follows = line[1:] == line[:-1]
    changes = agreement(np.diff(relative, axis=0)[follows], line[1:][follows])
    levels = agreement(relative, line)
    if changes is None or levels is None:
        return None
    common = np.bincount(cell, log_s) / np.bincount(cell)
    excess = np.zeros(len(first))
    for own in np.unique(chunk):
        of_chunk = chunk[first] == own
        even = np.quantile(common[of_chunk], EVENEST)
        excess[of_chunk] = np.maximum(common[of_chunk] - even, 0.0)
    factors = np.ones(len(table.step))
    factors[kept] = np.exp(-levels.trust * excess)[cell]
    return factors, replace(levels, p_value=changes.p_value)


def load_excess(loads: ExpertLoadTable) -> Array:
    """Rows of the busiest expert of a layer over the layer's mean, averaged over layers [steps]."""
    cell, first = grouped(loads.step, loads.layer)
    most = np.zeros(len(first))
    np.maximum.at(most, cell, loads.rows)
    mean = np.bincount(cell, loads.rows) / np.bincount(cell)
    good = mean > 0.0
    step, _ = grouped(loads.step[first][good])
    excess: Array = np.bincount(step, most[good] / mean[good]) / np.bincount(step)
    return excess
