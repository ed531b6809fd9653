"""Conversion between a partition with its expert placement and a `Layout`, where one exists.

A layout has one set of stage boundaries for all pipelines and one run of virtual shards for
attention and MLP.
"""

from collections.abc import Sequence
from itertools import pairwise

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.partition.row_split import lock_step_batches
from pacekeeper.core.layout.layout import Layout, ReplicaSet, ShardRun, Stage


def layout_of(
    partition: Partition,
    experts: Sequence[Sequence[ReplicaSet]],
    *,
    generation: int,
    speeds: tuple[tuple[int, float], ...] = (),
    standing_by: tuple[int, ...] = (),
) -> Layout:
    """experts[layer][expert] are replicas; an empty layer is a dense one.

    Raises ValueError where pipelines have cuts of their own, and where a stage with dense layers
    cuts its MLP otherwise than its attention.
    """
    pipelines = _by_leader(partition)
    cuts = {pipeline.cuts for pipeline in pipelines}
    if len(cuts) != 1:
        raise ValueError(f"a layout has one cut for all pipelines, these have {sorted(cuts)}")
    (ends,) = cuts
    stages = []
    for stage, (first, end) in enumerate(pairwise((0, *ends))):
        has_dense = not all(experts[layer] for layer in range(first, end))
        stages.append(
            Stage(
                first_layer=first,
                end_layer=end,
                groups=tuple(_runs(pipeline.cells[stage], has_dense) for pipeline in pipelines),
            )
        )
    return Layout(
        generation=generation,
        num_virtual_shards=pipelines[0].cells[0].attention[-1].end,
        stages=tuple(stages),
        experts=tuple(tuple(layer) for layer in experts),
        batch_shares=batch_shares_of(partition),
        speeds=speeds,
        standing_by=standing_by,
    )


def batch_shares_of(partition: Partition) -> tuple[tuple[int, float], ...]:
    """Each pipeline's share of the rows, by its first rank, ascending: as a layout has them."""
    return tuple(
        (pipeline.cells[0].attention[0].rank, pipeline.rows / partition.rows_per_step)
        for pipeline in _by_leader(partition)
    )


def partition_of(layout: Layout, *, num_rows: int, num_microbatches: int) -> Partition:
    """The partition that a layout describes.

    All pipelines form one expert group: same stage boundaries, same number of micro-batches.

    Args:
        layout: the layout.
        num_rows: rows of a step.
        num_microbatches: of each pipeline.

    Raises:
        ValueError: a pipeline has fewer rows than micro-batches.
    """
    rows = layout.rows_of(num_rows)
    pipelines = []
    for at, (leader, _) in enumerate(layout.batch_shares):
        cells = tuple(
            StageShard(
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                attention=stage.groups[at],
                mlp=stage.groups[at],
            )
            for stage in layout.stages
        )
        batches = lock_step_batches(rows[leader], num_microbatches)
        pipelines.append(Pipeline(cells=cells, micro_batches=batches, expert_group=0))
    return Partition(pipelines=tuple(pipelines))


def _runs(cell: StageShard, has_dense: bool) -> tuple[ShardRun, ...]:
    if has_dense and cell.mlp != cell.attention:
        raise ValueError(
            f"layers {cell.first_layer} to {cell.end_layer - 1}: a layout has one run of shards"
            " for attention and MLP"
        )
    return cell.attention


def _by_leader(partition: Partition) -> list[Pipeline]:
    return sorted(partition.pipelines, key=lambda p: p.cells[0].attention[0].rank)
