"""How survivors go on by themselves: the same layout without the dead, every expert re-hosted.

All ranks could compute it alike; the leader does and the others take its answer. The controller
improves on it later: this rule only has to be safe, balanced and deterministic.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.layout import ExpertReplica, Layout, ReplicaSet
from pacekeeper.core.layout.mesh_resize import remove_ranks
from pacekeeper.core.layout.replica_spread import DomainOf, domain_of_rank, level_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFloor:
    """What survivors give every expert again: so many hosts, on as many distinct domains.

    `slots_per_rank` bounds the replicas of one layer that a rank takes on (None: nothing does). A
    host too few is worse than a slot too many, a domain too few is not.
    """

    hosts: int = 2
    domain_of: DomainOf = field(default_factory=dict)
    slots_per_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How survivors go on: on `layout`, with what they hold, or all with what a checkpoint holds.

    `restore`: paths of checkpoints, of which the first that all can read is taken; empty: none.
    `only_lost`: of it only what has no living holder; who lives stays where it is.
    """

    layout: Layout
    restore: tuple[str, ...] = ()
    only_lost: bool = False


def shrink(
    layout: Layout,
    *,
    dead: Collection[int],
    generation: int,
    floor: ReplicationFloor | None = None,
    is_restored: bool = False,
    are_experts_filled: bool = False,
) -> Layout:
    """`layout` without the `dead` ranks, every expert with the hosts of `floor` again (or all).

    Stages and tensor groups go on as `core/layout/mesh_resize.py` says. A survivor's share grows in
    proportion. An expert that lost a host, or is below the floor's hosts, gets fresh ones, first
    where it adds a domain, then on the least burdened ranks, and shares that level the ranks' work.
    Nobody gives a living replica up: an expert that lost nothing stands as safe as before, and its
    copies would only delay the others. Raises LostStateError where a block has no living holder;
    with `is_restored`, none needs one: a checkpoint fills the layout; with `are_experts_filled`
    experts need none: the others hold what they hold.
    """
    gone = set(dead)
    pipelines = remove_ranks(layout, gone, is_restored=is_restored)
    are_free = is_restored or are_experts_filled
    experts = tuple(
        _rehost(
            layer, layout.experts[layer], stage.ranks, gone, floor or ReplicationFloor(), are_free
        )
        for stage in pipelines.stages
        for layer in range(stage.first_layer, stage.end_layer)
    )
    return replace(
        layout,
        generation=generation,
        stages=pipelines.stages,
        experts=experts,
        batch_shares=pipelines.batch_shares,
        standing_by=pipelines.standing_by,
        speeds=tuple((rank, speed) for rank, speed in layout.speeds if rank not in gone),
    )


def _rehost(
    layer: int,
    experts: tuple[ReplicaSet, ...],
    staying: tuple[int, ...],
    gone: set[int],
    floor: ReplicationFloor,
    are_free: bool,
) -> tuple[ReplicaSet, ...]:
    """`staying`: the ranks that still run this layer; others may live and be a source only.
    `are_free`: an expert may have lost all its hosts.
    """
    shares: list[dict[int, float]] = []
    there = frozenset(staying)
    for expert, hosts in enumerate(experts):
        if not are_free and all(host.rank in gone for host in hosts):
            raise LostStateError(
                f"layer {layer} expert {expert}: all its hosts "
                f"{[host.rank for host in hosts]} are dead",
                remedy="restart from a checkpoint, with more replicas per expert",
            )
        left = {host.rank: host.share for host in hosts if host.rank in there}
        shares.append(_normalised(left))
    has_lost = [len(now) < len(hosts) for now, hosts in zip(shares, experts, strict=True)]
    hosts_of = _refilled([set(s) for s in shares], has_lost, staying, floor)
    changed = [e for e, s in enumerate(shares) if hosts_of[e] != set(s)]
    taken = dict.fromkeys(staying, 0.0)
    for expert in set(range(len(shares))).difference(changed):
        for rank, share in shares[expert].items():
            taken[rank] += share
    level = len(shares) / len(staying)
    levelled = level_shares([hosts_of[e] for e in changed], taken, level)
    for expert, fresh in zip(changed, levelled, strict=True):
        shares[expert] = fresh
    return tuple(tuple(ExpertReplica(rank, share) for rank, share in s.items()) for s in shares)


def _refilled(
    hosts: list[set[int]], has_lost: list[bool], staying: tuple[int, ...], floor: ReplicationFloor
) -> list[set[int]]:
    """`hosts` and fresh ones: as few as the floor asks for."""
    name = {rank: domain_of_rank(floor.domain_of, rank) for rank in staying}
    enough = min(max(1, floor.hosts), len(staying))
    wide = min(enough, len(set(name.values())))
    used = {rank: sum(rank in on for on in hosts) for rank in staying}
    slots = len(hosts) if floor.slots_per_rank is None else floor.slots_per_rank

    def add(on: set[int], ranks: Collection[int]) -> None:
        covered = {name[rank] for rank in on}
        fresh = min(ranks, key=lambda r: (used[r] >= slots, name[r] in covered, used[r], r))
        on.add(fresh)
        used[fresh] += 1

    # First those that only some ranks can help, or others take the slots on these.
    for on, is_hit in zip(hosts, has_lost, strict=True):
        while is_hit or len(on) < enough:
            covered = {name[rank] for rank in on}
            free = [r for r in staying if name[r] not in covered and used[r] < slots]
            if len(covered) >= wide or not free:
                break
            add(on, free)
    for on in hosts:
        while len(on) < enough:
            add(on, [rank for rank in staying if rank not in on])
    return hosts


def _normalised(shares: dict[int, float]) -> dict[int, float]:
    """The same in proportion, adding up to 1, ranks ascending."""
    total = sum(shares.values())
    return {
        rank: share / total if total > 0.0 else 1.0 / len(shares)
        for rank, share in sorted(shares.items())
    }
