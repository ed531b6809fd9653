"""Tracks which reports of each agent were processed; counts repeated and missing ones. Pure.

An agent that reconnects sends all reports again that were not acknowledged, also processed ones. It
numbers its reports one by one, and begins each stream with a greeting that has the number of the
last report that it will not send any more.
"""

from dataclasses import dataclass, field

MAX_NODES = 65536  # tracked; reports of others are all processed


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The newest report that was processed, `taken`, of one incarnation of an agent."""

    incarnation: str
    taken: int


@dataclass(slots=True, eq=False, kw_only=True)
class Sequences:
    """The progress of each node.

    Attributes:
        capacity: Number of nodes to track.
        missed: Reports that never arrived: dropped by their agent, or rejected.
        repeated: Reports that arrived again and were ignored.
    """

    capacity: int = MAX_NODES
    missed: int = 0
    repeated: int = 0
    _of: dict[str, Progress] = field(default_factory=dict)

    def is_news(self, node: str, incarnation: str, number: int) -> bool:
        """Whether a report has not been processed yet; otherwise counts it as repeated."""
        known = self._of.get(node)
        if known is None or known.incarnation != incarnation or number > known.taken:
            return True
        self.repeated += 1
        return False

    def record(
        self, node: str, incarnation: str, number: int, *, is_greeting: bool = False
    ) -> None:
        """Record a processed report; a greeting settles its number: none up to it will follow."""
        known = self._of.pop(node, None)
        taken = number
        if known is not None and known.incarnation == incarnation:
            expected = known.taken if is_greeting else known.taken + 1
            self.missed += max(0, number - expected)
            taken = max(known.taken, number)
        self._of[node] = Progress(incarnation=incarnation, taken=taken)
        if len(self._of) > self.capacity:
            del self._of[next(iter(self._of))]
