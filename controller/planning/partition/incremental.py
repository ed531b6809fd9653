"""The cheaper steps towards another partition: other rows only, other runs of shards only. Pure.

Layers, groups and pipelines stay as they are, so that a layout's cheap levels are priced like its
dear ones.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.group_search import shard_ranks
from pacekeeper.controller.planning.partition.row_split import (
    lock_step_batches,
    row_weights,
    rows_at_least,
)
from pacekeeper.controller.planning.partition.shard_split import shape_group
from pacekeeper.controller.planning.partition_cost.compute import (
    expert_row_s,
    layer_sums,
    row_s,
    shard_cost,
)

Cells = tuple[tuple[StageShard, ...], ...]


def with_other_rows(partition: Partition, problem: PartitionProblem) -> Partition:
    """The rows for which its pipelines, one expert group, end together.

    Raises ValueError where it is not one expert group, or rows are too few.
    """
    return _with_rows(_cells(partition), problem, len(partition.pipelines[0].micro_batches))


def with_other_shards(partition: Partition, problem: PartitionProblem) -> Partition | None:
    """Runs by speed in each of its groups, every rank with a shard at least, and the rows for that.

    None where a group has more ranks than shards. Raises ValueError as `with_other_rows`.
    """
    sums = layer_sums(problem.model, problem.links)
    shaped = []
    for cells in _cells(partition):
        of_pipeline = []
        for cell in cells:
            shape = shape_group(shard_ranks(cell), sums, problem.device_of, is_whole=True)
            if shape is None:
                return None
            of_pipeline.append(replace(cell, attention=shape.attention, mlp=shape.mlp))
        shaped.append(tuple(of_pipeline))
    return _with_rows(tuple(shaped), problem, len(partition.pipelines[0].micro_batches))


def _cells(partition: Partition) -> Cells:
    """[pipelines][stages] of one expert group."""
    groups = {pipeline.expert_group for pipeline in partition.pipelines}
    if len(groups) != 1 or None in groups:
        raise ValueError("only pipelines of one expert group share rows like this")
    return tuple(pipeline.cells for pipeline in partition.pipelines)


def _with_rows(cells: Cells, problem: PartitionProblem, num_microbatches: int) -> Partition:
    weights = _weights(cells, problem)
    rows = problem.rows_per_step
    if rows < num_microbatches * len(cells):
        raise ValueError(
            f"{rows} rows are fewer than a micro-batch needs in {len(cells)} pipelines"
        )
    counts = rows_at_least(rows, weights, num_microbatches)
    return Partition(
        pipelines=tuple(
            Pipeline(
                cells=of_pipeline,
                micro_batches=lock_step_batches(count, num_microbatches),
                expert_group=0,
            )
            for of_pipeline, count in zip(cells, counts, strict=True)
        )
    )


def _weights(cells: Cells, problem: PartitionProblem) -> Sequence[float]:
    sums = layer_sums(problem.model, problem.links)
    costs = [
        [shard_cost(cell, problem.model, problem.links, problem.device_of) for cell in of_pipeline]
        for of_pipeline in cells
    ]
    spans = [(cell.first_layer, cell.end_layer) for cell in cells[0]]
    own = np.array(
        [
            [
                row_s(sums, cost)[end] - row_s(sums, cost)[first]
                for cost, (first, end) in zip(of_pipeline, spans, strict=True)
            ]
            for of_pipeline in costs
        ]
    )
    experts = []
    for stage, (first, end) in enumerate(spans):
        shared = expert_row_s(sums, [of[stage] for of in costs], problem.unevenness)
        experts.append(shared[end] - shared[first])
    weights: list[float] = row_weights(own, np.array(experts)).tolist()
    return weights
