"""Random layouts: stages, groups, schedules, replicas, owners of state, standby ranks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from pacekeeper.core.layout.layout import (
    ExpertReplica,
    Layout,
    Pipeline,
    ShardRun,
    Stage,
    StateOwner,
)
from pacekeeper.core.layout.pipeline_schedule import RUN_SCHEDULES


def random_mesh(
    ranks: Sequence[int],
    num_experts: Sequence[int],
    num_shards: int,
    generation: int,
    chosen: Random,
    shared_mlp_layers: tuple[int, ...] = (),
    *,
    shape: tuple[int, int] | None = None,
) -> Layout:
    """One to three pipelines of one or two stages, in any schedule; groups of any sizes and runs.

    Every second layout has owners of optimizer state, and every second of several pipelines has
    shares of the rows by stage, some of them 0.

    Args:
        ranks: All ranks; those beyond the shards of a full group stand by.
        num_experts: Experts of each layer, at least two layers; each has a replica on any ranks.
        num_shards: Virtual shards of attention, and of dense MLPs.
        generation: Of the layout.
        chosen: Source of all choices.
        shared_mlp_layers: Layers with shared experts.
        shape: Pipelines and stages, of groups of equal size; None: any.
    """
    order = list(ranks)
    chosen.shuffle(order)
    if shape is None:
        num_stages = chosen.choice([1, 2]) if len(order) > 1 else 1
        num_pipelines = chosen.randint(1, min(len(order) // num_stages, 3))
    else:
        num_pipelines, num_stages = shape
    groups: list[list[int]] = [[] for _ in range(num_stages * num_pipelines)]
    for place, rank in enumerate(order):
        is_dealt = shape is not None or place < len(groups)
        index = place % len(groups) if is_dealt else chosen.randrange(len(groups))
        if len(groups[index]) < num_shards:
            groups[index].append(rank)
    ends = [chosen.randint(1, len(num_experts) - 1)] if num_stages == 2 else []
    weights = [chosen.random() + 0.2 for _ in range(num_pipelines)]
    pipelines = []
    for number in range(num_pipelines):
        own = groups[number * num_stages : (number + 1) * num_stages]
        stages = tuple(
            Stage(
                first_layer=first,
                end_layer=end,
                attention=random_runs(group, num_shards, chosen, least=1),
                mlp=random_runs(group, num_shards, chosen, least=0),
            )
            for (first, end), group in zip(pairwise([0, *ends, len(num_experts)]), own, strict=True)
        )
        share = weights[number] / sum(weights)
        pipelines.append(Pipeline(stages=stages, batch_share=share))
    pipelines.sort(key=lambda one: one.leader)
    if num_pipelines > 1 and chosen.random() < 0.5:
        pipelines = random_stage_shares(pipelines, chosen)
    experts = []
    for layer, count in enumerate(num_experts):
        there = sorted(
            rank
            for one in pipelines
            for stage in one.stages
            for rank in stage.group
            if stage.first_layer <= layer < stage.end_layer
        )
        experts.append(tuple(random_replicas(there, chosen) for _ in range(count)))
    busy = {rank for group in groups for rank in group}
    layout = Layout(
        generation=generation,
        num_attention_shards=num_shards,
        num_mlp_shards=num_shards,
        pipelines=tuple(pipelines),
        experts=tuple(experts),
        shared_mlp_layers=shared_mlp_layers,
        standing_by=tuple(rank for rank in sorted(ranks) if rank not in busy),
        schedule=chosen.choice(RUN_SCHEDULES),
    )
    return random_owners(layout, chosen) if chosen.random() < 0.5 else layout


def random_stage_shares(pipelines: Sequence[Pipeline], chosen: Random) -> list[Pipeline]:
    """The pipelines, of equal cuts, with other shares of the rows at each stage."""
    by_stage = []
    for _ in pipelines[0].stages:
        weights = [chosen.choice([0.0, 0.2, chosen.random() + 0.2]) for _ in pipelines]
        weights[chosen.randrange(len(weights))] += 0.3
        by_stage.append([weight / sum(weights) for weight in weights])
    return [
        replace(pipeline, stage_shares=shares)
        for pipeline, shares in zip(pipelines, zip(*by_stage, strict=True), strict=True)
    ]


def random_owners(layout: Layout, chosen: Random) -> Layout:
    """The layout with an owner and a mirror of optimizer state drawn among the holders."""
    owners = []
    for block in layout.owned_blocks():
        holders = layout.holders(block)
        owner, *others = chosen.sample(holders, min(2, len(holders)))
        owners.append(StateOwner(owner, others[0] if others else None))
    return replace(layout, state_owners=tuple(owners))


def random_runs(
    ranks: Sequence[int], num_shards: int, chosen: Random, *, least: int
) -> tuple[ShardRun, ...]:
    """Cut shards into runs of at least so many for each of the ranks, in their order."""
    while True:
        inner = sorted(chosen.randint(0, num_shards) for _ in ranks[1:])
        ends = [0, *inner, num_shards]
        if all(end - first >= least for first, end in pairwise(ends)):
            return tuple(map(ShardRun, ranks, ends, ends[1:]))


def random_replicas(ranks: Sequence[int], chosen: Random) -> tuple[ExpertReplica, ...]:
    """Replicas on one to three of the ranks, with any shares."""
    some = sorted(chosen.sample(ranks, min(chosen.choice([1, 1, 2, 3]), len(ranks))))
    weights = [chosen.random() + 0.01 for _ in some]
    return tuple(ExpertReplica(r, w / sum(weights)) for r, w in zip(some, weights, strict=True))
