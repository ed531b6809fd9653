"""Hypothesis strategies for valid layouts of every shape the design knows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from pacekeeper.core.layout.layout import (
    ExpertReplica,
    Layout,
    Pipeline,
    ReplicaSet,
    ShardRun,
    Stage,
    with_batch_shares,
)

Runs = tuple[ShardRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBlocks:
    """What two layouts of one model have in common; 0 experts: a dense layer."""

    num_virtual_shards: int
    experts_per_layer: tuple[int, ...]


models = st.builds(
    ModelBlocks,
    num_virtual_shards=st.integers(1, 4),
    experts_per_layer=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
)


def normalised(values: list[float]) -> list[float]:
    total = sum(values)
    return [v / total for v in values] if total else [1.0 / len(values)] * len(values)


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    model: ModelBlocks | None = None,
    generation: int = 1,
    may_stand_by: bool = True,
) -> Layout:
    """One to three stages, tensor groups with unequal runs, dense and MoE layers, uneven shares,
    ranks that stand by.
    """
    model = draw(models) if model is None else model
    num_layers = len(model.experts_per_layer)
    cuts = draw(st.sets(st.integers(1, max(1, num_layers - 1)), max_size=2))
    ends = [*sorted(cut for cut in cuts if cut < num_layers), num_layers]
    free = draw(st.permutations(range(30)))
    num_pipelines = draw(_few)
    stages: list[tuple[int, int, list[Runs]]] = []
    for first_layer, end_layer in zip([0, *ends[:-1]], ends, strict=True):
        groups = [_group(draw, free, model.num_virtual_shards) for _ in range(num_pipelines)]
        stages.append((first_layer, end_layer, sorted(groups, key=lambda group: group[0].rank)))
    experts = []
    for first, end, groups in stages:
        there = sorted(run.rank for group in groups for run in group)
        for layer in range(first, end):
            num_experts = model.experts_per_layer[layer]
            experts.append(tuple(_hosts(draw, tuple(there)) for _ in range(num_experts)))
    ranks = [run.rank for _, _, groups in stages for group in groups for run in group]
    standing_by = sorted(draw(st.sets(st.sampled_from(free), max_size=2 * may_stand_by)))
    slow = sorted(draw(st.sets(st.sampled_from([*ranks, *standing_by]), max_size=2)))
    return Layout(
        generation=generation,
        num_attention_shards=model.num_virtual_shards,
        num_mlp_shards=model.num_virtual_shards,
        pipelines=pipelines_of(stages, _shares(draw, num_pipelines)),
        experts=tuple(experts),
        speeds=tuple((rank, draw(st.floats(0.1, 1.0))) for rank in slow),
        standing_by=tuple(standing_by),
    )


def pipelines_of(
    stages: Iterable[tuple[int, int, Sequence[Runs]]], shares: Sequence[float]
) -> tuple[Pipeline, ...]:
    """Pipelines with equal cuts, of stages (first layer, end layer, one group per pipeline)."""
    made = [
        [Stage(first_layer=first, end_layer=end, attention=runs, mlp=runs) for runs in groups]
        for first, end, groups in stages
    ]
    return tuple(
        Pipeline(stages=of_pipeline, batch_share=share)
        for of_pipeline, share in zip(zip(*made, strict=True), shares, strict=True)
    )


def groups_of(layout: Layout) -> list[list[Runs]]:
    """The attention runs of each stage and pipeline of a layout with equal cuts."""
    return [[stage.attention for stage in of] for of in zip(*layout.mesh, strict=True)]


def with_shares(layout: Layout, *shares: float) -> Layout:
    """The layout with these batch shares."""
    return replace(layout, pipelines=with_batch_shares(layout.pipelines, shares))


_few = st.integers(1, 3)


def _group(draw: st.DrawFn, free: list[int], num_shards: int) -> tuple[ShardRun, ...]:
    cuts = draw(st.sets(st.integers(1, max(1, num_shards - 1)), max_size=2))
    ends = [*sorted(cut for cut in cuts if cut < num_shards), num_shards]
    return tuple(
        ShardRun(free.pop(), first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)
    )


def _hosts(draw: st.DrawFn, ranks: tuple[int, ...]) -> ReplicaSet:
    on = sorted(draw(st.sets(st.sampled_from(ranks), min_size=1)))
    return tuple(ExpertReplica(rank, s) for rank, s in zip(on, _shares(draw, len(on)), strict=True))


def _shares(draw: st.DrawFn, count: int) -> list[float]:
    return normalised(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count)))


def on_nodes(layout: Layout, node_of: Mapping[int, object]) -> list[list[int]]:
    """On how many distinct nodes each expert of each layer has hosts."""
    return [[len({node_of[host.rank] for host in on}) for on in layer] for layer in layout.experts]


def load_of(layout: Layout, layer: int) -> dict[int, float]:
    """What each rank computes of a layer whose experts are equally loaded, in experts."""
    load = dict.fromkeys(layout.ranks, 0.0)
    for hosts in layout.experts[layer]:
        for host in hosts:
            load[host.rank] += host.share
    return load
