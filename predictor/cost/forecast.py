"""Forecasts the time of a step under a layout: the price that the planner compares.

Step = slowest dense part + for each layer the slowest expert part, because the all-to-alls around
the experts are barriers. A rank's seconds are the model's seconds divided by its speed.
`least_step_s` is a lower bound of the prices of all layouts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.expert_row_features import KNOTS
from pacekeeper.predictor.cost.features import BENDS, FEATURES, Array, Positions
from pacekeeper.predictor.cost.model import PRIOR_SHARES, CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds per step.

    Attributes:
        step_s: in total.
        dense_s: of each rank's dense part.
        layer_s: of each layer's experts.
        fixed_s: of every rank's fixed part at speed 1.
        expert_s: of the experts of each rank at speed 1.
    """

    step_s: float
    dense_s: Mapping[int, float]
    layer_s: tuple[float, ...]
    fixed_s: float
    expert_s: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of a step, independent of the layout. All but the loads are of the global batch.

    Every rank runs `num_microbatches` micro-batches, each of which launches the kernels and reads
    the weights of its experts again. `are_rows_microbatches`: a row is a whole micro-batch, and a
    rank runs as many as it has rows, with their rows of experts (`expert_rows`, `active_experts`:
    summed over micro-batches).
    """

    num_rows: int
    tokens: float
    sum_len_squared: float
    loads: tuple[tuple[float, ...], ...]
    num_microbatches: int = 1
    num_documents: float = 0.0
    head_tokens: float = 0.0
    expert_rows: float = 0.0
    active_experts: float = 0.0
    are_rows_microbatches: bool = False

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches: expected at least 1, got {self.num_microbatches}")


def forecast(
    layout: Layout,
    *,
    model: CostModel | None,
    workload: Workload,
    speeds: Mapping[int, float],
    expert_speeds: Mapping[int, float] | None = None,
) -> Forecast:
    """Price a layout.

    Args:
        layout: the layout.
        model: of the ranks' times; None: unit costs in the proportions of the prior, so that
            layouts can be compared.
        workload: of a step.
        speeds: 1 / slowdown by rank, 1.0 for a rank that is missing.
        expert_speeds: the same for rows of experts, including their messages; None: `speeds`.

    Raises:
        ValueError: the loads do not fit the layout's experts, or a speed is not above 0.
    """
    costs = _unit_costs(model, workload, len(layout.ranks))
    fixed, per_expert, dense_work = _fixed_and_dense_s(costs, workload)
    num_microbatches = workload.num_microbatches
    ranks = layout.working
    speed = np.array([speeds.get(rank, 1.0) for rank in ranks])
    if not (speed > 0.0).all():
        raise ValueError(f"speeds must be above 0, got {dict(speeds)}")
    at_rank_s, active = _expert_work(layout, workload, costs)
    rows_speed = speed
    if expert_speeds is not None:
        rows_speed = np.array([expert_speeds.get(rank, 1.0) for rank in ranks])
    layer_s = (at_rank_s / rows_speed).max(axis=1, initial=0.0).tolist()
    # These two costs apply to every micro-batch, as in the detector's sums over records.
    of_active = num_microbatches * per_expert * active
    dense = (
        num_microbatches * fixed + of_active + dense_work * _dense_parts(layout, workload.num_rows)
    ) / speed
    return Forecast(
        step_s=float(dense.max()) + sum(layer_s),
        dense_s=dict(zip(ranks, dense.tolist(), strict=True)),
        layer_s=tuple(layer_s),
        fixed_s=float(num_microbatches * costs[FEATURES.index("one")]),
        expert_s=dict(zip(ranks, (at_rank_s.sum(axis=0) + of_active).tolist(), strict=True)),
    )


def least_step_s(
    *,
    model: CostModel | None,
    workload: Workload,
    speeds: Mapping[int, float],
    counts: Iterable[int],
) -> float:
    """Return a lower bound of the forecasts of all layouts on some or all of these ranks.

    Each expert with rows has at least one replica, and its rows cost least if spread evenly over
    all ranks, because their price is convex; a rank with work pays the fixed cost of its
    micro-batches itself.

    Args:
        model: of the ranks' times, or None, as for `forecast`.
        workload: of a step; its own number of micro-batches is not used.
        speeds: of all ranks, above 0.
        counts: numbers of micro-batches that layouts may have, ascending.
    """
    rows = np.array([load for loads in workload.loads for load in loads], dtype=np.float64)
    active = int((rows > 0.0).sum())
    least_s = inf
    for count in counts:
        costs = _unit_costs(model, replace(workload, num_microbatches=count), len(speeds))
        fixed, per_expert, dense_work = _fixed_and_dense_s(costs, workload)
        expert_work = len(speeds) * float(_expert_s(costs, rows / len(speeds), count).sum())
        shared_s = (count * per_expert * active + dense_work + expert_work) / sum(speeds.values())
        bound_s = count * fixed / max(speeds.values()) + shared_s
        if bound_s > least_s:
            break  # convex in the number: it only rises from here
        least_s = bound_s
    return least_s


def _fixed_and_dense_s(costs: Array, workload: Workload) -> tuple[float, float, float]:
    """Seconds at speed 1: of a micro-batch, of an active expert in it, of the step's dense work."""
    fixed, per_token, per_square, per_row, per_expert, per_document, per_head = costs[: -len(BENDS)]
    dense_work = (
        per_token * workload.tokens
        + per_square * workload.sum_len_squared
        + per_document * workload.num_documents
        + per_head * workload.head_tokens
    )
    if workload.are_rows_microbatches:  # their fixed costs are divided like their rows
        dense_work += fixed * workload.num_rows
        dense_work += per_row * workload.expert_rows + per_expert * workload.active_experts
        fixed = 0.0
    return fixed, per_expert, dense_work


