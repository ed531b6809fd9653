"""Which reports of an agent were processed: repeated ones are ignored, gaps are counted. Pure.

An agent that reconnects sends all reports again that were not acknowledged, also processed ones. It
numbers its reports one by one, and begins each stream with a greeting that has the number of the
last report that it will not send any more.
"""

from dataclasses import dataclass, field

MAX_NODES = 65536  # remembered; who was forgotten is taken at its word


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`taken`: the newest number that was taken in, of this incarnation of the agent."""

    incarnation: str
    taken: int


@dataclass(slots=True, eq=False, kw_only=True)
class Sequences:
    """The progress of each node."""

    capacity: int = MAX_NODES
    missed: int = 0  # numbers that never came: dropped by their agent, or refused
    repeated: int = 0  # reports that were passed over
    _of: dict[str, Progress] = field(default_factory=dict)

    def is_news(self, node: str, incarnation: str, number: int) -> bool:
        """Whether a report was not taken in yet; where it was, that is counted."""
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
