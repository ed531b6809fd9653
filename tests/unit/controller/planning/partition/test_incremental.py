"""Other rows or shards alone, everybody with some work, and experts that go with their layers."""

from dataclasses import replace
from itertools import product

import pytest

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.partition.incremental import with_other_rows, with_other_shards
from pacekeeper.controller.planning.partition.layout_codec import layout_of, partition_of
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition.shard_split import split_shards
from pacekeeper.controller.planning.partition_cost.state_transfer import moves
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.layout import ExpertReplica, ShardRun
from support.partitions import even_partition, model_of, problem_of, runs_of

MODEL = model_of(4, attention=8, mlp=8, expert_s=3.0)
HOME = even_partition(
    MODEL, data=2, stages=2, tensor=2, rows=16, micro_batches=4, shares_experts=True
)


def test_no_other_rows_are_faster() -> None:
    problem = problem_of(MODEL, HOME, slow={1: 0.5})
    chosen = with_other_rows(HOME, problem)
    assert [p.cells for p in chosen.pipelines] == [p.cells for p in HOME.pipelines]
    assert chosen.rows_per_step == 32

    def with_rows(first: int) -> Partition:
        pipelines = tuple(
            replace(
                pipeline,
                micro_batches=(count // 4,) * (4 - count % 4) + (count // 4 + 1,) * (count % 4),
            )
            for pipeline, count in zip(HOME.pipelines, (first, 32 - first), strict=True)
        )
        return Partition(pipelines=pipelines)

    best = min(price(with_rows(first), problem).step_s for first in range(4, 29))
    assert price(chosen, problem).step_s <= 1.02 * best


def test_other_shards_leave_everybody_one() -> None:
    problem = problem_of(MODEL, HOME, slow={1: 0.01})
    chosen = with_other_shards(HOME, problem)
    assert chosen is not None
    assert chosen.pipelines[0].cells[0].attention == (ShardRun(0, 0, 7), ShardRun(1, 7, 8))
    assert chosen.ranks == HOME.ranks
    coarse = model_of(4, attention=1, mlp=1, expert_s=3.0)
    lone = even_partition(
        coarse, data=2, stages=2, tensor=1, rows=16, micro_batches=4, shares_experts=True
    )
    assert with_other_shards(lone, problem_of(coarse, lone, slow={1: 0.5})) is not None


def test_rows_and_shards_of_pipelines_without_experts_follow_speed() -> None:
    model = model_of(4, attention=8, mlp=8)
    home = even_partition(model, data=2, stages=2, tensor=2, rows=16, micro_batches=4)
    first, second = home.pipelines
    one, two = second.cells
    cells = (replace(one, end_layer=3), replace(two, first_layer=3))
    uneven = Partition(pipelines=(first, replace(second, cells=cells)))
    problem = problem_of(model, uneven, slow={1: 0.5})
    rows = with_other_rows(uneven, problem)
    assert [p.cells for p in rows.pipelines] == [p.cells for p in uneven.pipelines]
    assert rows.rows_per_step == uneven.rows_per_step
    assert price(rows, problem).step_s < price(uneven, problem).step_s
    shards = with_other_shards(uneven, problem)
    assert shards is not None
    assert shards.pipelines[0].cells[0].mlp == runs_of((0, 1), (6, 2))
    assert price(shards, problem).step_s < price(rows, problem).step_s


@pytest.mark.parametrize("speeds", [(1.0, 0.01, 0.01), (1.0, 1.0, 0.5), (0.3, 0.2, 0.1)])
def test_whole_shards_with_a_least_are_the_best_there_are(speeds: tuple[float, ...]) -> None:
    counts = split_shards(6, speeds, least=1)
    assert sum(counts) == 6 and min(counts) >= 1

    def slowest(of: tuple[int, ...]) -> float:
        return max(count / speed for count, speed in zip(of, speeds, strict=True))

    every = [of for of in product(range(1, 7), repeat=3) if sum(of) == 6]
    assert slowest(counts) == min(map(slowest, every))
    with pytest.raises(ValueError, match="fewer than 1 for each of 3"):
        split_shards(2, speeds, least=1)


def test_a_whole_plan_leaves_nobody_without_work() -> None:
    problem = problem_of(MODEL, HOME, slow={1: 0.001})
    assert plan_partition(problem).standby == (1,)
    whole = plan_partition(replace(problem, is_whole=True))
    assert whole.standby == () and whole.partition.ranks == HOME.ranks
    dense = model_of(16, attention=32, mlp=64)
    lone = even_partition(dense, data=2, stages=4, tensor=1, rows=32, micro_batches=8)
    slowest = problem_of(dense, lone, slow={2: 0.05})
    assert plan_partition(slowest).standby == (2,)
    assert plan_partition(replace(slowest, is_whole=True)).standby == ()


def test_experts_are_moved_with_their_layers() -> None:
    problem = problem_of(MODEL, HOME)
    moved = Partition(
        pipelines=tuple(
            replace(
                pipeline,
                cells=(
                    replace(pipeline.cells[0], end_layer=1),
                    replace(pipeline.cells[1], first_layer=1),
                ),
            )
            for pipeline in HOME.pipelines
        )
    )
    # Each rank of the second stage: half of a layer's 1 GB, and a quarter of its 4 GB of experts.
    assert dict(moves(moved, problem).bytes_in) == {
        rank: pytest.approx(0.5e9 + 1e9) for rank in (4, 5, 6, 7)
    }


def test_a_layout_and_its_partition_say_the_same() -> None:
    uneven = Partition(
        pipelines=tuple(
            replace(
                pipeline,
                cells=tuple(
                    replace(cell, attention=runs, mlp=runs)
                    for cell in pipeline.cells
                    for runs in (runs_of(cell.ranks, [5, 3]),)
                ),
            )
            for pipeline in HOME.pipelines
        )
    )
    on = [tuple(ExpertReplica(rank, 0.25) for rank in range(4 * at, 4 * at + 4)) for at in (0, 1)]
    layout = layout_of(uneven, [(on[layer // 2],) for layer in range(4)], generation=3)
    assert partition_of(layout, num_rows=32, num_microbatches=4) == uneven
    with pytest.raises(ValueError, match="3 rows can not be divided into 4"):
        partition_of(layout, num_rows=6, num_microbatches=4)
    dense = layout_of(uneven, ((),) * 4, generation=3)
    alone = partition_of(dense, num_rows=36, num_microbatches=4, rows_per_batch=4)
    assert {pipeline.expert_group for pipeline in alone.pipelines} == {None}
    assert [pipeline.micro_batches for pipeline in alone.pipelines] == [(3, 3, 4, 4, 4)] * 2
