"""A step played event by event, beside the longest path that planners price it by."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.model.problem import Links
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.simulator.jobs.pipeline_step import partition_step_s
from support.examples import examples
from support.partitions import even_partition, model_of, problem_of

SLOW_LINKS = Links(inside_bytes_per_s=1e7, between_bytes_per_s=1e6)
schedules = st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
speeds = st.dictionaries(st.integers(0, 15), st.sampled_from([0.3, 0.5, 0.8]), max_size=4)


@settings(max_examples=examples(25), deadline=None)
@given(speeds, schedules, st.sampled_from([False, True]))
def test_without_messages_a_planned_step_takes_what_is_forecast(
    slow: dict[int, float], schedule: Schedule, shares_experts: bool
) -> None:
    model = model_of(8, attention=8, mlp=64, expert_s=3.0 if shares_experts else 0.0)
    baseline = even_partition(
        model, data=2, stages=2, tensor=4, rows=64, micro_batches=4, shares_experts=shares_experts
    )
    problem = problem_of(model, baseline, slow=slow, schedule=schedule)
    for partition in (problem.baseline, plan_partition(problem).partition):
        forecast_s = price(partition, problem).step_s
        assert partition_step_s(partition, problem) == pytest.approx(forecast_s, rel=1e-9)


@settings(max_examples=examples(25), deadline=None)
@given(speeds, schedules)
def test_messages_that_wait_for_their_link_only_add_to_the_longest_path(
    slow: dict[int, float], schedule: Schedule
) -> None:
    model = model_of(8, attention=8, mlp=64)
    baseline = even_partition(model, data=2, stages=4, tensor=2, rows=64, micro_batches=8)
    problem = problem_of(model, baseline, slow=slow, links=SLOW_LINKS, schedule=schedule)
    baseline = problem.baseline
    forecast_s = price(baseline, problem).step_s
    assert partition_step_s(baseline, problem) >= forecast_s * (1.0 - 1e-9)


def test_a_link_carries_one_message_after_the_other() -> None:
    model = model_of(2, attention=1, mlp=1)
    baseline = even_partition(model, data=1, stages=2, tensor=1, rows=8, micro_batches=8)
    links = Links(inside_bytes_per_s=1e4, between_bytes_per_s=1e4)  # 100 s a micro-batch
    problem = problem_of(model, baseline, links=links, schedule=Schedule.ZERO_BUBBLE)
    baseline = problem.baseline
    # Forward of one row takes 4 s; the last of eight messages has waited for the other seven.
    assert partition_step_s(baseline, problem) > 8 * 100.0 + 100.0 > price(baseline, problem).step_s
