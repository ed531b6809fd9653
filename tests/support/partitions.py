"""Small models, clusters and partitions for the planner of the partition."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import (
    Device,
    LayerCost,
    Links,
    ModelCost,
    MovePrices,
    PartitionProblem,
)
from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.layout import ShardRun
from pacekeeper.core.layout.pipeline_schedule import Schedule

FAST = Links(
    inside_bytes_per_s=1e15,
    between_bytes_per_s=1e15,
    inside_latency_s=0.0,
    between_latency_s=0.0,
)
FREE = MovePrices(num_steps=10**6, pause_s=0.0)


def model_of(
    num_layers: int, *, attention: int = 4, mlp: int = 8, expert_s: float = 0.0, head_s: float = 0.0
) -> ModelCost:
    """Each layer takes 1 s of attention and 3 s of MLP (or of experts), and 1 GB of either."""
    layer = LayerCost(
        attention_s=1.0,
        mlp_s=0.0 if expert_s else 3.0,
        attention_bytes=1e9,
        mlp_bytes=0.0 if expert_s else 1e9,
        activation_bytes=1e8,
        expert_s=expert_s,
        expert_bytes=4e9 if expert_s else 0.0,
    )
    return ModelCost(
        layers=(layer,) * num_layers,
        num_attention_shards=attention,
        num_mlp_shards=mlp,
        boundary_bytes=1e6,
        head_s=head_s,
    )


def runs_of(ranks: Sequence[int], counts: Sequence[int]) -> tuple[ShardRun, ...]:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return tuple(
        ShardRun(rank, first, end)
        for rank, (first, end) in zip(ranks, pairwise(ends), strict=True)
        if end > first
    )


def even_partition(
    model: ModelCost,
    *,
    data: int,
    stages: int,
    tensor: int,
    rows: int,
    micro_batches: int,
    shares_experts: bool = False,
) -> Partition:
    """Rank = tensor + T * (data + D * stage); layers as even as can be, the first stages more."""
    layers = apportion(len(model.layers), [1.0] * stages)
    ends = [sum(layers[: stage + 1]) for stage in range(stages)]
    pipelines = []
    for dp in range(data):
        cells = []
        for stage, end in enumerate(ends):
            ranks = [tensor * (dp + data * stage) + i for i in range(tensor)]
            cells.append(
                StageShard(
                    first_layer=end - layers[stage],
                    end_layer=end,
                    attention=runs_of(ranks, apportion(model.num_attention_shards, [1.0] * tensor)),
                    mlp=runs_of(ranks, apportion(model.num_mlp_shards, [1.0] * tensor)),
                )
            )
        pipelines.append(
            Pipeline(
                cells=tuple(cells),
                micro_batches=apportion(rows, [1.0] * micro_batches),
                expert_group=0 if shares_experts else None,
            )
        )
    return Partition(pipelines=tuple(pipelines))


def problem_of(
    model: ModelCost,
    baseline: Partition,
    *,
    slow: dict[int, float] | None = None,
    ranks_per_node: int = 8,
    memory_bytes: float = 1e15,
    links: Links = FAST,
    prices: MovePrices = FREE,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    may_change_schedule: bool = False,
) -> PartitionProblem:
    """All ranks of `baseline`; `slow` names the speeds that are not 1."""
    return PartitionProblem(
        model=model,
        devices=tuple(
            Device(
                rank=rank,
                node=rank // ranks_per_node,
                memory_bytes=memory_bytes,
                speed=(slow or {}).get(rank, 1.0),
            )
            for rank in baseline.ranks
        ),
        links=links,
        baseline=replace(baseline, schedule=schedule),
        may_change_schedule=may_change_schedule,
        prices=prices,
    )


def with_cuts(
    model: ModelCost, ranks: Sequence[int], ends: Sequence[int]
) -> tuple[StageShard, ...]:
    """A pipeline of one rank for each stage."""
    return tuple(
        StageShard(
            first_layer=first,
            end_layer=end,
            attention=runs_of([rank], [model.num_attention_shards]),
            mlp=runs_of([rank], [model.num_mlp_shards]),
        )
        for rank, first, end in zip(ranks, (0, *ends[:-1]), ends, strict=True)
    )
