"""Hypothesis strategies for valid layouts of every shape the design knows."""

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import strategies as st

from pacekeeper.core.layout.layout import ExpertReplica, Layout, ReplicaSet, ShardRun, Stage


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
    stages: list[Stage] = []
    for first_layer, end_layer in zip([0, *ends[:-1]], ends, strict=True):
        groups = [_group(draw, free, model.num_virtual_shards) for _ in range(num_pipelines)]
        groups.sort(key=lambda group: group[0].rank)
        stages.append(Stage(first_layer=first_layer, end_layer=end_layer, groups=tuple(groups)))
    experts = tuple(
        tuple(_hosts(draw, stage.ranks) for _ in range(model.experts_per_layer[layer]))
        for stage in stages
        for layer in range(stage.first_layer, stage.end_layer)
    )
    ranks = [run.rank for stage in stages for group in stage.groups for run in group]
    standing_by = sorted(draw(st.sets(st.sampled_from(free), max_size=2 * may_stand_by)))
    slow = sorted(draw(st.sets(st.sampled_from([*ranks, *standing_by]), max_size=2)))
    first_ranks = [group[0].rank for group in stages[0].groups]
    return Layout(
        generation=generation,
        num_virtual_shards=model.num_virtual_shards,
        stages=tuple(stages),
        experts=experts,
        batch_shares=tuple(zip(first_ranks, _shares(draw, len(first_ranks)), strict=True)),
        speeds=tuple((rank, draw(st.floats(0.1, 1.0))) for rank in slow),
        standing_by=tuple(standing_by),
    )


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
