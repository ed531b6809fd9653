"""Steps played rank by rank and layer by layer: what a planner forecasts is held against them."""

from dataclasses import replace

import pytest
from benchmarks.forecast_error import BAR, LINKS, figures, random_problem
from benchmarks.step_events import event_step_s

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import (
    Device,
    LayerCost,
    ModelCost,
    PartitionProblem,
)
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.layout import ShardRun
from pacekeeper.core.layout.pipeline_schedule import Schedule
from support.examples import seeds

LAYER = LayerCost(
    attention_s=1.0, mlp_s=2.0, replicated_s=0.5, attention_bytes=1.0, mlp_bytes=1.0,
    activation_bytes=1.0,
)  # fmt: skip


def problem_of(
    model: ModelCost, *pipelines: Pipeline, speeds: tuple[float, ...]
) -> PartitionProblem:
    devices = tuple(
        Device(rank=rank, node=0, memory_bytes=1e9, speed=speed)
        for rank, speed in enumerate(speeds)
    )
    baseline = Partition(pipelines=pipelines)
    return PartitionProblem(model=model, devices=devices, links=LINKS, baseline=baseline)


def cell(first: int, end: int, *ranks: int) -> StageShard:
    runs = tuple(ShardRun(rank, at, at + 1) for at, rank in enumerate(ranks))
    return StageShard(first_layer=first, end_layer=end, attention=runs, mlp=runs)


def test_one_device_computes_one_layer_after_the_other() -> None:
    model = ModelCost(
        layers=(LAYER, LAYER), num_attention_shards=1, num_mlp_shards=1, boundary_bytes=1.0,
        head_s=1.0, launch_s=0.25,
    )  # fmt: skip
    pipeline = Pipeline(cells=(cell(0, 2, 0),), micro_batches=(3, 1))
    problem = problem_of(model, pipeline, speeds=(0.5,))
    # Four rows of 2 x 3.5 and the head, and launches, at half speed; backwards take twice.
    assert event_step_s(problem.baseline, problem) == pytest.approx(
        3 * (4 * 8.0 + 2 * 2 * 0.25) / 0.5
    )


def test_a_tensor_group_waits_for_its_slowest_rank_twice_in_a_layer() -> None:
    model = ModelCost(layers=(LAYER,), num_attention_shards=2, num_mlp_shards=2, boundary_bytes=0.0)
    pipeline = Pipeline(cells=(cell(0, 1, 0, 1),), micro_batches=(1,))
    problem = problem_of(model, pipeline, speeds=(1.0, 0.5))
    sums_s = 2 * 2 * 2 * LINKS.inside_latency_s
    taken_s = 3 * ((0.25 + 0.5) / 0.5 + (0.25 + 1.0) / 0.5) + sums_s
    assert event_step_s(problem.baseline, problem) == pytest.approx(taken_s)


def test_pipelines_that_share_experts_wait_for_each_other_in_every_layer() -> None:
    layer = replace(LAYER, expert_s=4.0)
    model = ModelCost(
        layers=(layer,), num_attention_shards=1, num_mlp_shards=1, boundary_bytes=0.0,
        gradient_share=0.0,
    )  # fmt: skip
    pipelines = [
        Pipeline(cells=(cell(0, 1, rank),), micro_batches=rows, expert_group=0)
        for rank, rows in enumerate(((2, 1), (1, 2)))
    ]
    problem = problem_of(model, *pipelines, speeds=(1.0, 1.0))
    # In both micro-batches one of them has two rows; experts compute all three on two devices.
    sync_s = 2.0 * LINKS.inside_latency_s
    assert event_step_s(problem.baseline, problem) == pytest.approx(
        2 * 3 * (2 * 3.5 + 3 * 4.0 / 2) + sync_s
    )


def uneven(rank: int, heads: tuple[int, int], columns: tuple[int, int]) -> StageShard:
    """Both layers on two ranks, so many of the four heads and columns on each."""
    runs = [
        tuple(
            ShardRun(rank + at, first, end)
            for at, (first, end) in enumerate(((0, c[0]), (c[0], 4)))
        )
        for c in (heads, columns)
    ]
    return StageShard(first_layer=0, end_layer=2, attention=runs[0], mlp=runs[1])


@pytest.mark.parametrize(
    ("schedule", "backward_s"),
    # For weight gradients nobody waits: each pipeline has five shards' of them, not six.
    [(Schedule.ONE_F_ONE_B, 14.0), (Schedule.ZERO_BUBBLE, 13.0)],
)
def test_who_is_last_at_one_meeting_need_not_be_last_at_the_next(
    schedule: Schedule, backward_s: float
) -> None:
    attends = replace(LAYER, attention_s=4.0, mlp_s=0.0, replicated_s=0.0, expert_s=1.0)
    computes = replace(attends, attention_s=0.0, mlp_s=4.0)
    model = ModelCost(
        layers=(attends, computes), num_attention_shards=4, num_mlp_shards=4, boundary_bytes=0.0,
        gradient_share=0.0,
    )  # fmt: skip
    pipelines = [
        Pipeline(cells=(cell,), micro_batches=(1, 1), expert_group=0)
        for cell in (uneven(0, (3, 1), (2, 2)), uneven(2, (2, 2), (3, 1)))
    ]
    problem = problem_of(model, *pipelines, speeds=(1.0,) * 4)
    problem = replace(problem, baseline=replace(problem.baseline, schedule=schedule))
    # Each of them waits for three of four shards once: one in the first layer, one in the second.
    forward_s = 3.0 + 3.0 + 2 * 2 * 1.0 / 4
    played_s = event_step_s(problem.baseline, problem)
    assert played_s == pytest.approx(2 * (forward_s + backward_s), rel=1e-3)
    assert price(problem.baseline, problem).step_s == pytest.approx(played_s, rel=1e-3)


@pytest.mark.parametrize("seed", (5, 15, 28, 39, 45))
def test_a_plan_with_groups_of_several_kinds_is_priced_as_it_is_played(seed: int) -> None:
    problem = random_problem(seed)
    plan = plan_partition(problem)
    assert plan.step_s == pytest.approx(event_step_s(plan.partition, problem), rel=1e-3)


@pytest.mark.parametrize("seed", seeds(6))
def test_with_even_shards_the_planners_price_is_what_is_played(seed: int) -> None:
    problem = random_problem(seed)
    told_s = price(problem.baseline, problem).step_s
    assert told_s == pytest.approx(event_step_s(problem.baseline, problem), rel=1e-9)
    jittered_s = event_step_s(problem.baseline, problem, jitter=0.05, seed=1)
    assert jittered_s == event_step_s(problem.baseline, problem, jitter=0.05, seed=1) != told_s


def test_deviations_count_by_their_size() -> None:
    row = figures({"x": [0.01, -0.01, 0.0, -0.03]})["x"]
    assert (row["cases"], row["median"], row["most"]) == (4, 0.01, 0.03)
    assert row["mean"] == pytest.approx(-0.0075) and row["p95"] > BAR
