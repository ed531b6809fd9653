"""Localisation of slow links: places that explain which groups of ranks have slow transfers. Pure.

A place is seen by the groups whose transfers use it: a port by all groups with its rank, a node by
groups with ranks on it and elsewhere. A place explains slow groups if no healthy group sees it.
Places that the same slow groups see, and no healthy one, cannot be told apart: all are returned.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, exp, floor, log, sqrt

from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind

TOLERATED = 0.05  # part of the groups that see a slow place and may be measured as healthy
MOST_FOR_PAIRS = 16  # ranks: which pair slowed a larger group is not asked
FEWEST_FOR_ORDER = 6  # values of which two in the middle are an interval of 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReading:
    """The transfers of a group of ranks: `slowdown` is observed / usual time.

    `blind_to`: places that would have slowed what was taken as usual as well.
    """

    ranks: tuple[int, ...]
    slowdown: float
    blind_to: frozenset[LinkPlace] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPlace:
    """One slow place.

    Attributes:
        candidates: The places that it may be, the most specific first; several cannot be told
            apart by the groups that were measured.
        slowdown: Median of the groups that it explains.
        low: Lower end of the interval of the slowdown: of 95 % from six groups on, else the least.
        high: Upper end.
        num_groups: Number of groups that it explains.
    """

    candidates: tuple[LinkPlace, ...]
    slowdown: float
    low: float
    high: float
    num_groups: int

    @property
    def place(self) -> LinkPlace | None:
        """The place; None if it cannot be told from others."""
        return self.candidates[0] if len(self.candidates) == 1 else None

    def __str__(self) -> str:
        where = " or ".join(map(str, self.candidates))
        return f"{where}: x{self.slowdown:.2f} [{self.low:.2f}, {self.high:.2f}]"


def find_slow_places(
    readings: Sequence[GroupReading], node_of: Mapping[int, str], *, slow_from: float
) -> tuple[tuple[SlowPlace, ...], int]:
    """Find few places that explain the slow groups, the one that explains most first.

    Each next place is the one that explains most of the slowdown that is left (greedy cover). A
    place that slows its groups by 100 does not explain those slowed by 4: where noise delays
    healthy groups, too, the fabric would explain more than the port that is slow.

    Args:
        readings: Groups of two or more ranks.
        node_of: The node of every rank of the job.
        slow_from: A group is slow from this slowdown on.

    Returns:
        The places, and the number of slow groups that no place explains.
    """
    nodes = ranks_of_nodes(node_of)
    slow = [reading for reading in readings if reading.slowdown >= slow_from]
    seeing = [{*places_of(one.ranks, node_of, nodes)} - one.blind_to for one in slow]
    seen_by: dict[LinkPlace, set[int]] = {}
    for index, places in enumerate(seeing):
        for place in places:
            seen_by.setdefault(place, set()).add(index)
    others: dict[LinkPlace, list[float]] = {place: [] for place in seen_by}
    for reading in readings if slow else ():
        if reading.slowdown < slow_from:
            for place in places_of(reading.ranks, node_of, nodes):
                if place in others and place not in reading.blind_to:
                    insort(others[place], reading.slowdown)
    kinds = list(PlaceKind)
    left, changed, found = set(range(len(slow))), set(seen_by), list[SlowPlace]()
    admissible: dict[LinkPlace, _Evidence] = {}
    while left:
        for place in changed:
            own = {i: slow[i].slowdown for i in seen_by[place] & left}
            one = _evidence(own, others[place]) if own else None
            if one is not None and one.is_admissible:
                admissible[place] = one
            else:
                admissible.pop(place, None)
        if not admissible:
            break
        ranked = sorted(
            (-one.log_slowdown, one.against, one.num_between, kinds.index(place.kind), place)
            for place, one in admissible.items()
        )
        best = admissible[ranked[0][-1]]
        alike = tuple(place for *_, place in ranked if admissible[place] == best)
        found.append(_measured(alike, [slow[i].slowdown for i in best.explained]))
        gone = best.explained | best.between
        left -= gone
        changed = {place for index in gone for place in seeing[index]}
    return tuple(sorted(found, key=_explained, reverse=True)), len(left)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """What the groups that see a place say of it.

    `explained` and `between` are groups among the slow ones: as slow as the place would be, and
    neither that nor well. `num_between` and `against` count all groups. `log_slowdown` is the sum
    over those as slow as the place would be, also of those that are not called slow.
    """

    explained: frozenset[int]
    log_slowdown: float
    between: frozenset[int]
    num_between: int
    against: int

    @property
    def is_admissible(self) -> bool:
        return self.against <= TOLERATED * (self.against + len(self.explained))


def _evidence(slow: Mapping[int, float], others: Sequence[float]) -> _Evidence:
    """Return what the groups that see a place say of it: its slowdown is the middle of the slow.

    A group is as slow as the place from the square root of the place's slowdown on, and well below
    the fourth root.

    Args:
        slow: Slowdowns of the slow groups that nothing explains yet.
        others: Slowdowns of those that are not slow, ascending.
    """
    middle = sorted(slow.values())[len(slow) // 2]
    level = sqrt(middle)
    explained = frozenset(i for i, slowdown in slow.items() if slowdown >= level)
    well = frozenset(i for i, slowdown in slow.items() if slowdown < sqrt(level))
    against = len(well) + bisect_left(others, sqrt(level))
    alike = others[bisect_left(others, level) :]
    return _Evidence(
        explained=explained,
        log_slowdown=sum(map(log, (*(slow[i] for i in sorted(explained)), *alike))),
        between=frozenset(slow) - explained - well,
        num_between=len(slow) + len(others) - len(explained) - len(alike) - against,
        against=against,
    )


def places_of(
    group: Sequence[int], node_of: Mapping[int, str], nodes: Mapping[str, tuple[int, ...]]
) -> Iterator[LinkPlace]:
    """Yield the places that the transfers between the ranks of a group use.

    Args:
        group: Its ranks.
        node_of: The node of every rank of the job.
        nodes: The ranks of every node of the job, ascending.
    """
    if len(group) < 2:
        return
    for rank in group:
        yield LinkPlace(kind=PlaceKind.PORT, ranks=(rank,), nodes=(node_of[rank],))
    for pair in combinations(sorted(group), 2) if len(group) <= MOST_FOR_PAIRS else ():
        between = tuple(sorted({node_of[rank] for rank in pair}))
        yield LinkPlace(kind=PlaceKind.PAIR, ranks=pair, nodes=between)
    own = sorted({node_of[rank] for rank in group})
    if len(own) > 1:
        for node in own:
            if len(nodes[node]) > 1:
                yield LinkPlace(kind=PlaceKind.NODE, ranks=nodes[node], nodes=(node,))
        for two in combinations(own, 2):
            if len(nodes[two[0]]) > 1 or len(nodes[two[1]]) > 1:
                yield LinkPlace(kind=PlaceKind.NODE_PAIR, nodes=two)
    if len(own) > 1 or len(nodes) == 1:
        yield LinkPlace(kind=PlaceKind.FABRIC)
    if 1 < len(nodes) < len(node_of):
        yield LinkPlace(kind=PlaceKind.ALL)


def ranks_of_nodes(node_of: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of every node of the job, ascending."""
    nodes: dict[str, list[int]] = {}
    for rank in sorted(node_of):
        nodes.setdefault(node_of[rank], []).append(rank)
    return {node: tuple(ranks) for node, ranks in nodes.items()}


def _explained(place: SlowPlace) -> float:
    """Return how much of the slowdown of groups a place explains (log, of all)."""
    return place.num_groups * log(place.slowdown)


def _measured(candidates: tuple[LinkPlace, ...], slowdowns: Sequence[float]) -> SlowPlace:
    ordered = sorted(slowdowns)
    count = len(ordered)
    first = 0
    if count >= FEWEST_FOR_ORDER:  # Conover, Practical Nonparametric Statistics, 3.2
        first = max(0, floor(count / 2 - 0.98 * sqrt(count)) - 1)
    middle = ordered[(count - 1) // 2], ordered[ceil((count - 1) / 2)]
    return SlowPlace(
        candidates=candidates,
        slowdown=exp(0.5 * (log(middle[0]) + log(middle[1]))),
        low=ordered[first],
        high=ordered[count - 1 - first],
        num_groups=count,
    )
