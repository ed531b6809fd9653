"""Adds ranks to a running job: the same layout, wider, with as few moves as possible.

The leader computes it and the other ranks take the result, as with `shrink`. The
controller improves the layout later, so this rule only has to be safe, balanced and deterministic.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.layout import Block, ExpertReplica, Layout, ReplicaSet, ranks_by_layer
from pacekeeper.core.layout.replica_spread import domain_of_rank, level_shares
from pacekeeper.core.layout.resize.mesh import add_ranks
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, levelled, shrink
from pacekeeper.core.layout.state_owners import NO_SIZES, assign_state_owners


def grow(
    layout: Layout,
    *,
    newcomers: Collection[int],
    generation: int,
    floor: ReplicationFloor | None = None,
    lost: Collection[tuple[int, int]] = (),
    state_bytes: Mapping[Block, int] = NO_SIZES,
) -> Layout:
    """Add `newcomers`, which hold no state yet, to `layout`.

    A new rank takes replicas from the ranks that hold most, until it holds its even part and as far
    as slots allow; no expert loses a failure domain by that. Experts below the floor come first: on
    a domain that they lack, then with the missing number of replicas. Existing ranks get a replica
    only where new ranks cannot satisfy the floor. `core/layout/resize/mesh.py` places ranks in
    pipelines and groups. Batch shares are proportional to the layout's speeds (1.0 for a new rank);
    shares of experts whose replicas changed level the work of the ranks.

    Args:
        layout: the layout in use.
        newcomers: the new ranks, at least one, none of them in `layout`.
        generation: the number of the new layout.
        floor: the replication every expert gets; default: `ReplicationFloor()`.
        lost: (layer, expert) pairs of which existing ranks may take replicas, too.
        state_bytes: as in `shrink`.

    Raises:
        ValueError: there is no new rank, or one is already in `layout`.
    """
    floor = floor or ReplicationFloor()
    fresh = tuple(sorted(set(newcomers)))
    if not fresh or set(fresh) & set(layout.ranks):
        raise ValueError(f"ranks {list(fresh)} cannot join those of {list(layout.ranks)}")
    mesh = add_ranks(layout, fresh)
    speed, working = layout.speed_by_rank | dict.fromkeys(fresh, 1.0), set(layout.working)
    experts: list[tuple[ReplicaSet, ...]] = []
    for layer, ranks in enumerate(ranks_by_layer(mesh.pipelines)):
        whole = sum(speed[rank] for rank in ranks)
        experts.append(
            _widened(
                layout.experts[layer],
                [rank for rank in ranks if rank not in working],
                {rank: speed[rank] / whole for rank in ranks},
                floor,
                _order(layer, len(layout.experts[layer])),
                _of(layer, lost),
            )
        )
    after = replace(
        layout,
        generation=generation,
        pipelines=mesh.pipelines,
        experts=tuple(experts),
        state_owners=(),
        standing_by=mesh.standing_by,
    )
    if not layout.state_owners:
        return after
    return assign_state_owners(after, before=layout, sizes=state_bytes, domain_of=floor.domain_of)


def resize(
    layout: Layout,
    staying: Collection[int],
    *,
    generation: int,
    floor: ReplicationFloor,
    is_restored: bool = False,
    are_experts_filled: bool = False,
    state_bytes: Mapping[Block, int] = NO_SIZES,
) -> Layout:
    """The layout that the `staying` ranks continue with: without the missing ranks, with the new
    ones.

    New ranks first take the replicas of dead ranks. Where an expert then still lacks a domain that
    it lost, existing ranks take a replica. With fixed slots each expert gets as many replicas as
    fit for all alike, then experts get further ones where a slot is left; if lost experts do not
    fit beside the living replicas, only one of each expert stays.

    Args:
        layout: the layout in use.
        staying: all ranks of the next layout.
        generation: the number of the next layout.
        floor: the replication every expert gets.
        is_restored: as in `shrink`.
        are_experts_filled: as in `shrink`.
        state_bytes: as in `shrink`.

    Raises:
        LostStateError: as in `shrink`.
    """
    resized = partial(
        _resized,
        staying=staying,
        generation=generation,
        is_restored=is_restored,
        are_experts_filled=are_experts_filled,
        state_bytes=state_bytes,
    )
    if not floor.are_slots_fixed or floor.slots_per_rank is None:
        return resized(layout, floor=floor)
    fewer = [replace(floor, replicas=n) for n in range(floor.replicas, 0, -1)]
    attempts = [*((layout, one) for one in fewer), (_with_one_replica(layout, staying), fewer[-1])]
    for before, lowered in attempts:
        found = resized(before, floor=lowered)
        if _fits(found, floor.slots_per_rank):
            return found if lowered is fewer[0] else _topped_up(found, floor, floor.slots_per_rank)
    raise LostStateError(
        f"{len(staying)} ranks with {floor.slots_per_rank} slots per layer do not hold all experts",
        remedy="start it again with more ranks or more slots_per_rank",
    )


def _fits(layout: Layout, slots: int) -> bool:
    """Whether no rank holds more experts of a layer than it has slots."""
    for experts in layout.experts:
        held = Counter(replica.rank for replicas in experts for replica in replicas)
        if max(held.values(), default=0) > slots:
            return False
    return True


def _with_one_replica(layout: Layout, staying: Collection[int]) -> Layout:
    """The layout with one staying replica of each expert that has any, on the least loaded rank."""
    layers = []
    for experts in layout.experts:
        held = Counter[int]()
        kept = list(experts)
        # Experts that can lie on few ranks choose first.
        living = [[r.rank for r in on if r.rank in staying] for on in experts]
        for expert in sorted(range(len(experts)), key=lambda e: (len(living[e]), e)):
            if living[expert]:
                rank = min(living[expert], key=lambda r: (held[r], r))
                held[rank] += 1
                kept[expert] = (ExpertReplica(rank, 1.0),)
        layers.append(tuple(kept))
    return replace(layout, experts=tuple(layers))


def _topped_up(layout: Layout, floor: ReplicationFloor, slots: int) -> Layout:
    """The layout with further replicas of experts below the floor, where ranks have free slots."""
    layers = []
    for experts, ranks in zip(layout.experts, ranks_by_layer(layout.pipelines), strict=True):
        placed = [{replica.rank for replica in on} for on in experts]
        used = Counter(chain.from_iterable(placed))
        with_room = {rank for rank in ranks if used[rank] < slots}
        changed = set[int]()
        for wanted in range(2, min(floor.replicas, len(ranks)) + 1):
            for expert, on in enumerate(placed):
                if len(on) < wanted and (free := with_room - on):
                    covered = {domain_of_rank(floor.domain_of, rank) for rank in on}
                    fresh = min(
                        free,
                        key=lambda r: (domain_of_rank(floor.domain_of, r) in covered, used[r], r),
                    )
                    on.add(fresh)
                    used[fresh] += 1
                    changed.add(expert)
                    if used[fresh] >= slots:
                        with_room.remove(fresh)
        layers.append(levelled(experts, placed, sorted(changed), ranks))
    return replace(layout, experts=tuple(layers))


def _resized(
    layout: Layout,
    staying: Collection[int],
    *,
    generation: int,
    floor: ReplicationFloor,
    is_restored: bool,
    are_experts_filled: bool,
    state_bytes: Mapping[Block, int],
) -> Layout:
    gone, fresh = set(layout.ranks).difference(staying), set(staying).difference(layout.ranks)
    without = partial(
        shrink,
        layout,
        dead=gone,
        generation=generation,
        is_restored=is_restored,
        are_experts_filled=are_experts_filled,
        state_bytes=state_bytes,
    )
    if not fresh:
        return without(floor=floor)
    left = without(floor=ReplicationFloor(replicas=1)) if gone else layout
    lost = [
        (layer, expert)
        for layer, experts in enumerate(layout.experts)
        for expert, replicas in enumerate(experts)
        if any(replica.rank in gone for replica in replicas)
    ]
    return grow(
        left,
        newcomers=fresh,
        generation=generation,
        floor=floor,
        lost=lost,
        state_bytes=state_bytes,
    )


def _order(layer: int, num_experts: int) -> list[int]:
    """The order in which a layer's experts are visited; layers start at different experts."""
    return [(layer + i) % num_experts for i in range(num_experts)]