def _expert_work(layout: Layout, workload: Workload, costs: Array) -> tuple[Array, Array]:
    """Seconds of the experts' rows at speed 1 [layers, ranks], and active experts [ranks].

    Active experts are counted over all layers.
    """
    ranks = layout.working
    position = {rank: i for i, rank in enumerate(ranks)}
    seconds = np.zeros((len(workload.loads), len(ranks)))
    active = np.zeros(len(ranks))
    for layer, loads in enumerate(workload.loads):
        at, load = _held_replicas(layout, layer, loads, position)
        spent_s = _expert_s(costs, load, workload.num_microbatches)
        seconds[layer] = np.bincount(at, weights=spent_s, minlength=len(ranks))
        active += np.bincount(at[load > 0.0], minlength=len(ranks))
    return seconds, active


def _expert_s(costs: Array, rows: Array, num_microbatches: int) -> Array:
    """Seconds of experts with so many rows a step, divided evenly over the micro-batches."""
    per_row, bends = costs[FEATURES.index("expert_rows")], costs[-len(BENDS) :]
    beyond = np.maximum(rows[:, None] - num_microbatches * np.array(KNOTS, dtype=np.float64), 0.0)
    spent_s: Array = per_row * rows + beyond @ bends
    return spent_s


def row_s(model: CostModel | None, workload: Workload, layout: Layout) -> float:
    """Marginal seconds of one row at an expert, the mean over all rows."""
    costs, spent_s, rows = _unit_costs(model, workload, len(layout.ranks)), 0.0, 0.0
    position = {rank: i for i, rank in enumerate(layout.working)}
    for layer, loads in enumerate(workload.loads):
        _, load = _held_replicas(layout, layer, loads, position)
        more, less = (_expert_s(costs, load * by, workload.num_microbatches) for by in (1.01, 0.99))
        spent_s, rows = spent_s + float((more - less).sum()), rows + 0.02 * float(load.sum())
    return spent_s / rows if rows > 0.0 else float(costs[FEATURES.index("expert_rows")])


def replica_s(model: CostModel | None, workload: Workload, layout: Layout) -> float:
    """Seconds per step that one more expert costs its rank, without its rows."""
    costs = _unit_costs(model, workload, len(layout.ranks))
    return float(workload.num_microbatches * costs[FEATURES.index("num_active_experts")])


def _dense_parts(layout: Layout, num_rows: int) -> Array:
    """Fraction of the batch's dense work that each rank of the layout does [ranks].

    Its group's fraction of the rows times the fraction of the attention shards that it holds.
    """
    parts = dict.fromkeys(layout.working, 0.0)
    deepest = range(max(map(len, layout.mesh)))
    rows_at = [list(map(len, layout.rows_at(number, num_rows))) for number in deepest]
    for at, stages in enumerate(layout.mesh):
        for number, stage in enumerate(stages):
            rows = rows_at[number][at]
            for run in stage.attention:
                held = (run.end - run.first) / layout.num_attention_shards
                parts[run.rank] += held * rows / num_rows
    return np.array([parts[rank] for rank in layout.working])


def _held_replicas(
    layout: Layout, layer: int, loads: Sequence[float], position: Mapping[int, int]
) -> tuple[Positions, Array]:
    """Return, for each replica of one layer, the position of its rank and its token rows."""
    experts = layout.experts[layer]
    if len(experts) != len(loads):
        raise ValueError(f"layer {layer} has {len(experts)} experts, got {len(loads)} loads")
    at = [position[replica.rank] for replicas in experts for replica in replicas]
    load = [
        load * replica.share
        for replicas, load in zip(experts, loads, strict=True)
        for replica in replicas
    ]
    return np.array(at, dtype=np.intp), np.array(load, dtype=np.float64)


def _unit_costs(model: CostModel | None, workload: Workload, num_ranks: int) -> Array:
    """Seconds per unit of each feature, in the order of FEATURES; `num_ranks`: of the job."""
    if model is not None:
        return model.coefficients
    num_microbatches = workload.num_microbatches
    totals = np.ones(len(FEATURES))
    totals[:5] = (
        num_microbatches,
        workload.tokens / num_ranks,
        workload.sum_len_squared / num_ranks,
        sum(map(sum, workload.loads)) / num_ranks,
        num_microbatches * max(1.0, sum(map(len, workload.loads)) / num_ranks),
    )
    units: Array = PRIOR_SHARES / np.maximum(totals, 1.0)
    return units
