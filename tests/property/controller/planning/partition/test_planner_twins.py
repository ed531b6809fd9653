"""The exact parts of the partition's planner against trying everything."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.model.partition import Partition, Pipeline
from pacekeeper.controller.planning.model.problem import Device, LayerCost, ModelCost
from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.planning.partition.layer_split import best_stage_boundaries
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition.row_split import micro_batches, share_rows
from pacekeeper.controller.planning.partition.shard_split import split_shards
from pacekeeper.controller.planning.partition_cost.compute import (
    Array,
    group_cost,
    halves_s,
    layer_sums,
)
from pacekeeper.controller.planning.partition_cost.stage_times import PipelineTimes
from pacekeeper.controller.planning.partition_cost.step_time import closed_ends, path_ends, price
from pacekeeper.core.layout.pipeline_schedule import Schedule
from support.examples import examples
from support.partitions import FAST, even_partition, model_of, problem_of, runs_of, with_cuts

speeds = st.floats(0.2, 1.0)


@given(
    num_shards=st.integers(1, 8),
    of_ranks=st.lists(st.tuples(speeds, st.integers(0, 8)), min_size=1, max_size=4),
)
def test_no_other_shards_are_faster(num_shards: int, of_ranks: list[tuple[float, int]]) -> None:
    pace, limits = [speed for speed, _ in of_ranks], [most for _, most in of_ranks]
    every = [
        max(count / speed for count, speed in zip(counts, pace, strict=True))
        for counts in product(*(range(most + 1) for most in limits))
        if sum(counts) == num_shards
    ]
    if not every:
        with pytest.raises(ValueError, match="do not fit"):
            split_shards(num_shards, pace, limits)
        return
    counts = split_shards(num_shards, pace, limits)
    assert sum(counts) == num_shards
    assert all(count <= most for count, most in zip(counts, limits, strict=True))
    slowest = max(count / speed for count, speed in zip(counts, pace, strict=True))
    assert slowest == pytest.approx(min(every))


times = st.floats(0.0, 3.0)


@given(
    ranks=st.lists(
        st.tuples(speeds, st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4
    ).filter(lambda ranks: sum(heads for _, heads, _ in ranks) and sum(c for *_, c in ranks)),
    layers=st.lists(st.tuples(st.floats(0.1, 3.0), times, times), min_size=1, max_size=4),
    ends_s=st.tuples(times, times),
)
def test_a_group_waits_for_the_slowest_of_its_ranks_twice_in_each_layer(
    ranks: list[tuple[float, int, int]],
    layers: list[tuple[float, float, float]],
    ends_s: tuple[float, float],
) -> None:
    """Rank by rank and layer by layer: shards, with half of what all do before each meeting."""
    members = [rank for rank, (_, heads, columns) in enumerate(ranks) if heads or columns]
    heads, columns = [heads for _, heads, _ in ranks], [columns for *_, columns in ranks]
    model = ModelCost(
        layers=tuple(
            LayerCost(
                attention_s=attention_s,
                mlp_s=mlp_s,
                replicated_s=replicated_s,
                attention_bytes=0.0,
                mlp_bytes=0.0,
                activation_bytes=0.0,
            )
            for attention_s, mlp_s, replicated_s in layers
        ),
        num_attention_shards=sum(heads),
        num_mlp_shards=sum(columns),
        boundary_bytes=0.0,
        embedding_s=ends_s[0],
        head_s=ends_s[1],
    )
    group = group_cost(
        runs_of(range(len(ranks)), heads),
        runs_of(range(len(ranks)), columns),
        model,
        FAST,
        {
            at: Device(rank=at, node=0, memory_bytes=1.0, speed=s)
            for at, (s, *_) in enumerate(ranks)
        },
    )
    told, taken_s = halves_s(layer_sums(model, FAST), group), 0.0
    for at, (attention_s, mlp_s, replicated_s) in enumerate(layers):
        all_mlp_s = mlp_s + (at == 0) * ends_s[0] + (at == len(layers) - 1) * ends_s[1]
        for counts, cut_s in ((heads, attention_s), (columns, all_mlp_s)):
            taken_s += max(
                (cut_s * counts[rank] / sum(counts) + 0.5 * replicated_s) / ranks[rank][0]
                for rank in members
            )
        assert told[at + 1] == pytest.approx(taken_s)


@st.composite
def stage_costs(draw: st.DrawFn) -> list[Array]:
    """Of stages that differ in speed, layers that differ in work, and some that do not fit."""
    layers = draw(st.lists(st.integers(1, 5), min_size=2, max_size=7))
    num_stages = draw(st.integers(1, min(4, len(layers))))
    ends = np.concatenate([[0.0], np.cumsum(layers)])
    costs = []
    for _ in range(num_stages):
        most, speed = draw(st.integers(1, len(layers))), draw(st.sampled_from([1.0, 0.7, 0.5]))
        table = np.full((len(ends), len(ends)), np.inf)
        for first in range(len(ends)):
            for end in range(first + 1, min(first + most, len(layers)) + 1):
                table[first, end] = (ends[end] - ends[first]) / speed
        costs.append(table)
    return costs


@given(costs=stage_costs(), num_microbatches=st.integers(1, 6))
def test_no_other_cuts_are_faster(costs: list[Array], num_microbatches: int) -> None:
    num_layers = costs[0].shape[0] - 1

    def value(ends: tuple[int, ...]) -> float:
        firsts = (0, *ends[:-1])
        stages = [
            float(cost[first, end]) for cost, first, end in zip(costs, firsts, ends, strict=True)
        ]
        is_fit = np.isfinite(max(stages))
        return sum(stages) + (num_microbatches - 1) * max(stages) if is_fit else np.inf

    every = [
        value((*inner, num_layers)) for inner in combinations(range(1, num_layers), len(costs) - 1)
    ]
    found = best_stage_boundaries(costs, num_microbatches)
    if not np.isfinite(min(every)):
        assert found is None
    else:
        assert found is not None
        assert found.value == pytest.approx(value(found.ends))
        assert found.value == pytest.approx(min(every))


@given(
    total=st.integers(3, 14),
    units=st.lists(st.tuples(st.floats(0.5, 3.0), st.floats(0.0, 4.0)), min_size=1, max_size=3),
)
def test_no_other_rows_are_faster(total: int, units: list[tuple[float, float]]) -> None:
    slopes, constants = [s for s, _ in units], [c for _, c in units]

    def slowest(counts: tuple[int, ...]) -> float:
        return max(n * s + c for n, s, c in zip(counts, slopes, constants, strict=True))

    counts = share_rows(total, slopes, constants, [1] * len(units))
    assert sum(counts) == total and min(counts) >= 1
    every = [
        slowest(some)
        for some in product(range(1, total + 1), repeat=len(units))
        if sum(some) == total
    ]
    assert slowest(counts) == pytest.approx(min(every))


@given(rows=st.integers(1, 40), per_batch=st.integers(1, 6), number=st.integers(1, 6))
def test_micro_batches_are_even_and_no_larger_than_at_home(
    rows: int, per_batch: int, number: int
) -> None:
    sizes = micro_batches(rows, per_batch=per_batch, num_microbatches=number)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= per_batch
    assert len(sizes) >= min(rows, number)


@settings(deadline=None)
@given(
    stages=st.lists(st.sampled_from([0.9, 1.0, 1.1, 1.3, 1.6]), min_size=1, max_size=10),
    num_microbatches=st.integers(1, 24),
    message=st.sampled_from([0.0, 0.01, 0.05]),
)
def test_the_closed_form_is_within_four_percent_of_the_longest_path(
    stages: list[float], num_microbatches: int, message: float
) -> None:
    num_microbatches = max(num_microbatches, (len(stages) + 1) // 2)
    own = np.repeat(np.array(stages)[:, None], num_microbatches, axis=1)
    times = PipelineTimes(
        forward_s=own,
        backward_s=own,
        weight_s=own,
        message_s=np.full((len(stages) - 1, num_microbatches), message),
        sync_s=np.zeros(len(stages)),
        cuts=tuple(range(1, len(stages) + 1)),
        schedule=Schedule.ONE_F_ONE_B,
    )
    exact = path_ends(times)
    assert closed_ends(times).max() == pytest.approx(exact.max(), rel=0.04)


@settings(deadline=None, max_examples=examples(12))
@given(
    pace=st.lists(st.sampled_from([1.0, 1.0, 0.7, 0.45, 0.3]), min_size=4, max_size=4),
    num_layers=st.integers(2, 5),
)
def test_a_plan_is_nearly_the_best_of_all(pace: list[float], num_layers: int) -> None:
    """Two pipelines of two stages of one rank: every order of ranks, cut and share of rows."""
    model = model_of(num_layers)
    baseline = even_partition(model, data=2, stages=2, tensor=1, rows=16, micro_batches=4)
    problem = problem_of(model, baseline, slow=dict(enumerate(pace)))
    plan = plan_partition(problem)
    check_partition(plan.partition, problem)
    assert plan.step_s == pytest.approx(price(plan.partition, problem).step_s)
    best = min(
        price(
            Partition(
                pipelines=tuple(
                    Pipeline(
                        cells=with_cuts(model, ranks, (cut, num_layers)),
                        micro_batches=micro_batches(rows, per_batch=4, num_microbatches=4),
                    )
                    for ranks, cut, rows in (
                        (order[:2], cuts[0], first),
                        (order[2:], cuts[1], 32 - first),
                    )
                )
            ),
            problem,
        ).step_s
        for order in ((0, 2, 1, 3), (0, 3, 1, 2), (2, 0, 3, 1), (0, 1, 2, 3))
        for cuts in product(range(1, num_layers), repeat=2)
        for first in range(4, 29, 3)
    )
    assert plan.step_s <= 1.1 * best
