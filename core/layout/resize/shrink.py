"""Removes dead ranks from a layout: every expert gets its replicas back on the survivors.

The leader computes it and the other ranks take the result. The controller improves the layout
later, so this rule only has to be safe, balanced and deterministic.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.layout import Block, ExpertReplica, Layout, ReplicaSet, ranks_by_layer
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf, domain_of_rank, level_shares
from pacekeeper.core.layout.resize.mesh import remove_ranks
from pacekeeper.core.layout.state_owners import NO_SIZES, assign_state_owners


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFloor:
    """The replication that survivors restore for every expert.

    `replicas`: how many, on as many distinct failure domains. `slots_per_rank`: the most replicas
    of one layer on a rank; None: unlimited. A missing replica is worse than an extra slot, unless
    `are_slots_fixed`: then as many replicas are restored as fit. A missing domain is never worse.
    """

    replicas: int = 2
    domain_of: DomainOf = field(default_factory=dict)
    slots_per_rank: int | None = None
    are_slots_fixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How survivors continue: on `layout`, with the state they hold or with that of a checkpoint.

    `restore`: paths of checkpoints; the first that all ranks can read is used. Empty: no restore.
    `only_lost`: restore only blocks without a living holder; all other blocks stay as they are.
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
    state_bytes: Mapping[Block, int] = NO_SIZES,
) -> Layout:
    """Remove the `dead` ranks from `layout` and restore every expert's replicas.

    `core/layout/resize/mesh.py` places the survivors in pipelines and tensor groups. The share of a
    surviving replica grows in proportion. An expert that lost a replica, or has fewer than the
    floor, gets new replicas: first on a new domain, then on the least loaded ranks, with shares
    that level the work. Living replicas are never removed. Owners and mirrors of optimizer state
    that live stay; the mirror of a dead owner becomes the owner.

    Args:
        layout: the layout in use.
        dead: the ranks to remove.
        generation: the number of the new layout.
        floor: the replication every expert gets; default: `ReplicationFloor()`.
        is_restored: a checkpoint fills the layout, so no block needs a living holder.
        are_experts_filled: a checkpoint fills lost experts, so no expert needs a living holder.
        state_bytes: the bytes of each dense block's optimizer state, by which owners are balanced.

    Raises:
        LostStateError: a block has no living holder, or its optimizer state no living owner or
            mirror.
    """
    gone = set(dead)
    mesh = remove_ranks(layout, gone, is_restored=is_restored)
    if not is_restored:
        _check_owned(layout, gone)
    are_free = is_restored or are_experts_filled
    experts = tuple(
        _restore_replicas(
            layer, layout.experts[layer], ranks, gone, floor or ReplicationFloor(), are_free
        )
        for layer, ranks in enumerate(ranks_by_layer(mesh.pipelines))
    )
    after = replace(
        layout,
        generation=generation,
        pipelines=mesh.pipelines,
        experts=experts,
        state_owners=(),
        standing_by=mesh.standing_by,
        speeds=tuple((rank, speed) for rank, speed in layout.speeds if rank not in gone),
    )
    if not layout.state_owners:
        return after
    domain_of = NO_DOMAINS if floor is None else floor.domain_of
    return assign_state_owners(after, before=layout, sizes=state_bytes, domain_of=domain_of)


def _check_owned(layout: Layout, gone: set[int]) -> None:
    owners = layout.state_owner_by_block
    lost = [block for block, owner in owners.items() if gone.issuperset(owner.ranks)]
    if lost:
        raise LostStateError(
            f"{lost[0]}: owner and mirror of its optimizer state {list(owners[lost[0]].ranks)} are "
            f"dead, and so of {len(lost)} dense blocks",
            remedy="restart from a checkpoint",
        )


def _restore_replicas(
    layer: int,
    experts: tuple[ReplicaSet, ...],
    staying: tuple[int, ...],
    gone: set[int],
    floor: ReplicationFloor,
    are_free: bool,
) -> tuple[ReplicaSet, ...]:
    """The replicas of one layer's experts on the `staying` ranks, which still run it.

    Other living ranks can only be a source. `are_free`: an expert may have lost all its replicas.
    """
    shares: list[dict[int, float]] = []
    there = frozenset(staying)
    for expert, replicas in enumerate(experts):
        if not are_free and all(replica.rank in gone for replica in replicas):
            raise LostStateError(
                f"layer {layer} expert {expert}: all its replicas "
                f"{[replica.rank for replica in replicas]} are dead",
                remedy="restart from a checkpoint, with more replicas per expert",
            )
        left = {replica.rank: replica.share for replica in replicas if replica.rank in there}
        shares.append(_normalised(left))
    has_lost = [len(now) < len(replicas) for now, replicas in zip(shares, experts, strict=True)]
    placed = _refilled([set(s) for s in shares], has_lost, staying, floor)
    changed = [e for e, s in enumerate(shares) if placed[e] != set(s)]
    kept = [tuple(ExpertReplica(rank, share) for rank, share in s.items()) for s in shares]
    return levelled(kept, placed, changed, staying)


def levelled(
    experts: Sequence[ReplicaSet],
    placed: Sequence[set[int]],
    changed: Sequence[int],
    ranks: Sequence[int],
) -> tuple[ReplicaSet, ...]:
    """Return a layer's experts with shares that level the work of the ranks.

    Args:
        experts: replicas with their shares, which stay where an expert is not `changed`.
        placed: the ranks of each expert's replicas.
        changed: experts that get new shares.
        ranks: the ranks that run the layer.
    """
    taken = dict.fromkeys(ranks, 0.0)
    for expert in set(range(len(experts))).difference(changed):
        for replica in experts[expert]:
            taken[replica.rank] += replica.share
    fresh = level_shares([placed[e] for e in changed], taken, len(experts) / len(ranks))
    result = list(experts)
    for expert, shares in zip(changed, fresh, strict=True):
        result[expert] = tuple(ExpertReplica(rank, share) for rank, share in shares.items())
    return tuple(result)


def _refilled(
    replicas: list[set[int]],
    has_lost: list[bool],
    staying: tuple[int, ...],
    floor: ReplicationFloor,
) -> list[set[int]]:
    """`replicas` with as few new ones as the floor requires."""
    name = {rank: domain_of_rank(floor.domain_of, rank) for rank in staying}
    enough = min(max(1, floor.replicas), len(staying))
    wide = min(enough, len(set(name.values())))
    used = dict.fromkeys(staying, 0) | Counter(chain.from_iterable(replicas))
    slots = len(replicas) if floor.slots_per_rank is None else floor.slots_per_rank

    def add(on: set[int], ranks: Collection[int]) -> None:
        covered = {name[rank] for rank in on}
        fresh = min(ranks, key=lambda r: (used[r] >= slots, name[r] in covered, used[r], r))
        on.add(fresh)
        used[fresh] += 1

    # First those that only some ranks can help, or others take the slots on these.
    for on, is_hit in zip(replicas, has_lost, strict=True):
        while is_hit or len(on) < enough:
            covered = {name[rank] for rank in on}
            free = [r for r in staying if name[r] not in covered and used[r] < slots]
            if len(covered) >= wide or not free:
                break
            add(on, free)
    for on in replicas:
        while len(on) < enough:
            add(on, [rank for rank in staying if rank not in on])
    return replicas


def _normalised(shares: dict[int, float]) -> dict[int, float]:
    """The same proportions with sum 1, in ascending order of ranks."""
    total = sum(shares.values())
    return {
        rank: share / total if total > 0.0 else 1.0 / len(shares)
        for rank, share in sorted(shares.items())
    }
