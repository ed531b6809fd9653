"""What a step would take under a layout: the price the planner compares. Pure.

Iteration = slowest dense part + per layer the slowest expert part: the all-to-alls around the
experts are barriers. Seconds at a rank are the model's seconds divided by the rank's speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.core.layout import Layout
from pacekeeper.predictor.cost_model import PRIOR_SHARES, CostModel
from pacekeeper.predictor.workload import Array, Positions

ExpertLoads = Sequence[Sequence[float]]  # [layer][expert] token rows per step


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds per step. `fluid_step_s`: if all work could be split at will over the speeds."""

    step_s: float
    fluid_step_s: float
    dense_s: Mapping[int, float]
    layer_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step has to do, whoever does it. Rows, tokens and squares are of the global batch.

    Every rank runs `num_microbatches` of them: each starts its kernels and reads its experts anew.
    """

    num_rows: int
    tokens: float
    sum_len_squared: float
    loads: tuple[tuple[float, ...], ...]
    num_microbatches: int = 1

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches: expected at least 1, got {self.num_microbatches}")


def forecast(
    layout: Layout,
    *,
    model: CostModel | None,
    workload: Workload,
    speeds: Mapping[int, float],
    overhead_s: float = 0.0,
) -> Forecast:
    """Price a layout: speeds are 1 / slowdown, 1.0 for a rank that is not named.

    Without a model: unit costs in the proportions of the prior, so that layouts can be compared.
    Raises ValueError where the loads do not fit the layout's experts, or a speed is not above 0.
    """
    fixed, per_token, per_square, per_row, per_expert = unit_costs(model, workload, layout)
    ranks = layout.ranks
    position = {rank: i for i, rank in enumerate(ranks)}
    speed = np.array([speeds.get(rank, 1.0) for rank in ranks])
    if not (speed > 0.0).all():
        raise ValueError(f"speeds must be above 0, got {dict(speeds)}")
    rows = layout.rows_of(workload.num_rows)
    share = np.array([rows.get(rank, 0) / workload.num_rows for rank in ranks])
    active = np.zeros(len(ranks))
    layer_s, expert_work_s = [], 0.0
    for layer, loads in enumerate(workload.loads):
        at, load = _hosted(layout, layer, loads, position)
        load_at = np.bincount(at, weights=load, minlength=len(ranks))
        layer_s.append(float((per_row * load_at / speed).max()))
        expert_work_s += per_row * float(sum(loads))
        active += np.bincount(at[load > 0.0], minlength=len(ranks))
    dense_work = per_token * workload.tokens + per_square * workload.sum_len_squared
    # As the detector adds up the records: these two are paid in every micro-batch.
    standing = workload.num_microbatches * (fixed + per_expert * active)
    dense = (standing + dense_work * share) / speed
    standing_s = float(standing.mean())  # paid by each rank, not shared
    fluid_s = standing_s + (dense_work + expert_work_s) / float(speed.sum())
    return Forecast(
        step_s=overhead_s + float(dense.max()) + sum(layer_s),
        fluid_step_s=overhead_s + fluid_s,
        dense_s=dict(zip(ranks, dense.tolist(), strict=True)),
        layer_s=tuple(layer_s),
    )


def _hosted(
    layout: Layout, layer: int, loads: Sequence[float], position: Mapping[int, int]
) -> tuple[Positions, Array]:
    """Every replica of one layer: the position of its rank, and the token rows it computes."""
    experts = layout.experts[layer]
    if len(experts) != len(loads):
        raise ValueError(f"layer {layer} has {len(experts)} experts, got {len(loads)} loads")
    at = [position[host.rank] for hosts in experts for host in hosts]
    load = [load * host.share for hosts, load in zip(experts, loads, strict=True) for host in hosts]
    return np.array(at, dtype=np.intp), np.array(load, dtype=np.float64)


def unit_costs(model: CostModel | None, workload: Workload, layout: Layout) -> Array:
    """Seconds per micro-batch, token, token^2, expert row, active expert of a micro-batch."""
    if model is not None:
        return model.coefficients
    num_ranks = len(layout.ranks)
    totals = np.array(
        [
            1.0,
            workload.tokens / num_ranks,
            workload.sum_len_squared / num_ranks,
            sum(map(sum, workload.loads)) / num_ranks,
            sum(len(layer) for layer in layout.experts) / num_ranks,
        ]
    )
    often = workload.num_microbatches
    units: Array = PRIOR_SHARES / np.maximum(totals, 1.0) / np.array([often, 1, 1, 1, often])
    return units
