"""Which layouts the engine can run, and the one it starts with."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import prod

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout, ShardRun
from pacekeeper.core.layout.live_rules import check_live_layout
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf
from pacekeeper.trainer.model.families import family_of
from pacekeeper.trainer.model.skeleton import Skeleton
from pacekeeper.trainer.parallel.moves import require_slots


def start_layout(
    num_experts: Sequence[int],
    ranks: Sequence[int],
    replicas: int = 1,
    domain_of: DomainOf = NO_DOMAINS,
    num_stages: int = 1,
    tensor_size: int = 1,
    num_attention_shards: int = 1,
    num_mlp_shards: int = 1,
    shared_mlp_layers: Sequence[int] = (),
) -> Layout:
    """Return a layout with equal work on every rank.

    Args:
        num_experts: Experts of each layer; 0: a dense layer.
        ranks: All ranks.
        replicas: Replicas of each expert, on ranks of the stages that run its layer.
        domain_of: Failure domain of each rank: replicas are spread over them.
        num_stages: Pipeline stages.
        tensor_size: Ranks of a tensor group.
        num_attention_shards: Virtual shards of a layer's attention.
        num_mlp_shards: Virtual shards of a layer's dense MLP and shared experts; where they are
            fewer than a tensor group's ranks, some ranks have none.
        shared_mlp_layers: Layers with experts whose shared experts are divided, as of the model's
            `Skeleton`.

    Raises:
        ConfigError: Ranks, layers or shards do not make such a layout.
    """
    try:
        layout = even_layout(
            ranks=ranks,
            num_layers=len(num_experts),
            num_experts=max(num_experts),
            replicas=replicas,
            domain_of=domain_of,
            num_virtual_shards=num_attention_shards,
            num_stages=num_stages,
            tensor_size=tensor_size,
        )
    except ValueError as error:
        raise ConfigError(
            f"no layout: {error}",
            remedy="change the number of ranks, stages, replicas, or ranks of a tensor group",
        ) from error
    ends = list(accumulate(apportion(num_mlp_shards, [1.0] * tensor_size)))
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, mlp=tuple(map(ShardRun, stage.group, [0, *ends[:-1]], ends)))
                for stage in pipeline.stages
            ),
        )
        for pipeline in layout.pipelines
    )
    return replace(
        layout,
        pipelines=pipelines,
        num_mlp_shards=num_mlp_shards,
        shared_mlp_layers=tuple(shared_mlp_layers),
        experts=tuple(
            placed[:count] for placed, count in zip(layout.experts, num_experts, strict=True)
        ),
    )


def state_sizes(skeleton: Skeleton) -> dict[Block, int]:
    """Return the bytes of each dense block's weights; its optimizer state is in proportion."""
    return {
        block: sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())
        for block, specs in skeleton.blocks.items()
        if block.kind is not BlockKind.EXPERT
    }


def check_layout(layout: Layout, skeleton: Skeleton, ranks: Sequence[int], num_slots: int) -> None:
    """Reject a layout of another model or of other ranks, or one that the engine cannot run.

    Args:
        layout: The layout.
        skeleton: The model.
        ranks: Ranks of the job's groups.
        num_slots: Experts of a layer that each rank has memory for.

    Raises:
        ConfigError: What the layout has and the engine has not.
    """
    name = f"the layout of generation {layout.generation}"
    if layout.ranks != tuple(ranks):
        raise ConfigError(
            f"{name} is of {len(layout.ranks)} ranks, the engine runs on {len(ranks)}",
            remedy="give a layout of exactly the ranks of the process group",
        )
    model = {
        "numbers of experts by layer": [one.num_experts if one else 0 for one in skeleton.experts],
        "attention shards": skeleton.num_attention_shards,
        "MLP shards": skeleton.num_mlp_shards,
        "layers with shared experts that are divided": list(skeleton.shared_mlp_layers),
    }
    own = {
        "numbers of experts by layer": list(map(len, layout.experts)),
        "attention shards": layout.num_attention_shards,
        "MLP shards": layout.num_mlp_shards,
        "layers with shared experts that are divided": list(layout.shared_mlp_layers),
    }
    for what, value in model.items():
        if own[what] != value:
            raise ConfigError(
                f"{name} is of another model: {what}: it has {own[what]}, the model has {value}",
                remedy="make the layout for this model",
            )
    has_groups = any(len(stage.group) > 1 for stages in layout.mesh for stage in stages)
    has_stages = any(len(stages) > 1 for stages in layout.mesh)
    family = family_of(skeleton.config.model_type)
    for what, is_there, is_possible in (
        ("tensor groups", has_groups, family.tensor_groups),
        ("pipeline stages", has_stages, family.stages),
    ):
        if is_there and not is_possible:
            raise ConfigError(
                f"{name} has {what}, and {skeleton.config.model_type} passes more than hidden "
                "states from layer to layer",
                remedy=f"give a layout without {what}; docs/models.md says which families can",
            )
    if has_groups and not skeleton.cuts:
        raise ConfigError(
            f"{name} has tensor groups, and no tensor of the model is divided",
            remedy="build the model with more virtual shards, or give groups of one rank",
        )
    if has_stages and skeleton.has_ties:
        raise ConfigError(
            f"{name} has pipeline stages, and embedding and head of the model share a tensor",
            remedy="set tie_word_embeddings to false in the model's configuration, "
            "or give one stage",
        )
    try:
        check_live_layout(layout)
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error}",
            remedy="give all pipelines stages of the same layers, and each rank of a tensor group "
            "an attention shard",
        ) from error
    require_slots(layout, num_slots)


def most_experts_on_a_rank(layout: Layout) -> int:
    """Return the most experts of one layer that a rank holds; 0 for a dense model."""
    held = (
        Counter(replica.rank for replica in chain.from_iterable(placed))
        for placed in layout.experts
    )
    return max((max(counts.values()) for counts in held if counts), default=0)


def default_slots(layout: Layout, num_experts: Sequence[int], spare_ranks: int = 0) -> int:
    """Return how many experts of a layer a rank gets memory for where nothing is asked for.

    As many as the layout puts on any rank, and one more to move into if there are several ranks.

    Args:
        layout: The layout to start with.
        num_experts: Experts of each layer of the model.
        spare_ranks: Ranks whose replicas must fit on the others, too.
    """
    most = most_experts_on_a_rank(layout)
    ranks_of = [len(layout.ranks)] * layout.num_layers
    if any(len(stages) > 1 for stages in layout.mesh):
        ranks_of = list(layout.num_ranks_by_layer)
    for experts, num_ranks in zip(layout.experts, ranks_of, strict=True):
        most = max(most, -(-sum(map(len, experts)) // max(num_ranks - spare_ranks, 1)))
    return min(most + (len(layout.ranks) > 1), max(*num_experts, 1))
