"""Random layouts as wide as a plan can be: nothing about one pipeline follows from another."""

from dataclasses import dataclass
from random import Random

from benchmarks.random_meshes import random_owners, random_stage_shares

from pacekeeper.core.layout.layout import (
    BlockKind,
    ExpertReplica,
    Layout,
    Pipeline,
    ReplicaSet,
    ShardRun,
    Stage,
    ranks_by_layer,
)
from support.layouts import normalised

POOL = 40  # ranks that a layout draws from


@dataclass(frozen=True, slots=True, kw_only=True)
class WideModel:
    """What two layouts of one model have in common; 0 experts: a dense layer."""

    num_attention_shards: int
    num_mlp_shards: int
    experts_per_layer: tuple[int, ...]
    shared_mlp_layers: tuple[int, ...]


def wide_model(random: Random) -> WideModel:
    experts = tuple(random.randint(0, 3) for _ in range(random.randint(1, 5)))
    with_experts = [layer for layer, count in enumerate(experts) if count]
    return WideModel(
        num_attention_shards=random.randint(1, 4),
        num_mlp_shards=random.randint(1, 6),
        experts_per_layer=experts,
        shared_mlp_layers=tuple(layer for layer in with_experts if random.random() < 0.3),
    )


def wide_layout(
    random: Random, model: WideModel | None = None, *, generation: int = 1, owned: float = 0.5
) -> Layout:
    """A layout of `model`, or of any; `owned`: how probably optimizer state has owners."""
    model = model or wide_model(random)
    num_layers = len(model.experts_per_layer)
    free = random.sample(range(POOL), POOL)
    count = random.randint(1, 3)
    shares = normalised([random.random() for _ in range(count)])
    pipelines = [
        Pipeline(stages=_stages(random, model, free), batch_share=share) for share in shares
    ]
    pipelines.sort(key=lambda pipeline: pipeline.leader)
    if len({pipeline.ends for pipeline in pipelines}) == 1 and random.random() < 0.5:
        pipelines = random_stage_shares(pipelines, random)
    there = ranks_by_layer(pipelines)
    working = sorted({rank for ranks in there for rank in ranks})
    slow = sorted(random.sample(working, random.randint(0, min(2, len(working)))))
    layout = Layout(
        generation=generation,
        num_attention_shards=model.num_attention_shards,
        num_mlp_shards=model.num_mlp_shards,
        pipelines=tuple(pipelines),
        experts=tuple(
            tuple(_replicas(random, there[layer]) for _ in range(model.experts_per_layer[layer]))
            for layer in range(num_layers)
        ),
        shared_mlp_layers=model.shared_mlp_layers,
        speeds=tuple((rank, random.uniform(0.1, 1.0)) for rank in slow),
        standing_by=tuple(sorted(free[: random.randint(0, 2)])),
    )
    return random_owners(layout, random) if random.random() < owned else layout


def holdings(layout: Layout) -> dict[int, set[tuple[BlockKind, int, int]]]:
    """The blocks of each rank with work, read from the runs and replicas one by one."""
    held: dict[int, set[tuple[BlockKind, int, int]]] = {rank: set() for rank in layout.working}
    for pipeline in layout.pipelines:
        for number, stage in enumerate(pipeline.stages):
            for attention, mlp in zip(stage.attention, stage.mlp, strict=True):
                own = held[attention.rank]
                if number == 0:
                    own.add((BlockKind.EMBEDDING, 0, 0))
                if stage is pipeline.stages[-1]:
                    own.add((BlockKind.HEAD, 0, 0))
                for layer in range(stage.first_layer, stage.end_layer):
                    own.add((BlockKind.NORM_ROUTER, layer, 0))
                    for shard in range(attention.first, attention.end):
                        own.add((BlockKind.ATTENTION, layer, shard))
                    is_dense = not layout.experts[layer] or layer in layout.shared_mlp_layers
                    for shard in range(mlp.first, mlp.end if is_dense else mlp.first):
                        own.add((BlockKind.DENSE_MLP, layer, shard))
    for layer, experts in enumerate(layout.experts):
        for expert, replicas in enumerate(experts):
            for replica in replicas:
                held[replica.rank].add((BlockKind.EXPERT, layer, expert))
    return held


def _stages(random: Random, model: WideModel, free: list[int]) -> tuple[Stage, ...]:
    num_layers = len(model.experts_per_layer)
    cuts = sorted(random.sample(range(1, num_layers), random.randint(0, min(2, num_layers - 1))))
    stages = []
    for first, end in zip([0, *cuts], [*cuts, num_layers], strict=True):
        most = model.num_attention_shards + model.num_mlp_shards
        ranks = [free.pop() for _ in range(random.randint(1, min(3, most)))]
        attention, mlp = _runs(random, ranks, model)
        stages.append(Stage(first_layer=first, end_layer=end, attention=attention, mlp=mlp))
    return tuple(stages)


def _runs(
    random: Random, ranks: list[int], model: WideModel
) -> tuple[tuple[ShardRun, ...], tuple[ShardRun, ...]]:
    """Runs of both kinds; a rank may have none of one, but has a shard."""
    while True:
        ends = [
            [*sorted(random.randint(0, shards) for _ in ranks[1:]), shards]
            for shards in (model.num_attention_shards, model.num_mlp_shards)
        ]
        attention, mlp = (
            tuple(map(ShardRun, ranks, [0, *of_kind[:-1]], of_kind)) for of_kind in ends
        )
        both = zip(attention, mlp, strict=True)
        if all(a.end > a.first or m.end > m.first for a, m in both):
            return attention, mlp


def _replicas(random: Random, ranks: tuple[int, ...]) -> ReplicaSet:
    on = sorted(random.sample(ranks, random.randint(1, min(3, len(ranks)))))
    shares = normalised([random.random() for _ in on])
    return tuple(ExpertReplica(rank, share) for rank, share in zip(on, shares, strict=True))
