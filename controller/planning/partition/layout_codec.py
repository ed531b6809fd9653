"""Conversion between a partition with its expert placement and a `Layout`.

Every partition has a layout where its pipelines share all experts or have none. The sizes of
micro-batches are not part of it: trainers cut the rows of a pipeline, or of its stages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.partition.row_deal import deal_rows
from pacekeeper.controller.planning.partition.row_split import lock_step_batches, micro_batches
from pacekeeper.core.layout import layout as core
from pacekeeper.core.layout.layout import Layout, ReplicaSet, ShardRun
from pacekeeper.core.layout.live_rules import check_live_layout


def layout_of(
    partition: Partition,
    experts: Sequence[Sequence[ReplicaSet]],
    *,
    generation: int,
    shared_mlp_layers: tuple[int, ...] = (),
    speeds: tuple[tuple[int, float], ...] = (),
    standing_by: tuple[int, ...] = (),
) -> Layout:
    """The layout of a partition.

    In a stage that has no dense layer, MLP runs have no effect. They are set equal to the attention
    runs if there are as many MLP shards as attention shards.

    Args:
        partition: the assignment of layers, shards and rows.
        experts: experts[layer][expert] are replicas; an empty layer is a dense one.
        generation: the number of the layout.
        shared_mlp_layers: layers that have a dense MLP beside their experts.
        speeds: of the layout.
        standing_by: of the layout.

    Raises:
        ValueError: pipelines of several expert groups have experts, or a tensor group has its ranks
            in one order for attention and in another for MLP.
    """
    groups = {pipeline.expert_group for pipeline in partition.pipelines}
    if any(experts) and len(groups) > 1:
        raise ValueError("the pipelines of a layout share all experts, these are in several groups")
    first = partition.pipelines[0].cells[0]
    has_dense = [not of or layer in shared_mlp_layers for layer, of in enumerate(experts)]
    pipelines = with_rows(
        (
            core.Pipeline(
                stages=tuple(_stage(cell, has_dense) for cell in pipeline.cells), batch_share=1.0
            )
            for pipeline in partition.pipelines
        ),
        partition,
    )
    return Layout(
        generation=generation,
        num_attention_shards=first.attention[-1].end,
        num_mlp_shards=first.mlp[-1].end,
        pipelines=tuple(sorted(pipelines, key=lambda pipeline: pipeline.leader)),
        experts=tuple(tuple(layer) for layer in experts),
        shared_mlp_layers=shared_mlp_layers,
        speeds=speeds,
        standing_by=standing_by,
        schedule=partition.schedule,
    )


def with_rows(
    pipelines: Iterable[core.Pipeline], partition: Partition
) -> tuple[core.Pipeline, ...]:
    """The pipelines of a layout with the shares of a partition's, at all stages or at each."""
    num_rows = partition.rows_per_step
    return tuple(
        replace(
            pipeline,
            batch_share=of.rows / num_rows,
            stage_shares=tuple(sum(rows) / num_rows for rows in of.stage_batches),
        )
        for pipeline, of in zip(pipelines, partition.pipelines, strict=True)
    )


def partition_of(
    layout: Layout,
    *,
    num_rows: int,
    num_microbatches: int,
    rows_per_batch: int = 0,
    rows_per_microbatch: int = 0,
) -> Partition:
    """The partition that a layout describes.

    Pipelines of a model with experts form one expert group. Those of a dense model meet only at
    the end of a step; one with many rows has more micro-batches, not larger ones.

    Args:
        layout: the layout.
        num_rows: rows of a step.
        num_microbatches: of each pipeline, of a trainer with a number of its own.
        rows_per_batch: the most in a micro-batch of a dense model; 0: no limit.
        rows_per_microbatch: the most of a trainer that deals rows as the engine does, which decides
            on the number of micro-batches; 0: another trainer.

    Raises:
        ValueError: pipelines that share experts have other cuts, or one of them has fewer rows than
            `num_microbatches`; a trainer that cannot follow stage shares has some.
    """
    check_live_layout(layout)
    if layout.stage_shares and not rows_per_microbatch:
        raise ValueError(
            "the layout has shares of the rows by stage, which the trainer cannot deal"
        )
    rows = layout.rows_of(num_rows)
    shares_experts = any(layout.experts)
    pipelines = []
    for pipeline in layout.pipelines:
        cells = tuple(
            StageShard(
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                attention=_filled(stage.attention),
                mlp=_filled(stage.mlp),
            )
            for stage in pipeline.stages
        )
        count = rows[pipeline.leader]
        if not count:
            raise ValueError(f"the pipeline of rank {pipeline.leader} has no rows")
        sizes = (
            (count,)
            if rows_per_microbatch
            else lock_step_batches(count, num_microbatches)
            if shares_experts
            else micro_batches(
                count, per_batch=rows_per_batch or count, num_microbatches=num_microbatches
            )
        )
        pipelines.append(
            Pipeline(cells=cells, micro_batches=sizes, expert_group=0 if shares_experts else None)
        )
    if rows_per_microbatch:
        numbers = range(len(layout.stage_shares))
        stages = [list(map(len, layout.rows_at(number, num_rows))) for number in numbers]
        stage_rows = list(zip(*stages, strict=True))
        pipelines = list(deal_rows(pipelines, rows_per_microbatch, stage_rows))
    return Partition(pipelines=tuple(pipelines), schedule=layout.schedule)


def _stage(cell: StageShard, has_dense: Sequence[bool]) -> core.Stage:
    is_cut = any(has_dense[cell.first_layer : cell.end_layer])
    mlp = cell.mlp if is_cut or cell.mlp[-1].end != cell.attention[-1].end else cell.attention
    attention = cell.attention
    if attention != mlp:
        group = _merged([run.rank for run in attention], [run.rank for run in mlp])
        attention, mlp = (_with_empty(runs, group) for runs in (attention, mlp))
    return core.Stage(
        first_layer=cell.first_layer, end_layer=cell.end_layer, attention=attention, mlp=mlp
    )


def _merged(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The ranks of both, in the order of each. Raises ValueError where the orders differ."""
    sorter = TopologicalSorter[int]()
    for order in (one, other):
        for at, rank in enumerate(order):
            sorter.add(rank, *order[max(0, at - 1) : at])
    try:
        return list(sorter.static_order())
    except CycleError:
        raise ValueError(f"ranks {list(one)} and {list(other)} have two orders") from None


def _with_empty(runs: Sequence[ShardRun], group: Sequence[int]) -> tuple[ShardRun, ...]:
    """The runs, with an empty one for each rank of the group that has none."""
    by_rank, found, at = {run.rank: run for run in runs}, list[ShardRun](), 0
    for rank in group:
        found.append(by_rank.get(rank, ShardRun(rank, at, at)))
        at = found[-1].end
    return tuple(found)


def _filled(runs: Sequence[ShardRun]) -> tuple[ShardRun, ...]:
    return tuple(run for run in runs if run.end > run.first)