def _of(layer: int, lost: Collection[tuple[int, int]]) -> frozenset[int]:
    return frozenset(expert for of, expert in lost if of == layer)


@dataclass(slots=True, kw_only=True)
class _ReplicaTable:
    """The replica ranks of each expert of one layer while they change.

    `name`: the failure domain of each rank; `used`: occupied slots by rank.
    """

    replicas: list[set[int]]
    name: Mapping[int, Hashable]  # the domain of each rank
    used: dict[int, int]
    slots: int

    def covered(self, expert: int) -> set[Hashable]:
        return {self.name[rank] for rank in self.replicas[expert]}

    def able_to_widen(self, covered: Collection[Hashable], ranks: Collection[int]) -> list[int]:
        """Those of `ranks` that have a free slot and lie outside the `covered` domains."""
        return [r for r in ranks if self.name[r] not in covered and self.used[r] < self.slots]

    def add(self, expert: int, ranks: Collection[int]) -> None:
        """Add a replica on one of `ranks`: in a new domain if possible, then the least loaded."""
        covered = self.covered(expert)
        rank = min(
            ranks,
            key=lambda r: (
                self.used[r] >= self.slots,
                self.name[r] in covered,
                self.used[r],
                r,
            ),
        )
        self.replicas[expert].add(rank)
        self.used[rank] += 1

    def drop(self, expert: int, rank: int) -> None:
        self.replicas[expert].remove(rank)
        self.used[rank] -= 1

    def can_hand_over(self, expert: int, giver: int, taker: int) -> bool:
        """Whether `giver` can pass the expert to `taker` without loss of a domain."""
        on = self.replicas[expert]
        if giver not in on or taker in on:
            return False
        after = {self.name[rank] for rank in on if rank != giver} | {self.name[taker]}
        return len(after) >= len(self.covered(expert))


