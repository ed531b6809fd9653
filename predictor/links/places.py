"""Localisation of slow links: places that explain which groups of ranks have slow transfers. Pure.

A place is seen by the groups whose transfers use it: a port by all groups with its rank, a node by
groups with ranks on it and elsewhere. A place explains slow groups if no healthy group sees it.
Places that the same slow groups see, and no healthy one, cannot be told apart: all are returned.
"""

from collections import Counter
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
    """The transfers of a group of ranks: `slowdown` is observed / usual time."""

    ranks: tuple[int, ...]
    slowdown: float


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
    """Find the fewest places that explain the slow groups, the one that explains most first.

    Each next place is the one that explains most of what is left (greedy cover).

    Args:
        readings: Groups of two or more ranks.
        node_of: The node of every rank of the job.
        slow_from: A group is slow from this slowdown on, and healthy below its square root. Groups
            between are no evidence.

    Returns:
        The places, and the number of slow groups that no place explains.
    """
    nodes = _ranks_of_nodes(node_of)
    slow = [reading for reading in readings if reading.slowdown >= slow_from]
    if not slow:
        return (), 0
    seen_by: dict[LinkPlace, set[int]] = {}
    for index, reading in enumerate(slow):
        for place in places_of(reading.ranks, node_of, nodes):
            seen_by.setdefault(place, set()).add(index)
    against: Counter[LinkPlace] = Counter()
    for reading in readings:
        if reading.slowdown < sqrt(slow_from):
            against.update(p for p in places_of(reading.ranks, node_of, nodes) if p in seen_by)
    admissible = {
        place: groups
        for place, groups in seen_by.items()
        if against[place] <= TOLERATED * (against[place] + len(groups))
    }
    left, found = set(range(len(slow))), list[SlowPlace]()
    while left:
        covered = {place: groups & left for place, groups in admissible.items() if groups & left}
        if not covered:
            break
        best = max(covered, key=lambda place: (len(covered[place]), -against[place]))
        alike = sorted(
            (p for p in covered if covered[p] == covered[best] and against[p] == against[best]),
            key=lambda place: (list(PlaceKind).index(place.kind), place),
        )
        found.append(_measured(tuple(alike), [slow[i].slowdown for i in covered[best]]))
        left -= covered[best]
    return tuple(found), len(left)


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


def _ranks_of_nodes(node_of: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    nodes: dict[str, list[int]] = {}
    for rank in sorted(node_of):
        nodes.setdefault(node_of[rank], []).append(rank)
    return {node: tuple(ranks) for node, ranks in nodes.items()}


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
