"""Whatever is slow or dead: a plan keeps the rules, is no worse than nothing, and is the same."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.model.partition import Partition, PartitionPlan
from pacekeeper.controller.planning.model.problem import ModelCost, PartitionProblem
from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.planning.partition.layout_codec import layout_of
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from support.examples import examples
from support.partitions import even_partition, model_of, problem_of

DENSE, MOE = model_of(6, attention=8, mlp=16), model_of(6, attention=8, expert_s=3.0)


def home_of(model: ModelCost) -> Partition:
    return even_partition(
        model,
        data=2,
        stages=2,
        tensor=2,
        rows=12,
        micro_batches=3,
        shares_experts=model.has_experts,
    )


def test_every_plan_keeps_its_promises() -> None:
    drawn: Counter[str] = Counter()

    @settings(deadline=None, max_examples=examples(30))
    @given(
        model=st.sampled_from([DENSE, MOE]),
        speeds=st.lists(
            st.sampled_from([1.0, 1.0, 1.0, 0.6, 0.3, 0.05, 0.0]), min_size=8, max_size=8
        ),
        ranks_per_node=st.sampled_from([2, 4, 8]),
        memory_bytes=st.sampled_from([1e15, 1.6e10]),
        schedule=st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE]),
    )
    def keeps_its_promises(
        model: ModelCost,
        speeds: list[float],
        ranks_per_node: int,
        memory_bytes: float,
        schedule: Schedule,
    ) -> None:
        problem = problem_of(
            model,
            home_of(model),
            slow=dict(enumerate(speeds)),
            ranks_per_node=ranks_per_node,
            memory_bytes=memory_bytes,
            schedule=schedule,
        )
        if not any(speeds):
            with pytest.raises(ValueError):
                plan_partition(problem)
            return
        try:
            plan = plan_partition(problem)
        except ValueError:
            assert memory_bytes < 1e15, "a single living rank is enough where memory is"
            drawn["refused"] += 1
            return
        check_plan(plan, problem, speeds)
        if model is DENSE:
            layout = check_sayable(plan.partition, len(model.layers))
            drawn["irregular"] += not layout.has_equal_cuts or any(
                stage.attention != stage.mlp for stages in layout.mesh for stage in stages
            )
            drawn["dense"] += 1
        drawn["planned"] += 1
        drawn["changed"] += plan.partition != problem.baseline
        drawn["dead"] += not all(speeds)

    keeps_its_promises()
    assert drawn["planned"] > drawn["refused"]
    assert min(drawn["changed"], drawn["dead"]) >= 0.2 * drawn["planned"]
    assert drawn["irregular"] >= 0.2 * drawn["dense"]


def check_sayable(partition: Partition, num_layers: int) -> Layout:
    """A layout says where each shard and row of the partition is."""
    layout = layout_of(partition, ((),) * num_layers, generation=1)
    leaders = [pipeline.leader for pipeline in layout.pipelines]
    rows = layout.rows_of(partition.rows_per_step)
    for pipeline in partition.pipelines:
        (leader,) = set(leaders) & set(pipeline.cells[0].ranks)
        assert rows[leader] == pipeline.rows
        stages = layout.pipelines[layout.place_of(leader)[1]].stages
        for cell, stage in zip(pipeline.cells, stages, strict=True):
            assert (cell.first_layer, cell.end_layer) == (stage.first_layer, stage.end_layer)
            assert cell.attention == tuple(run for run in stage.attention if run.end > run.first)
            assert cell.mlp == tuple(run for run in stage.mlp if run.end > run.first)
    return layout


@pytest.mark.parametrize("model", [DENSE, MOE])
def test_slow_ranks_lose_work(model: ModelCost) -> None:
    """Two of eight devices at 0.3: a plan is a quarter faster than the healthy partition."""
    problem = problem_of(model, home_of(model), slow={1: 0.3, 6: 0.3})
    plan = plan_partition(problem)
    assert plan.step_s < 0.75 * price(problem.baseline, problem).step_s
    check_plan(plan, problem, [0.3 if rank in (1, 6) else 1.0 for rank in range(8)])


def check_plan(plan: PartitionPlan, problem: PartitionProblem, speeds: list[float]) -> None:
    check_partition(plan.partition, problem)
    assert plan == plan_partition(problem)
    assert plan.step_s == pytest.approx(price(plan.partition, problem).step_s)
    if all(speeds):
        assert plan.step_s <= price(problem.baseline, problem).step_s * (1.0 + 1e-9)
    assert plan.evicted == tuple(rank for rank in range(8) if speeds[rank] == 0.0)
    work = {*plan.partition.ranks}
    assert work.isdisjoint(plan.evicted) and work.isdisjoint(plan.standby)
    assert set(plan.evicted).isdisjoint(plan.standby)
    assert work | {*plan.evicted, *plan.standby} == set(range(8))
