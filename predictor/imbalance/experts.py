"""How unevenly experts are loaded, from the times of expert layers or from recorded loads.

Groups of ranks that hold the same experts are different devices with the same routing. The common
part of their times of one layer, relative to the other layers of the same step, is due to routing:
a slow device, host or network would not affect the same layer in another group.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.recorded.trace import ComputeTable, ExpertLoadTable, Worker
from pacekeeper.predictor.stats.group_ids import grouped

EVENEST = 0.05  # quantile of the layers' times that represents evenly loaded experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSpread:
    """Evidence that routing loads the experts unevenly, and its size.

    Attributes:
        correlation: of two groups' times of a layer.
        p_value: of the correlation, if the groups were independent.
        num_groups: that were compared.
        factors: [rows] factors that would make all expert layers as fast as the evenest ones.
    """

    correlation: float
    p_value: float
    num_groups: int
    factors: Array


def expert_spread(
    table: ComputeTable, workers: tuple[Worker, ...], groups: tuple[tuple[int, ...], ...]
) -> ExpertSpread | None:
    """Correlate the expert-layer times of groups that hold the same experts.

    Args:
        table: times of expert layers; `model_chunk` counts layers within a stage.
        workers: places of the ranks.
        groups: the ranks of each expert-parallel group.

    Returns:
        None if no two groups hold the same experts (have the same stage), or with fewer than two
        layers or three steps: a slow device is then indistinguishable from loaded experts.
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
    role, _ = grouped(stage, chunk)
    log_s = np.log(table.compute_s[kept])
    changes, levels, most = _Agreement(), _Agreement(), 0
    for number in range(int(role.max()) + 1):
        mine = np.flatnonzero(role == number)
        cube = _cube(step[mine], layer[mine], group[mine], log_s[mine])
        cube = cube[:, :, np.isfinite(cube).all(axis=(0, 1))]
        num_groups, num_layers, num_steps = cube.shape
        if num_groups < 2 or num_layers < 2 or num_steps < 3:
            continue
        relative = (cube - cube.mean(axis=1, keepdims=True))[:, : num_layers - 1]
        # A drift has few degrees of freedom over any number of steps: test its changes.
        changes.add(np.diff(relative, axis=2))
        levels.add(relative)
        most = max(most, num_groups)
    if not most or changes.correlation is None or levels.correlation is None:
        return None
    cell, first = grouped(stage, chunk, layer, step)
    common = np.bincount(cell, log_s) / np.bincount(cell)
    excess = np.zeros(len(first))
    for own in np.unique(chunk):
        of_chunk = chunk[first] == own
        even = np.quantile(common[of_chunk], EVENEST)
        excess[of_chunk] = np.maximum(common[of_chunk] - even, 0.0)
    shared = max(levels.correlation, 0.0)
    trust = most * shared / (1.0 + (most - 1) * shared)  # of the mean of so many groups
    factors = np.ones(len(table.step))
    factors[kept] = np.exp(-trust * excess)[cell]
    return ExpertSpread(
        correlation=levels.correlation,
        p_value=float(norm.sf(changes.correlation * np.sqrt(changes.num_pairs))),
        num_groups=most,
        factors=factors,
    )


@dataclass(slots=True)
class _Agreement:
    """Sums of the covariance and variance of groups."""

    covariance: float = 0.0
    variance: float = 0.0
    num_pairs: int = 0

    def add(self, values: Array) -> None:
        """Add values [groups, layers, steps], centred on their means over the steps."""
        num_groups = len(values)
        flat = (values - values.mean(axis=2, keepdims=True)).reshape(num_groups, -1)
        gram = flat @ flat.T
        self.covariance += float(gram.sum() - np.trace(gram)) / 2.0
        self.variance += float(np.trace(gram)) * (num_groups - 1) / 2.0
        self.num_pairs += flat.shape[1] * num_groups * (num_groups - 1) // 2

    @property
    def correlation(self) -> float | None:
        return self.covariance / self.variance if self.variance > 0.0 else None


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


def _cube(step: Positions, layer: Positions, group: Positions, log_s: Array) -> Array:
    """Mean of the ranks of each group [groups, layers, steps]; NaN where nothing was recorded."""
    at = [grouped(column)[0] for column in (group, layer, step)]
    shape = tuple(int(column.max()) + 1 for column in at)
    cell = np.ravel_multi_index(at, shape)
    size = int(np.prod(shape))
    with np.errstate(invalid="ignore"):
        mean: Array = np.bincount(cell, log_s, size) / np.bincount(cell, minlength=size)
    return mean.reshape(shape)
