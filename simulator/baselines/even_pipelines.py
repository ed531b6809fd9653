"""Cells and pipelines as published planners know them: even shards, whole micro-batches. Pure."""

from collections.abc import Sequence

import numpy as np

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.layer_split import (
    StageBoundaries,
    best_stage_boundaries,
)
from pacekeeper.controller.planning.partition.shard_split import runs
from pacekeeper.controller.planning.partition_cost.compute import (
    GroupCost,
    LayerSums,
    constant_s,
    fits,
    group_cost,
    row_s,
    spans,
)
from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.pipeline_schedule import Schedule, num_in_flight

Ranks = tuple[int, ...]


def even_cell(
    ranks: Sequence[int], first_layer: int, end_layer: int, problem: PartitionProblem
) -> StageShard:
    """Every rank as many shards, give or take one."""
    shares = [1.0] * len(ranks)
    return StageShard(
        first_layer=first_layer,
        end_layer=end_layer,
        attention=runs(ranks, apportion(problem.model.num_attention_shards, shares)),
        mlp=runs(ranks, apportion(problem.model.num_mlp_shards, shares)),
    )


def even_cost(ranks: Sequence[int], problem: PartitionProblem) -> GroupCost:
    """Return the cost of a tensor group with even shards."""
    cell = even_cell(ranks, 0, 1, problem)
    return group_cost(cell.attention, cell.mlp, problem.model, problem.links, problem.device_of)


def baseline_groups(problem: PartitionProblem) -> list[list[Ranks]]:
    """Per pipeline and stage the ranks of the baseline, dead ones too."""
    return [[cell.ranks for cell in pipeline.cells] for pipeline in problem.baseline.pipelines]


def batch_rows(problem: PartitionProblem) -> int:
    """Rows of one micro-batch of the baseline."""
    return max(max(pipeline.micro_batches) for pipeline in problem.baseline.pipelines)


def num_batches(problem: PartitionProblem) -> int:
    """Micro-batches of all pipelines together."""
    return sum(len(pipeline.micro_batches) for pipeline in problem.baseline.pipelines)


def cuts_for(
    groups: Sequence[GroupCost], sums: LayerSums, rows: int, num_microbatches: int
) -> StageBoundaries | None:
    """The best cuts of one pipeline for micro-batches of `rows`; None where it does not fit."""
    costs = [
        spans(rows * row_s(sums, group) + constant_s(sums, group))
        + fits(
            sums,
            group,
            rows=rows,
            num_held=num_in_flight(
                Schedule.ONE_F_ONE_B,
                stage,
                num_stages=len(groups),
                num_microbatches=num_microbatches,
            ),
            sharers=1,
        )
        for stage, group in enumerate(groups)
    ]
    return best_stage_boundaries(costs, num_microbatches)


def stage_s(
    group: GroupCost, first_layer: int, end_layer: int, rows: int, sums: LayerSums
) -> float:
    """Forward and backward of one micro-batch."""
    of_row, fixed = row_s(sums, group), constant_s(sums, group)
    return float(
        rows * (of_row[end_layer] - of_row[first_layer]) + fixed[end_layer] - fixed[first_layer]
    )


def assembled(
    groups: Sequence[Sequence[Ranks]],
    ends: Sequence[Sequence[int]],
    counts: Sequence[int],
    problem: PartitionProblem,
) -> Partition:
    """Pipelines of even cells with whole micro-batches, so many each."""
    sizes = [size for p in problem.baseline.pipelines for size in p.micro_batches]
    assert sum(counts) == len(sizes), "micro-batches are handed on whole"
    pipelines = []
    for of_pipeline, cuts, count in zip(groups, ends, counts, strict=True):
        mine, sizes = sizes[:count], sizes[count:]
        cells = tuple(
            even_cell(ranks, first, end, problem)
            for ranks, first, end in zip(of_pipeline, (0, *cuts[:-1]), cuts, strict=True)
        )
        pipelines.append(Pipeline(cells=cells, micro_batches=tuple(mine)))
    return Partition(pipelines=tuple(pipelines), schedule=problem.baseline.schedule)


def even_counts(total: int, each_s: Sequence[float], least: Sequence[int]) -> tuple[int, ...]:
    """Whole micro-batches for pipelines that take each_s for one: the least maximum."""
    counts = np.array(least)
    if counts.sum() > total:
        raise ValueError(f"{total} micro-batches, at least {counts.sum()} are needed")
    paces = np.array(each_s)
    while counts.sum() < total:
        counts[int(np.argmin((counts + 1) * paces))] += 1
    return tuple(counts.tolist())
