"""Which layouts the engine can run, and the one it starts with."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf


def start_layout(
    num_experts: Sequence[int],
    ranks: Sequence[int],
    replicas: int = 1,
    domain_of: DomainOf = NO_DOMAINS,
) -> Layout:
    """Return a layout with equal work on every rank.

    Args:
        num_experts: Experts of each layer; 0: a dense layer.
        ranks: All ranks.
        replicas: Replicas of each expert.
        domain_of: Failure domain of each rank: replicas are spread over them.
    """
    layout = even_layout(
        ranks=ranks,
        num_layers=len(num_experts),
        num_experts=max(num_experts),
        replicas=replicas,
        domain_of=domain_of,
    )
    return replace(
        layout,
        experts=tuple(
            placed[:count] for placed, count in zip(layout.experts, num_experts, strict=True)
        ),
    )


def check_layout(layout: Layout, num_experts: Sequence[int], ranks: Sequence[int]) -> None:
    """Reject a layout of another model or of other ranks, or one that splits layers.

    Args:
        layout: The layout.
        num_experts: Experts of each layer of the model; 0: a dense layer.
        ranks: Ranks of the job's groups.

    Raises:
        ConfigError: What the layout has and the engine has not.
    """
    name = f"the layout of generation {layout.generation}"
    if layout.ranks != tuple(ranks):
        raise ConfigError(
            f"{name} is of {len(layout.ranks)} ranks, the engine runs on {len(ranks)}",
            remedy="give a layout of exactly the ranks of the process group",
        )
    experts = [len(placed) for placed in layout.experts]
    if experts != list(num_experts):
        raise ConfigError(
            f"{name} is of another model: by layer it has {experts} experts, "
            f"the model has {list(num_experts)}",
            remedy="make the layout for this model",
        )
    working = len(layout.working)
    is_split = any(count != working for count in layout.num_ranks_by_layer)
    if is_split or len(layout.batch_shares) != working:
        raise ConfigError(
            f"{name} has pipeline stages or tensor groups",
            remedy="give a layout in which every rank runs all layers whole, or stands by",
        )
    if layout.state_owners:
        raise ConfigError(
            f"{name} names owners of optimizer state, the engine has it on all ranks",
            remedy="give a layout without state_owners",
        )


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
    left = max(len(layout.ranks) - spare_ranks, 1)
    replicas = max((sum(map(len, experts)) for experts in layout.experts), default=0)
    most = max(most, -(-replicas // left))
    return min(most + (len(layout.ranks) > 1), max(*num_experts, 1))
