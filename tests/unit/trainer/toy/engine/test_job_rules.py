"""What every rank derives from the settings alone must not depend on where it runs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, ShardRun
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.layout.state_owners import assign_state_owners
from pacekeeper.trainer.toy.engine.job_rules import (
    apportion_rows,
    check_fits,
    first_layout,
    learning_rate,
    load_period_steps,
    model_shape,
)

CONFIG = TrainConfig(warmup_steps=4, learning_rate=0.1)
FIRST = first_layout(CONFIG, 4)


def test_the_learning_rate_warms_up_and_stays() -> None:
    assert [learning_rate(CONFIG, step) for step in range(6)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    )
    assert learning_rate(replace(CONFIG, warmup_steps=0), 0) == 0.1


def test_fewer_ranks_than_replicas_hold_everything_once() -> None:
    layout = first_layout(CONFIG, 1)
    assert all(len(hosts) == 1 for layer in layout.experts for hosts in layer)


@given(st.integers(0, 50), st.integers(0, 40), st.integers(1, 7))
def test_micro_batches_take_every_row_once_in_order(first: int, count: int, parts: int) -> None:
    rows = range(first, first + count)
    cut = apportion_rows(rows, parts)
    assert len(cut) == parts
    assert [row for part in cut for row in part] == list(rows)
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_a_large_models_loads_leave_room_in_the_ring() -> None:
    assert load_period_steps(TrainConfig(num_layers=4, num_experts=8)) == 1
    assert load_period_steps(TrainConfig(num_layers=61, num_experts=256)) == 4


def test_sizes_count_weights_and_both_moments() -> None:
    shape = model_shape(replace(CONFIG, slots_per_rank=0), 100)
    assert shape.expert_bytes == 3 * 4 * 2 * CONFIG.hidden_size * CONFIG.expert_hidden_size
    assert shape.dense_bytes == 3 * 4 * 100
    assert shape.slots_per_rank == CONFIG.num_experts, "0: memory for all of them"
    assert model_shape(replace(CONFIG, dtype="float64"), 100).dense_bytes == 3 * 8 * 100


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
def test_the_shape_reports_the_schedule_that_the_pipeline_runs(schedule: Schedule) -> None:
    assert model_shape(replace(CONFIG, schedule=str(schedule)), 100).schedule is schedule


def test_a_plan_this_trainer_can_not_follow_is_refused_with_a_reason() -> None:
    new = replace(FIRST, generation=2)
    check_fits(new, FIRST)
    other = even_layout(ranks=range(4), num_layers=4, num_experts=9, replicas=2, generation=2)
    with pytest.raises(ValueError, match="another model"):
        check_fits(other, FIRST)
    sharded = even_layout(
        ranks=range(4), num_layers=4, num_experts=8, replicas=2, num_virtual_shards=2, generation=2
    )
    with pytest.raises(ValueError, match="2 virtual shards, the job has 4"):
        check_fits(sharded, FIRST)
    with pytest.raises(ValueError, match="shared experts"):
        check_fits(replace(new, shared_mlp_layers=(0,)), FIRST)
    with pytest.raises(ValueError, match="owners"):
        check_fits(assign_state_owners(new), FIRST)


@pytest.mark.parametrize("part", ["cuts", "runs"])
def test_a_plan_with_pipelines_of_their_own_is_refused(part: str) -> None:
    config = replace(CONFIG, num_stages=2, tensor_size=2)
    first = first_layout(config, 8)
    own, other = first.pipelines
    one, two = own.stages
    if part == "cuts":
        stages = (replace(one, end_layer=1), replace(two, first_layer=1))
    else:
        ranks = [run.rank for run in one.mlp]
        stages = (replace(one, mlp=(ShardRun(ranks[0], 0, 1), ShardRun(ranks[1], 1, 4))), two)
    # Hosts that run their layer with either cut.
    hosts = (
        (ExpertReplica(other.stages[0].group[0], 1.0),),
        (ExpertReplica(other.stages[1].group[0], 1.0),),
    )
    half = first.num_layers // 2
    experts = tuple((hosts[n >= half],) * config.num_experts for n in range(first.num_layers))
    pipelines = replace(own, stages=stages), other
    new = replace(first, generation=2, pipelines=pipelines, experts=experts)
    with pytest.raises(ValueError, match="cuts of their own"):
        check_fits(new, first)
