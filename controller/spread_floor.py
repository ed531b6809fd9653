"""The floor on distinct failure domains: which replicas may leave, who is below it, what mends it.

Pure. A placement never takes an expert further below the floor than it is; `restored` brings it
there with one copy, or a swap of two replicas, for each domain that it lacks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pacekeeper.core.layout import Layout
from pacekeeper.core.spread import DomainOf, domain, domains

MAX_SWAPS_LOOKED_AT = 4096  # in one layer: bounds the time where hardly any swap is allowed

Counts = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadFloor:
    """Every expert stands in `least` distinct domains, or as many as it has hosts or there are."""

    least: int = 1
    domain_of: DomainOf = field(default_factory=dict)

    def wanted(self, num_hosts: int, num_domains: int) -> int:
        """In how many domains an expert with so many hosts is to stand."""
        return min(self.least, num_hosts, num_domains)


NO_FLOOR = SpreadFloor()


@dataclass(slots=True, kw_only=True, eq=False)
class Standing:
    """Where one layer's experts stand, while they are moved about.

    domain [ranks] and `count` [experts, domains] by position; `width` [experts]: domains an
    expert stands in; `kept`: how many of them it must keep, at most what the floor asks (`least`).
    """

    domain: Counts
    count: Counts
    width: Counts
    kept: Counts
    least: int

    @classmethod
    def of(
        cls,
        expert: Counts,
        rank: Counts,
        *,
        num_experts: int,
        ranks: Sequence[int],
        floor: SpreadFloor,
    ) -> "Standing":
        """expert and rank [replicas]; ranks: their names by position."""
        number: dict[object, int] = {}
        at = [number.setdefault(domain(floor.domain_of, r), len(number)) for r in ranks]
        place = np.array(at, dtype=np.intp)
        size = num_experts * len(number)
        count = np.bincount(expert * len(number) + place[rank], minlength=size)
        count = count.reshape(num_experts, len(number))
        width = np.count_nonzero(count, axis=1)
        kept = np.minimum(width, floor.least)
        least = min(floor.least, len(number))
        return cls(domain=place, count=count, width=width, kept=kept, least=least)

    def is_wide(self, expert: int) -> bool:
        """May one more host of this expert stand anywhere?"""
        return bool(self.width[expert] >= self.least)

    def is_covered(self, expert: int) -> Flags:
        """The ranks in whose domain it has a host already: [ranks]."""
        covered: Flags = self.count[expert, self.domain] > 0
        return covered

    def may_leave(self, expert: Counts, rank: Counts | int) -> Flags:
        """May these experts each lose their replica on `rank`?"""
        is_wide = self.width[expert] > self.kept[expert]
        may: Flags = is_wide | (self.count[expert, self.domain[rank]] > 1)
        return may

    def may_go(self, expert: Counts | int, rank: int, to: Counts | int) -> Flags:
        """May a replica of `expert` go from `rank` `to` another? One of the two may be an array."""
        there = self.domain[to]
        may: Flags = (
            (self.domain[rank] == there)
            | (self.count[expert, there] == 0)
            | self.may_leave(np.asarray(expert), rank)
        )
        return may

    def recount(self, experts: Collection[int], expert: Counts, rank: Counts) -> None:
        """The replicas (as in `of`) of these experts have changed."""
        for changed in experts:
            at = self.domain[rank[expert == changed]]
            self.count[changed] = row = np.bincount(at, minlength=self.count.shape[1])
            self.width[changed] = np.count_nonzero(row)


def num_narrow(layout: Layout, floor: SpreadFloor) -> int:
    """How many experts of all layers stand in fewer domains than the floor asks for."""
    return sum(len(_narrow(layout, layer, floor)) for layer in range(layout.num_layers))


def _narrow(layout: Layout, layer: int, floor: SpreadFloor) -> list[int]:
    name = {rank: domain(floor.domain_of, rank) for rank in layout.stage_of(layer).ranks}
    num_domains = len(set(name.values()))
    return [
        expert
        for expert, hosts in enumerate(layout.experts[layer])
        if len({name[host.rank] for host in hosts}) < floor.wanted(len(hosts), num_domains)
    ]


def restored(
    layout: Layout, floor: SpreadFloor, *, slots_per_rank: int
) -> dict[int, list[list[int]]]:
    """New hosts of all experts, for each layer in which experts could be brought to the floor.

    A replica whose domain has another goes to a free slot in a domain that its expert lacks, or
    swaps ranks with one there whose expert gets no narrower by it. Experts keep their number of
    hosts; what can be mended in neither way stays.
    """
    found = {}
    for layer in range(layout.num_layers):
        narrow = _narrow(layout, layer, floor)
        if not narrow:
            continue
        mender = _Mender.of(layout, layer, floor, slots_per_rank)
        if any([mender.mend(expert) for expert in narrow]):
            found[layer] = [sorted(on) for on in mender.hosts]
    return found


@dataclass(slots=True, kw_only=True, eq=False)
class _Mender:
    """One layer on its way to the floor. hosts [experts]; held: the experts on each rank."""

    floor: SpreadFloor
    hosts: list[set[int]]
    held: Mapping[int, set[int]]
    slots: Mapping[int, int]
    num_domains: int
    num_looked_at: int = 0

    @classmethod
    def of(cls, layout: Layout, layer: int, floor: SpreadFloor, slots: int) -> "_Mender":
        ranks = layout.stage_of(layer).ranks
        held = {rank: set(layout.experts_on(rank, layer)) for rank in ranks}
        return cls(
            floor=floor,
            hosts=[{host.rank for host in on} for on in layout.experts[layer]],
            held=held,
            slots={rank: max(slots, len(experts)) for rank, experts in held.items()},
            num_domains=len(domains(floor.domain_of, ranks)),
        )

    def mend(self, expert: int) -> bool:
        """Bring an expert as near to the floor as can be; False where nothing could be done."""
        has_moved = False
        while self._lacks(self.hosts[expert]) and self._widen(expert):
            has_moved = True
        return has_moved

    def _lacks(self, on: Collection[int]) -> int:
        wanted = self.floor.wanted(len(on), self.num_domains)
        return max(0, wanted - len(domains(self.floor.domain_of, on)))

    def _widen(self, expert: int) -> bool:
        on = self.hosts[expert]
        name = {rank: domain(self.floor.domain_of, rank) for rank in self.held}
        standing = [name[rank] for rank in sorted(on)]
        # From the fullest rank to the emptiest, so that slots even out.
        twice = [rank for rank in sorted(on) if standing.count(name[rank]) > 1]
        sources = sorted(twice, key=lambda rank: -len(self.held[rank]))
        others = [rank for rank in self.held if name[rank] not in standing]
        targets = sorted(others, key=lambda rank: (len(self.held[rank]), rank))
        for target in targets:
            if len(self.held[target]) < self.slots[target]:
                self._move(expert, sources[0], target)
                return True
        for source, target, guest in self._swaps(expert, sources, targets):
            self._move(expert, source, target)
            self._move(guest, target, source)
            return True
        return False

    def _swaps(
        self, expert: int, sources: Sequence[int], targets: Sequence[int]
    ) -> Iterator[tuple[int, int, int]]:
        for target in targets:
            for source in sources:
                for guest in sorted(self.held[target] - self.held[source] - {expert}):
                    self.num_looked_at += 1
                    if self.num_looked_at > MAX_SWAPS_LOOKED_AT:
                        return
                    after = self.hosts[guest] - {target} | {source}
                    if self._lacks(after) <= self._lacks(self.hosts[guest]):
                        yield source, target, guest

    def _move(self, expert: int, source: int, target: int) -> None:
        self.hosts[expert] = self.hosts[expert] - {source} | {target}
        self.held[source].discard(expert)
        self.held[target].add(expert)
