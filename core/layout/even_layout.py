"""The layout that a job starts with: equal work on every rank.

Also the rules that cut a tensor group's shards into runs. Layouts of running jobs are made by
`shrink`, `grow` and the controller, never here.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.layout import ExpertReplica, Layout, Pipeline, ShardRun, Stage
from pacekeeper.core.layout.replica_spread import (
    NO_DOMAINS,
    DomainOf,
    domain_of_rank,
    level_shares,
    spread_replicas,
)

NO_SPEEDS: Mapping[int, float] = MappingProxyType({})


def even_layout(
    *,
    ranks: Iterable[int],
    num_layers: int,
    num_experts: int,
    replicas: int,
    domain_of: DomainOf = NO_DOMAINS,
    num_virtual_shards: int = 1,
    num_stages: int = 1,
    tensor_size: int = 1,
    generation: int = 1,
) -> Layout:
    """The layout a job starts with: equal work on every rank.

    The `num_stages` groups of a pipeline lie in as few failure domains (nodes) as possible: a node
    that fails takes whole pipelines with it, and the others hold the same state. The replicas of an
    expert lie in as many domains as possible, those of a stage's layers in the same few sets of
    domains (`spread_replicas`). Ranks of domains of equal size get the same number of slots, give
    or take one.

    Args:
        ranks: all ranks of the job.
        num_layers: layers of the model.
        num_experts: experts per layer; 0: a dense model.
        replicas: replicas of each expert.
        domain_of: the failure domain of each rank; default: every rank is its own.
        num_virtual_shards: shards of a layer's attention, and of its dense MLP, that can move
            separately.
        num_stages: pipeline stages.
        tensor_size: ranks of a tensor group.
        generation: the number of the layout.

    Raises:
        ValueError: there are too few ranks, layers or shards, or ranks are left over.
    """
    pipelines = _even_pipelines(
        _by_domain(ranks, domain_of), num_layers, num_virtual_shards, num_stages, tensor_size
    )
    stage_ranks = len(pipelines) * tensor_size
    if not 1 <= replicas <= stage_ranks:
        raise ValueError(f"{replicas} replicas of an expert need as many ranks, got {stage_ranks}")
    layers = []
    for stages in zip(*(pipeline.stages for pipeline in pipelines), strict=True):
        there = sorted(rank for stage in stages for rank in stage.group)
        for layer in range(stages[0].first_layer, stages[0].end_layer):
            placed = spread_replicas(num_experts, replicas, there, domain_of, turn=layer)
            shares = level_shares(placed, {}, 1.0)
            layers.append(
                tuple(tuple(ExpertReplica(r, share) for r, share in on.items()) for on in shares)
            )
    return Layout(
        generation=generation,
        num_attention_shards=num_virtual_shards,
        num_mlp_shards=num_virtual_shards,
        pipelines=pipelines,
        experts=tuple(layers),
    )


def flat_pipelines(
    ranks: Iterable[int], num_layers: int, num_virtual_shards: int = 1
) -> tuple[Pipeline, ...]:
    """Pure data parallelism: each rank is a pipeline of one stage, with an equal batch share."""
    return _even_pipelines(sorted(ranks), num_layers, num_virtual_shards, 1, 1)


def shard_runs(
    ranks: Sequence[int], num_shards: int, speeds: Mapping[int, float] = NO_SPEEDS
) -> tuple[ShardRun, ...]:
    """The runs of a tensor group: at least one shard per rank, the rest by speed.

    Args:
        ranks: the ranks of the group, in the order of their runs.
        num_shards: the virtual shards to distribute.
        speeds: relative speed by rank; 1.0 for ranks that it does not name.

    Raises:
        ValueError: there are more ranks than shards.
    """
    if not 1 <= len(ranks) <= num_shards:
        raise ValueError(f"{num_shards} virtual shards do not make runs for {len(ranks)} ranks")
    more = apportion(num_shards - len(ranks), [speeds.get(rank, 1.0) for rank in ranks])
    ends = list(accumulate(1 + count for count in more))
    return tuple(map(ShardRun, ranks, [0, *ends[:-1]], ends))


def _by_domain(ranks: Iterable[int], domain_of: DomainOf) -> tuple[int, ...]:
    """Ascending, with the ranks of one domain next to each other."""
    order = sorted(ranks)
    first: dict[Hashable, int] = {}
    for rank in order:
        first.setdefault(domain_of_rank(domain_of, rank), rank)
    return tuple(sorted(order, key=lambda rank: (first[domain_of_rank(domain_of, rank)], rank)))


def _even_pipelines(
    ranks: Sequence[int], num_layers: int, num_shards: int, num_stages: int, tensor_size: int
) -> tuple[Pipeline, ...]:
    size = num_stages * tensor_size
    if not ranks or len(ranks) % size:
        raise ValueError(
            f"{num_stages} stages of {tensor_size} ranks each need a multiple of {size} ranks, "
            f"got {len(ranks)}"
        )
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers do not make {num_stages} stages")
    ends = list(accumulate(apportion(num_layers, [1.0] * num_stages)))
    groups = [sorted(ranks[at : at + tensor_size]) for at in range(0, len(ranks), tensor_size)]
    # In the order of their leaders.
    in_order = sorted(groups[at : at + num_stages] for at in range(0, len(groups), num_stages))
    pipelines = []
    for of_pipeline in in_order:
        cut = [shard_runs(group, num_shards) for group in of_pipeline]
        stages = (
            Stage(first_layer=first, end_layer=end, attention=runs, mlp=runs)
            for first, end, runs in zip([0, *ends[:-1]], ends, cut, strict=True)
        )
        pipelines.append(Pipeline(stages=tuple(stages), batch_share=1.0 / len(in_order)))
    return tuple(pipelines)