def _widened(
    experts: tuple[ReplicaSet, ...],
    fresh: Sequence[int],
    pace: Mapping[int, float],
    floor: ReplicationFloor,
    order: Sequence[int],
    lost: Collection[int],
) -> tuple[ReplicaSet, ...]:
    """The replicas of one layer after the new ranks joined.

    `pace`: each rank's part of the total speed, for all ranks of the wider layout. `order`: of
    experts. `lost`: the experts that lost a replica.
    """
    if not experts:
        return experts
    before = [{replica.rank: replica.share for replica in replicas} for replicas in experts]
    table = _ReplicaTable(
        replicas=[set(replicas) for replicas in before],
        name={rank: domain_of_rank(floor.domain_of, rank) for rank in pace},
        used=dict.fromkeys(pace, 0) | Counter(chain.from_iterable(before)),
        slots=len(experts) if floor.slots_per_rank is None else floor.slots_per_rank,
    )
    _restore_floor(table, order, fresh, min(max(1, floor.replicas), len(pace)), lost)
    _fill_newcomers(table, order, fresh)
    changed = [e for e, replicas in enumerate(before) if table.replicas[e] != set(replicas)]
    # What a rank shall compute, in experts: what it lacks to that it takes of those that changed.
    wanted = {rank: part * len(experts) for rank, part in pace.items()}
    most = max(wanted.values())
    taken = {rank: most - level for rank, level in wanted.items()}
    for expert in set(range(len(experts))).difference(changed):
        for rank, share in before[expert].items():
            taken[rank] += share
    levelled = level_shares([table.replicas[e] for e in changed], taken, most)
    for expert, shares in zip(changed, levelled, strict=True):
        before[expert] = shares
    return tuple(tuple(ExpertReplica(rank, share) for rank, share in s.items()) for s in before)


def _restore_floor(
    table: _ReplicaTable,
    order: Sequence[int],
    fresh: Sequence[int],
    enough: int,
    lost: Collection[int],
) -> None:
    """Widen experts on too few domains, then add replicas where there are too few."""
    wide = min(enough, len(set(table.name.values())))
    for expert in order:
        on = table.replicas[expert]
        while len(covered := table.covered(expert)) < wide:
            able = table.able_to_widen(covered, fresh)
            if not able and expert in lost:
                able = table.able_to_widen(covered, table.name)
            if not able:
                break
            if len(on) >= enough:  # one of those that share a domain makes room
                names = [table.name[rank] for rank in on]
                spare = [rank for rank in on if names.count(table.name[rank]) > 1]
                table.drop(expert, max(spare, key=lambda r: (table.used[r], r)))
            table.add(expert, able)
    for expert in order:
        while len(table.replicas[expert]) < enough:
            table.add(expert, [r for r in table.name if r not in table.replicas[expert]])


def _fill_newcomers(table: _ReplicaTable, order: Sequence[int], fresh: Sequence[int]) -> None:
    """Move replicas from the ranks that hold most to new ranks, up to their even part."""
    even = min(table.slots, sum(table.used.values()) // len(table.used))
    short = {rank for rank in fresh if table.used[rank] < even}
    while short:
        taker = min(short, key=lambda r: (table.used[r], r))
        givers = sorted(
            (r for r, count in table.used.items() if count > even),
            key=lambda r: (-table.used[r], r),
        )
        for giver in givers:
            fitting = (e for e in order if table.can_hand_over(e, giver, taker))
            expert = next(fitting, None)
            if expert is not None:
                table.drop(expert, giver)
                table.replicas[expert].add(taker)
                table.used[taker] += 1
                break
        else:
            short.remove(taker)  # any more would take an expert from a domain
        if table.used[taker] >= even:
            short.discard(taker)
