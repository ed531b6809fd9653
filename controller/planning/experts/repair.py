"""Repair of a placement that violates floors or slots, with few copies.

A missing replica takes a free slot, else that of an expert that can spare one, else two replicas
swap ranks. Without strict floors an expert that cannot reach them keeps its spread.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.problem import Cluster, Floors

MAX_SWAPS_LOOKED_AT = 4096  # in one layer: bounds the time where hardly any swap is allowed

Counts = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpreadRequirements:
    """Least number of distinct ranks, nodes and racks of each expert: [layers, experts] each."""

    ranks: Counts
    nodes: Counts
    racks: Counts

    @classmethod
    def of(cls, replicas: Flags, cluster: Cluster, floors: Floors) -> "SpreadRequirements":
        """The floors; where these are no promise, what so many replicas can reach of them.

        replicas [layers, experts, ranks].
        """
        asked = (floors.replicas, floors.nodes, floors.racks)
        there = (cluster.num_ranks, len(set(cluster.nodes)), len(set(cluster.racks)))
        number = replicas.sum(axis=2)
        wanted = [
            np.full_like(number, floor)
            if floors.is_strict
            else np.minimum(np.maximum(number, 1), min(floor, most))
            for floor, most in zip(asked, there, strict=True)
        ]
        return cls(ranks=wanted[0], nodes=wanted[1], racks=wanted[2])

    def kept_by(self, replicas: Flags, cluster: Cluster) -> "SpreadRequirements":
        """The same, of what these replicas [layers, experts, ranks] have reached."""
        return SpreadRequirements(
            ranks=np.minimum(self.ranks, replicas.sum(axis=2)),
            nodes=np.minimum(self.nodes, _width(replicas, cluster.nodes)),
            racks=np.minimum(self.racks, _width(replicas, cluster.racks)),
        )

    def below(self, replicas: Flags, cluster: Cluster) -> Flags:
        """[layers, experts] who lacks something; replicas [layers, experts, ranks]."""
        kept = self.kept_by(replicas, cluster)
        is_below: Flags = (
            (kept.ranks < self.ranks) | (kept.nodes < self.nodes) | (kept.racks < self.racks)
        )
        return is_below

    @staticmethod
    def open_ranks(on: Flags, cluster: Cluster, floors: Floors) -> Flags:
        """[ranks] where an expert may get one replica more; on [ranks]: where it has some.

        On too few nodes (racks) only where it adds one.
        """
        is_open: Flags = ~on
        for labels, floor in ((cluster.nodes, floors.nodes), (cluster.racks, floors.racks)):
            here = np.array(labels)
            if len(set(labels)) == len(labels) or len(set(here[on].tolist())) >= floor:
                continue
            adds = ~np.isin(here, here[on])
            is_open = is_open & adds if adds.any() else is_open
        return is_open

    def may_leave(self, replicas: Flags, layer: int, cluster: Cluster, floors: Floors) -> Flags:
        """[experts, ranks] which replicas of one layer may go; replicas [experts, ranks].

        Those that are left stand on as many nodes (racks) as the floors ask of so many.
        """
        left = replicas.sum(axis=1) - 1
        may: Flags = replicas & (left >= self.ranks[layer])[:, None]
        for labels, need, floor in (
            (cluster.nodes, self.nodes, floors.nodes),
            (cluster.racks, self.racks, floors.racks),
        ):
            number = _number_in(replicas[None], labels)[0]
            wanted = np.maximum(need[layer], np.minimum(floor, left))
            is_wide = np.count_nonzero(number, axis=1) > wanted
            at = np.unique(labels, return_inverse=True)[1]
            may &= is_wide[:, None] | (number[:, at] > 1)
        return may


def keeps_spread(before: Flags, after: Flags, cluster: Cluster, floors: Floors) -> bool:
    """Do these experts [experts, ranks] stay on as many nodes and racks, up to the floors?"""
    return all(
        bool((_width(after[None], labels) >= np.minimum(_width(before[None], labels), floor)).all())
        for labels, floor in ((cluster.nodes, floors.nodes), (cluster.racks, floors.racks))
    )


def _width(replicas: Flags, labels: tuple[int, ...]) -> Counts:
    """[layers, experts] how many labels its replicas have; labels [ranks]."""
    if len(set(labels)) == len(labels):
        number: Counts = replicas.sum(axis=2)
        return number
    width: Counts = np.count_nonzero(_number_in(replicas, labels), axis=2)
    return width


def _number_in(replicas: Flags, labels: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """[layers, experts, labels] how many replicas have each label; labels [ranks]."""
    kinds, at = np.unique(labels, return_inverse=True)
    member = (np.arange(len(kinds)) == at[:, None]).astype(np.float32)
    number: npt.NDArray[np.float32] = replicas.astype(np.float32) @ member
    return number


def repair(
    replicas: Flags, needs: SpreadRequirements, cluster: Cluster, *, is_strict: bool
) -> Flags | None:
    """Change the placement until it meets the requirements within the slots.

    Surplus replicas beyond the slots are dropped first, those of experts with most replicas.

    Args:
        replicas: [layers, experts, ranks].
        needs: requirements of each expert.
        cluster: slots, nodes and racks.
        is_strict: fail where a requirement cannot be met; otherwise such an expert keeps what it
            has.

    Returns:
        The new placement; None where an expert has no replica left or strict floors cannot be met.
    """
    if not replicas.any(axis=2).all():
        return None
    result = replicas.copy()
    slots = np.array(cluster.slots)
    is_over = (result.sum(axis=1) > slots).any(axis=1)
    for layer in (is_over | needs.below(result, cluster).any(axis=1)).nonzero()[0].tolist():
        mender = _LayerRepair.of(result[layer], layer, needs, cluster)
        if not mender.thin(is_strict) or (not mender.mend() and is_strict):
            return None
        result[layer] = False
        for expert, on in enumerate(mender.replicas):
            result[layer, expert, list(on)] = True
    return result


@dataclass(slots=True, kw_only=True, eq=False)
class _LayerRepair:
    """One layer on its way. replicas [experts]; held [ranks]: the experts there."""

    cluster: Cluster
    need: list[tuple[int, int, int]]
    replicas: list[set[int]]
    held: list[set[int]]
    num_looked_at: int = 0

    @classmethod
    def of(
        cls, replicas: Flags, layer: int, needs: SpreadRequirements, cluster: Cluster
    ) -> "_LayerRepair":
        each = zip(
            needs.ranks[layer].tolist(),
            needs.nodes[layer].tolist(),
            needs.racks[layer].tolist(),
            strict=True,
        )
        return cls(
            cluster=cluster,
            need=list(each),
            replicas=[set(on.nonzero()[0].tolist()) for on in replicas],
            held=[set(on.nonzero()[0].tolist()) for on in replicas.T],
        )

    def lack(self, expert: int, on: Collection[int]) -> int:
        """How much an expert with these replicas lacks of ranks, nodes and racks."""
        nodes, racks = self.cluster.nodes, self.cluster.racks
        has = (len(on), len({nodes[rank] for rank in on}), len({racks[rank] for rank in on}))
        return sum(max(0, need - n) for need, n in zip(self.need[expert], has, strict=True))

    def can_spare(self, expert: int, rank: int) -> bool:
        on = self.replicas[expert]
        return len(on) > 1 and self.lack(expert, on - {rank}) <= self.lack(expert, on)

    def thin(self, is_strict: bool) -> bool:
        """Take away what is beyond the slots; False where an expert would be lost by it."""
        for rank, held in enumerate(self.held):
            over = len(held) - self.cluster.slots[rank]
            for expert in sorted(held, key=lambda e: (-len(self.replicas[e]), e)):
                if over > 0 and (is_strict or self.can_spare(expert, rank)):
                    self._drop(expert, rank)
                    over -= 1
        return all(self.replicas)

    def mend(self) -> bool:
        """Every expert, as far as can be; False where one still lacks something."""
        is_whole = True
        for expert in range(len(self.replicas)):
            while self.lack(expert, self.replicas[expert]) and self._help(expert):
                pass
            is_whole &= not self.lack(expert, self.replicas[expert])
        return is_whole

    def _help(self, expert: int) -> bool:
        """One replica more, or one elsewhere; False where nothing can be done."""
        on, racks = self.replicas[expert], self.cluster.racks
        before = self.lack(expert, on)
        free = [n - len(held) for n, held in zip(self.cluster.slots, self.held, strict=True)]
        new_in = [racks[r] not in {racks[own] for own in on} for r in range(len(free))]
        others = [rank for rank in range(len(free)) if rank not in on]
        targets = [rank for rank in others if self.lack(expert, on | {rank}) < before]
        targets.sort(key=lambda r: (-free[r], not new_in[r], r))
        for rank in targets:
            if free[rank] > 0:
                self._add(expert, rank)
                return True
        for rank in targets:
            for guest in sorted(self.held[rank], key=lambda e: (-len(self.replicas[e]), e)):
                if self.can_spare(guest, rank):
                    self._drop(guest, rank)
                    self._add(expert, rank)
                    return True
        for target, source, guest in self._swaps(expert, others):
            self._drop(expert, source)
            self._add(expert, target)
            self._drop(guest, target)
            self._add(guest, source)
            return True
        return False

    def _swaps(self, expert: int, others: list[int]) -> Iterator[tuple[int, int, int]]:
        on = self.replicas[expert]
        before = self.lack(expert, on)
        for target in sorted(others, key=lambda r: (len(self.held[r]), r)):
            for source in sorted(on, key=lambda r: (-len(self.held[r]), r)):
                if self.lack(expert, on - {source} | {target}) >= before:
                    continue
                for guest in sorted(self.held[target] - self.held[source]):
                    self.num_looked_at += 1
                    if self.num_looked_at > MAX_SWAPS_LOOKED_AT:
                        return
                    there = self.replicas[guest]
                    after = there - {target} | {source}
                    if self.lack(guest, after) <= self.lack(guest, there):
                        yield target, source, guest

    def _add(self, expert: int, rank: int) -> None:
        self.replicas[expert].add(rank)
        self.held[rank].add(expert)

    def _drop(self, expert: int, rank: int) -> None:
        self.replicas[expert].discard(rank)
        self.held[rank].discard(expert)
