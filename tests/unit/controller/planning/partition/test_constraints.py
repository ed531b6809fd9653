"""What a partition may not be, and how much memory it takes, by hand."""

import warnings
from dataclasses import replace
from math import inf

import pytest

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import Device, Links, MovePrices
from pacekeeper.controller.planning.partition.constraints import check_lock_step, check_partition
from pacekeeper.controller.planning.partition.row_split import share_rows
from pacekeeper.controller.planning.partition_cost.memory import memory_bytes
from pacekeeper.core.layout.layout import ShardRun
from support.partitions import even_partition, model_of, problem_of, runs_of

DENSE = model_of(4)
MOE = model_of(4, expert_s=3.0)


def moe_partition() -> Partition:
    return even_partition(
        MOE, data=2, stages=2, tensor=1, rows=8, micro_batches=4, shares_experts=True
    )


def other_cut(partition: Partition) -> Partition:
    """The second pipeline with one layer more in its first stage."""
    first, second = partition.pipelines
    one, two = second.cells
    cells = (replace(one, end_layer=3), replace(two, first_layer=3))
    return Partition(pipelines=(first, replace(second, cells=cells)))


def test_the_ranks_that_share_experts_are_those_of_one_stage() -> None:
    assert moe_partition().expert_groups() == {(0, 0): (0, 1), (0, 1): (2, 3)}


def test_pipelines_that_share_experts_run_the_same_layers() -> None:
    baseline = moe_partition()
    check_partition(baseline, problem_of(MOE, baseline))
    with pytest.raises(ValueError, match=r"share experts, but their stages end at \(2, 4\)"):
        check_partition(other_cut(baseline), problem_of(MOE, baseline))


def test_pipelines_that_share_experts_run_as_many_micro_batches_of_other_sizes() -> None:
    first, second = moe_partition().pipelines
    uneven = replace(second, micro_batches=(1, 1, 1, 5))
    check_lock_step(Partition(pipelines=(first, uneven)), has_experts=True)
    fewer = replace(second, micro_batches=(2, 3, 3))
    with pytest.raises(ValueError, match="run 4 and 3 micro-batches"):
        check_lock_step(Partition(pipelines=(first, fewer)), has_experts=True)


def test_pipelines_that_share_no_experts_may_differ() -> None:
    baseline = even_partition(DENSE, data=2, stages=2, tensor=1, rows=8, micro_batches=4)
    check_partition(other_cut(baseline), problem_of(DENSE, baseline))
    first, second = other_cut(moe_partition()).pipelines
    apart = Partition(pipelines=(first, replace(second, expert_group=1)))
    check_lock_step(apart, has_experts=True)


def test_a_pipeline_with_experts_names_its_expert_group() -> None:
    first, second = moe_partition().pipelines
    with pytest.raises(ValueError, match="names no expert group"):
        check_lock_step(
            Partition(pipelines=(first, replace(second, expert_group=None))), has_experts=True
        )


def test_the_dead_have_no_work_and_no_row_is_lost() -> None:
    baseline = even_partition(DENSE, data=2, stages=1, tensor=2, rows=8, micro_batches=4)
    with pytest.raises(ValueError, match=r"ranks \[3\] are dead"):
        check_partition(baseline, problem_of(DENSE, baseline, slow={3: 0.0}))
    fewer = replace(baseline.pipelines[0], micro_batches=(2, 2, 2, 1))
    with pytest.raises(ValueError, match="15 rows, a step has 16"):
        check_partition(
            Partition(pipelines=(fewer, baseline.pipelines[1])), problem_of(DENSE, baseline)
        )


def test_shards_are_whole_runs_in_order() -> None:
    with pytest.raises(ValueError, match="must cover"):
        StageShard(
            first_layer=0,
            end_layer=1,
            attention=(ShardRun(0, 0, 2), ShardRun(1, 3, 4)),
            mlp=(ShardRun(0, 0, 8),),
        )


def test_a_rank_stands_in_one_place() -> None:
    cell = StageShard(
        first_layer=0, end_layer=4, attention=runs_of([0], [4]), mlp=runs_of([0], [8])
    )
    pipeline = Pipeline(cells=(cell,), micro_batches=(1,))
    with pytest.raises(ValueError, match=r"ranks \[0\] stand in two places"):
        Partition(pipelines=(pipeline, pipeline))


def test_memory_is_state_and_activations_in_flight() -> None:
    baseline = even_partition(DENSE, data=1, stages=2, tensor=2, rows=8, micro_batches=4)
    used = memory_bytes(baseline, problem_of(DENSE, baseline))
    # Two layers of 2 GB, halved; two micro-batches of two rows in flight in the first stage.
    assert used == pytest.approx({0: 2.4e9, 1: 2.4e9, 2: 2.2e9, 3: 2.2e9})
    with pytest.raises(ValueError, match="rank 0 needs"):
        check_partition(baseline, problem_of(DENSE, baseline, memory_bytes=2.3e9))


def test_shared_experts_are_held_once_between_the_pipelines() -> None:
    baseline = moe_partition()
    used = memory_bytes(baseline, problem_of(MOE, baseline))
    # Of each layer 1 GB of attention and half of 4 GB of experts; 4 rows or 2 in flight.
    assert used == pytest.approx({0: 6.8e9, 1: 6.8e9, 2: 6.4e9, 3: 6.4e9})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_s": 1e300}, "LayerCost.attention_s: expected 0 to 1e\\+06, got 1e\\+300"),
        ({"mlp_bytes": 1e30}, "LayerCost.mlp_bytes: expected 0 to 1e\\+18"),
        ({"attention_s": 1e-300, "mlp_s": 0.0}, "a layer takes time: expected 1e-15 s at least"),
    ],
)
def test_costs_that_no_sum_could_hold_are_refused_by_name(
    changed: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        replace(DENSE.layers[0], **changed)


def test_devices_and_links_that_are_no_numbers_to_plan_with_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 3: speed from 0"):
        Device(rank=3, node=0, memory_bytes=1e9, speed=1e-300)
    with pytest.raises(ValueError, match="between_bytes_per_s: expected a bandwidth"):
        Links(inside_bytes_per_s=1e9, between_bytes_per_s=1e-300)
    assert Links(inside_bytes_per_s=inf, between_bytes_per_s=inf)  # nothing was measured yet
    with pytest.raises(ValueError, match="10\\^12 steps"):
        MovePrices(pause_s=1e300)
    with pytest.raises(ValueError, match="backward_ratio: expected"):
        replace(DENSE, backward_ratio=1e-300)


def test_rows_are_shared_without_a_warning_where_a_pipeline_has_no_work_of_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = share_rows(8, [[0.0, 0.0], [1.0, 2.0]], [[4.0, 0.0], [4.0, 0.0]], [0, 0])
        alike = share_rows(8, [[0.0], [0.0]], [[4.0], [4.0]], [0, 0])
    assert rows == (8, 0)
    assert sum(alike) == 8


def test_rows_keep_to_their_limits() -> None:
    assert share_rows(10, [1.0, 4.0], [0.0, 0.0], [1, 1], [6, 9]) == (6, 4)
    for total in (1, 16):
        with pytest.raises(ValueError, match=f"{total} rows"):
            share_rows(total, [1.0, 4.0], [0.0, 0.0], [1, 1], [6, 9])
