"""Rows by stage in plans: the micro-batches that the engine runs, in memory, and by their price."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from benchmarks.random_meshes import random_mesh
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.model.partition import Partition, Pipeline
from pacekeeper.controller.planning.model.problem import Links, PartitionProblem
from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.planning.partition.incremental import with_other_rows
from pacekeeper.controller.planning.partition.layout_codec import layout_of, partition_of
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.apportion import num_micro_batches
from pacekeeper.core.layout.layout import ExpertReplica
from pacekeeper.trainer.parallel.mesh.row_deal import micro_batches_of, rows_of_rank
from support.examples import examples
from support.partitions import FAST, even_partition, model_of, problem_of

MODEL = model_of(6, attention=8, expert_s=1.0)
ROWS, AT_ONCE = 24, 6  # of a pipeline


def problem(
    slow: dict[int, float], *, links: Links = FAST, memory_bytes: float = 1e15, tensor: int = 1
) -> PartitionProblem:
    """Two pipelines that share experts; without tensor groups of ranks 0 and 2, and of 1 and 3."""
    home = even_partition(
        MODEL, data=2, stages=2, tensor=tensor, rows=ROWS, micro_batches=4, shares_experts=True
    )
    found = problem_of(MODEL, home, slow=slow, links=links, memory_bytes=memory_bytes)
    return replace(found, rows_per_microbatch=AT_ONCE)


@pytest.mark.parametrize("seed", range(20))
def test_a_layout_is_priced_in_the_micro_batches_that_the_engine_runs(seed: int) -> None:
    chosen = Random(seed)
    experts = chosen.choice([2, 0])
    layout = random_mesh(range(8), [experts] * 3, 6, 1, chosen)
    num_rows, at_once = chosen.randint(12, 40), chosen.randint(1, 6)
    partition = partition_of(
        layout, num_rows=num_rows, num_microbatches=1, rows_per_microbatch=at_once
    )
    count = num_micro_batches(layout.most_rows(num_rows), at_once)
    for at, pipeline in enumerate(partition.pipelines):
        for stage in range(len(pipeline.cells)):
            rank = layout.pipelines[at].stages[stage].group[0]
            own = micro_batches_of(rows_of_rank(layout, rank, num_rows), count)
            sizes = [size for size in pipeline.batches_at(stage) if size]
            assert sizes == [len(places) for places in own.values()]


def test_each_plan_is_a_layout_with_the_same_rows_and_fits() -> None:
    drawn: Counter[bool] = Counter()

    @settings(deadline=None, max_examples=examples(20))
    @given(
        speeds=st.lists(st.sampled_from([1.0, 1.0, 0.6, 0.3]), min_size=8, max_size=8),
        memory_bytes=st.sampled_from([1e15, 1.6e10]),
        tensor=st.sampled_from([1, 2]),
    )
    def fits(speeds: list[float], memory_bytes: float, tensor: int) -> None:
        slow = dict(enumerate(speeds[: 4 * tensor]))
        given_problem = problem(slow, memory_bytes=memory_bytes, tensor=tensor)
        plan = plan_partition(given_problem)
        check_partition(plan.partition, given_problem)
        assert plan.step_s == pytest.approx(price(plan.partition, given_problem).step_s)
        assert plan.step_s <= price(given_problem.now, given_problem).step_s * (1.0 + 1e-9)
        assert _again(plan.partition) == _by_leader(plan.partition)
        drawn[plan.partition.has_rows_by_stage] += 1

    fits()
    assert drawn[True]


def _again(partition: Partition) -> list[Pipeline]:
    """The partition of its layout."""
    groups = partition.expert_groups()
    experts = [
        [tuple(ExpertReplica(rank, 1.0 / len(groups[0, stage])) for rank in groups[0, stage])]
        for stage, cell in enumerate(partition.pipelines[0].cells)
        for _ in range(cell.num_layers)
    ]
    layout = layout_of(partition, experts, generation=2)
    again = partition_of(layout, num_rows=2 * ROWS, num_microbatches=4, rows_per_microbatch=AT_ONCE)
    return _by_leader(again)


def _by_leader(partition: Partition) -> list[Pipeline]:
    return sorted(partition.pipelines, key=lambda one: one.cells[0].attention[0].rank)


def test_slow_ranks_of_two_pipelines_hand_rows_over_at_their_stages() -> None:
    """By pipeline alone there is nothing to gain: both are as slow."""
    slow = problem({0: 0.5, 3: 0.5})
    by_pipeline = with_other_rows(slow.now, replace(slow, rows_per_microbatch=0))
    by_stage = with_other_rows(slow.now, slow)
    assert not by_pipeline.has_rows_by_stage and by_stage.has_rows_by_stage
    assert price(by_stage, slow).step_s < 0.9 * price(by_pipeline, slow).step_s
    first, second = by_stage.pipelines
    assert [sum(first.batches_at(stage)) for stage in (0, 1)] == [16, 32]
    assert [sum(second.batches_at(stage)) for stage in (0, 1)] == [32, 16]


def test_one_slow_rank_costs_no_row_of_the_healthy_stages() -> None:
    slow = problem({0: 0.5})
    plan = plan_partition(slow)
    by_pipeline = plan_partition(replace(slow, rows_per_microbatch=0))
    assert plan.partition.has_rows_by_stage
    assert plan.step_s < 0.95 * by_pipeline.step_s


def test_stages_of_experts_alone_are_planned() -> None:
    layers = [replace(layer, attention_s=0.0) for layer in MODEL.layers[:3]]
    slow = problem({0: 0.5})
    model = replace(MODEL, layers=(*layers, *MODEL.layers[3:]))
    plan = plan_partition(replace(slow, model=model))
    check_partition(plan.partition, slow)


def test_links_that_cost_more_than_the_slow_ranks_keep_rows_in_their_pipeline() -> None:
    slow = {0: 0.5, 3: 0.5}
    free = with_other_rows(problem(slow).now, problem(slow))
    assert free.has_rows_by_stage
    far = Links(inside_bytes_per_s=1e3, between_bytes_per_s=1e3)
    dear = problem(slow, links=far)
    assert not with_other_rows(dear.now, dear).has_rows_by_stage
    # What travels is as much; but a stage sends to two, one after the other.
    assert price(free, dear).step_s > price(dear.now, dear).step_s


def test_rows_by_stage_are_all_rows_of_each_micro_batch() -> None:
    found = with_other_rows(problem({0: 0.5, 3: 0.5}).now, problem({0: 0.5, 3: 0.5}))
    first, second = found.pipelines
    lost = replace(first, stage_batches=(first.stage_batches[1], first.stage_batches[1]))
    with pytest.raises(ValueError, match="not all"):
        Partition(pipelines=(lost, second))
    with pytest.raises(ValueError, match="rows of each stage"):
        replace(first, stage_batches=first.stage_batches[:1])
