"""What happens to the nodes of a simulated cluster, and when: a history that every policy meets.

Nodes are numbers from 0. A node is one unit that fails as a whole and, in the simulated job, one
rank: devices inside a node are not told apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesLost:
    """These nodes end at once, and what they held is gone."""

    at_s: float
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesJoined:
    """These nodes are there from now on and hold nothing."""

    at_s: float
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChanged:
    """A node computes at `speed` from now on; 1.0 is healthy."""

    at_s: float
    node: int
    speed: float


Change = NodesLost | NodesJoined | SpeedChanged


@dataclass(frozen=True, kw_only=True)
class History:
    """Changes in the order of time; nothing is there before the first.

    Of those at one moment, losses come first. Raises ValueError for a change out of order or time,
    for a node that is lost or paced while away, or joins while there, and for a speed not above 0.
    """

    name: str
    num_nodes: int
    duration_s: float
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.duration_s < inf:
            raise ValueError(f"a history lasts more than 0 s, got {self.duration_s}")
        there: set[int] = set()
        last_s = 0.0
        for change in self.changes:
            if not last_s <= change.at_s <= self.duration_s:
                raise ValueError(f"a change at {change.at_s} s is out of order, or after the end")
            last_s = change.at_s
            _follow(there, change, self.num_nodes)

    def num_there(self) -> tuple[tuple[float, int], ...]:
        """(time, nodes from then on) at every moment that changes the number."""
        found: dict[float, int] = {}
        count = 0
        for change in self.changes:
            match change:
                case NodesJoined():
                    count += len(change.nodes)
                case NodesLost():
                    count -= len(change.nodes)
                case SpeedChanged():
                    continue
            found[change.at_s] = count
        return tuple(found.items())

    def pace(self) -> tuple[tuple[float, float], ...]:
        """(time, sum of the speeds of all nodes from then on), from 0 s on."""
        speed: dict[int, float] = {}
        found = {0.0: 0.0}
        for change in self.changes:
            match change:
                case NodesJoined():
                    speed |= dict.fromkeys(change.nodes, 1.0)
                case NodesLost():
                    for node in change.nodes:
                        del speed[node]
                case SpeedChanged():
                    speed[change.node] = change.speed
            found[change.at_s] = sum(speed.values())
        return tuple(found.items())

    def node_s(self) -> float:
        """Seconds of all nodes together, at the speeds they have."""
        pace = (*self.pace(), (self.duration_s, 0.0))
        return sum(speed * (end_s - at_s) for (at_s, speed), (end_s, _) in pairwise(pace))

    def cut(self, *, start_s: float = 0.0, duration_s: float | None = None) -> "History":
        """A part of it: nodes that are there at its start join then, at the speed they have.

        Raises ValueError for a part outside of it.
        """
        end_s = self.duration_s if duration_s is None else start_s + duration_s
        if not 0.0 <= start_s < end_s <= self.duration_s:
            raise ValueError(
                f"{self.name} lasts {self.duration_s:.0f} s: it has no part from {start_s:.0f} to "
                f"{end_s:.0f} s"
            )
        there: set[int] = set()
        speed: dict[int, float] = {}
        for change in self.changes:
            if change.at_s <= start_s:
                _follow(there, change, self.num_nodes)
                if isinstance(change, SpeedChanged):
                    speed[change.node] = change.speed
                elif isinstance(change, NodesLost):
                    for node in change.nodes:
                        speed.pop(node, None)
        first: list[Change] = [NodesJoined(at_s=0.0, nodes=tuple(sorted(there)))] if there else []
        first += [
            SpeedChanged(at_s=0.0, node=node, speed=pace)
            for node, pace in sorted(speed.items())
            if pace != 1.0
        ]
        rest = [later(c, -start_s) for c in self.changes if start_s < c.at_s < end_s]
        return History(
            name=self.name,
            num_nodes=self.num_nodes,
            duration_s=end_s - start_s,
            changes=(*first, *rest),
            notes=self.notes,
        )


def later(change: Change, by_s: float) -> Change:
    """The same change, so much later."""
    at_s = change.at_s + by_s
    match change:
        case NodesLost():
            return NodesLost(at_s=at_s, nodes=change.nodes)
        case NodesJoined():
            return NodesJoined(at_s=at_s, nodes=change.nodes)
        case SpeedChanged():
            return SpeedChanged(at_s=at_s, node=change.node, speed=change.speed)


def in_order(changes: Sequence[Change]) -> tuple[Change, ...]:
    """By time; of one moment losses first, then who joins, then speeds."""
    place = {NodesLost: 0, NodesJoined: 1, SpeedChanged: 2}
    return tuple(sorted(changes, key=lambda change: (change.at_s, place[type(change)])))


def _follow(there: set[int], change: Change, num_nodes: int) -> None:
    """`there` after it. Raises ValueError for what can not happen."""
    nodes = (change.node,) if isinstance(change, SpeedChanged) else change.nodes
    if not nodes or len(set(nodes)) != len(nodes) or not set(nodes) <= set(range(num_nodes)):
        raise ValueError(f"nodes {list(nodes)} at {change.at_s} s: expected each once, below "
                         f"{num_nodes}")  # fmt: skip
    match change:
        case NodesLost():
            if not set(nodes) <= there:
                raise ValueError(f"{change.at_s} s: nodes {sorted(set(nodes) - there)} are away")
            there.difference_update(nodes)
        case NodesJoined():
            if set(nodes) & there:
                raise ValueError(f"{change.at_s} s: nodes {sorted(set(nodes) & there)} are there")
            there.update(nodes)
        case SpeedChanged():
            if change.node not in there:
                raise ValueError(f"{change.at_s} s: node {change.node} is away")
            if not (isfinite(change.speed) and change.speed > 0.0):
                raise ValueError(f"{change.at_s} s: speed {change.speed} is not above 0")
