"""How a running job takes in more ranks: the same layout, wider, with as little moved as it takes.

Pure, as `core/layout/shrink.py` is: the leader computes it, the others take its answer. The
controller improves on it later: this rule only has to be safe, balanced and deterministic.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pacekeeper.core.layout.layout import ExpertReplica, Layout, ReplicaSet
from pacekeeper.core.layout.mesh_resize import add_ranks
from pacekeeper.core.layout.replica_spread import domain_of_rank, level_shares
from pacekeeper.core.layout.shrink import ReplicationFloor, shrink


def grow(
    layout: Layout,
    *,
    newcomers: Collection[int],
    generation: int,
    floor: ReplicationFloor | None = None,
) -> Layout:
    """`layout` with the `newcomers`, which hold nothing yet: all ranks at work, floors regained.

    A newcomer takes replicas over from the ranks that hold most, until it holds its even part of
    them, slots permitting; none lets an expert stand on fewer domains. First come experts below the
    floor: on a domain they lack, then with as many hosts as they lack. Who was there gets a replica
    only where newcomers can not fill a floor. Stages and groups take them in as
    `core/layout/mesh_resize.py` says. Batch shares are even in proportion to the layout's speeds (a
    newcomer's: 1.0); shares of experts that changed hosts level the ranks' work alike.

    Raises ValueError for no newcomers and for ranks that are there already.
    """
    return _grown(layout, newcomers, generation, floor or ReplicationFloor(), frozenset())


def _grown(
    layout: Layout,
    newcomers: Collection[int],
    generation: int,
    floor: ReplicationFloor,
    lost: Collection[tuple[int, int]],
) -> Layout:
    """As `grow`; of the (layer, expert) in `lost` who was there takes what newcomers can not."""
    fresh = tuple(sorted(set(newcomers)))
    if not fresh or set(fresh) & set(layout.ranks):
        raise ValueError(f"ranks {list(fresh)} can not join those of {list(layout.ranks)}")
    pipelines = add_ranks(layout, fresh)
    speed, working = layout.speed_by_rank | dict.fromkeys(fresh, 1.0), set(layout.working)
    experts: list[tuple[ReplicaSet, ...]] = []
    for stage in pipelines.stages:
        whole = sum(speed[rank] for rank in stage.ranks)
        pace = {rank: speed[rank] / whole for rank in stage.ranks}
        new = [rank for rank in stage.ranks if rank not in working]
        experts += [
            _widened(
                layout.experts[layer],
                new,
                pace,
                floor,
                _order(layer, len(layout.experts[layer])),
                _of(layer, lost),
            )
            for layer in range(stage.first_layer, stage.end_layer)
        ]
    return replace(
        layout,
        generation=generation,
        stages=pipelines.stages,
        experts=tuple(experts),
        batch_shares=pipelines.batch_shares,
        standing_by=pipelines.standing_by,
    )


def resize(
    layout: Layout,
    staying: Collection[int],
    *,
    generation: int,
    floor: ReplicationFloor,
    is_restored: bool = False,
    are_experts_filled: bool = False,
) -> Layout:
    """What the `staying` ranks go on with: without who is not among them, with who is new.

    What the dead held newcomers take first; then, where an expert still lacks a domain that the
    dead took, who was there. Raises LostStateError, and takes `is_restored` and
    `are_experts_filled`, as `shrink` does.
    """
    gone, fresh = set(layout.ranks).difference(staying), set(staying).difference(layout.ranks)
    without = partial(
        shrink,
        layout,
        dead=gone,
        generation=generation,
        is_restored=is_restored,
        are_experts_filled=are_experts_filled,
    )
    if not fresh:
        return without(floor=floor)
    left = without(floor=ReplicationFloor(hosts=1)) if gone else layout
    lost = [
        (layer, expert)
        for layer, experts in enumerate(layout.experts)
        for expert, hosts in enumerate(experts)
        if any(host.rank in gone for host in hosts)
    ]
    return _grown(left, fresh, generation, floor, lost)


def _order(layer: int, num_experts: int) -> list[int]:
    """Layers begin at different experts, so that not all of them give up the same ones."""
    return [(layer + i) % num_experts for i in range(num_experts)]


def _of(layer: int, lost: Collection[tuple[int, int]]) -> frozenset[int]:
    return frozenset(expert for of, expert in lost if of == layer)


@dataclass(slots=True, kw_only=True)
class _Table:
    """Who hosts which expert of one layer, while that changes; `used`: slots by rank."""

    hosts: list[set[int]]
    name: Mapping[int, Hashable]  # the domain of each rank
    used: dict[int, int]
    slots: int

    def covered(self, expert: int) -> set[Hashable]:
        return {self.name[rank] for rank in self.hosts[expert]}

    def able_to_widen(self, covered: Collection[Hashable], ranks: Collection[int]) -> list[int]:
        """Of `ranks` those on other domains than the `covered`, with a slot left."""
        return [r for r in ranks if self.name[r] not in covered and self.used[r] < self.slots]

    def add(self, expert: int, ranks: Collection[int]) -> None:
        """One of `ranks`: where it adds a domain, then the least burdened."""
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
        self.hosts[expert].add(rank)
        self.used[rank] += 1

    def drop(self, expert: int, rank: int) -> None:
        self.hosts[expert].remove(rank)
        self.used[rank] -= 1

    def can_hand_over(self, expert: int, giver: int, taker: int) -> bool:
        """Is `taker` no host yet, and does the expert stand on as many domains afterwards?"""
        on = self.hosts[expert]
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
    """`pace`: each rank's part of the speed of all, all ranks of the wider layout. `order`: of
    experts; the `lost` ones lost a host.
    """
    if not experts:
        return experts
    before = [{host.rank: host.share for host in hosts} for hosts in experts]
    table = _Table(
        hosts=[set(hosts) for hosts in before],
        name={rank: domain_of_rank(floor.domain_of, rank) for rank in pace},
        used={rank: sum(rank in hosts for hosts in before) for rank in pace},
        slots=len(experts) if floor.slots_per_rank is None else floor.slots_per_rank,
    )
    _regain(table, order, fresh, min(max(1, floor.hosts), len(pace)), lost)
    _take_over(table, order, fresh)
    changed = [e for e, hosts in enumerate(before) if table.hosts[e] != set(hosts)]
    # What a rank shall compute, in experts: what it lacks to that it takes of those that changed.
    wanted = {rank: part * len(experts) for rank, part in pace.items()}
    most = max(wanted.values())
    taken = {rank: most - level for rank, level in wanted.items()}
    for expert in set(range(len(experts))).difference(changed):
        for rank, share in before[expert].items():
            taken[rank] += share
    levelled = level_shares([table.hosts[e] for e in changed], taken, most)
    for expert, shares in zip(changed, levelled, strict=True):
        before[expert] = shares
    return tuple(tuple(ExpertReplica(rank, share) for rank, share in s.items()) for s in before)


def _regain(
    table: _Table,
    order: Sequence[int],
    fresh: Sequence[int],
    enough: int,
    lost: Collection[int],
) -> None:
    """Experts on too few domains, then those with too few hosts."""
    wide = min(enough, len(set(table.name.values())))
    for expert in order:
        on = table.hosts[expert]
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
        while len(table.hosts[expert]) < enough:
            table.add(expert, [r for r in table.name if r not in table.hosts[expert]])


def _take_over(table: _Table, order: Sequence[int], fresh: Sequence[int]) -> None:
    """Newcomers take replicas from those that hold most, up to their even part."""
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
                table.hosts[expert].add(taker)
                table.used[taker] += 1
                break
        else:
            short.remove(taker)  # any more would take an expert from a domain
        if table.used[taker] >= even:
            short.discard(taker)
