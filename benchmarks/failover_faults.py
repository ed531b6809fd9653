"""What `failover_time` does to controllers, their database and agents."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault.

    Attributes:
        is_lasting: It lasts until another controller leads, which must come.
        needs: What this host may lack; empty: nothing.
    """

    name: str
    is_lasting: bool
    needs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Faults to choose from, and how many of them to run on one pair of controllers.

    Attributes:
        is_pooled: Whether the controllers reach the server through pgbouncer.
        moves_clocks: Whether the controllers run under faketime, as the server does.
    """

    name: str
    faults: Sequence[Fault]
    count: int
    is_pooled: bool = False
    moves_clocks: bool = False


FAULTS = (
    Fault(name="kill leader", is_lasting=True),
    Fault(name="freeze leader", is_lasting=True),
    Fault(name="freeze in transaction", is_lasting=True),
    Fault(name="requests lost", is_lasting=True),
    Fault(name="answers lost", is_lasting=True),
    Fault(name="both lost", is_lasting=True),
    Fault(name="writer's bytes lost", is_lasting=True),
    Fault(name="kill leader, next one's answers lost", is_lasting=False),
    Fault(name="kill leader, server's clock -1 h", is_lasting=True, needs="faketime"),
    Fault(name="freeze in transaction, server's clock -1 h", is_lasting=True, needs="faketime"),
    Fault(name="server's clock +1 h", is_lasting=False, needs="faketime"),
    Fault(name="server restart", is_lasting=False),
    Fault(name="server crash", is_lasting=False),
    Fault(name="connections reset", is_lasting=False),
    Fault(name="commits unanswered", is_lasting=False),
    Fault(name="disk full", is_lasting=False, needs="mount"),
    Fault(name="kill standby", is_lasting=False),
    Fault(name="kill agent", is_lasting=False),
)
CLOCKS = (
    Fault(name="kill leader, standby's clock -1 h", is_lasting=True, needs="faketime"),
    Fault(name="leader's clock +1 h", is_lasting=False, needs="faketime"),
    Fault(name="leader's clock -1 h", is_lasting=False, needs="faketime"),
)
POOLED = (
    Fault(name="kill leader", is_lasting=True),
    Fault(name="freeze in transaction", is_lasting=True),
    Fault(name="server crash", is_lasting=False),
    Fault(name="kill pgbouncer", is_lasting=False),
)
KINDS = (*FAULTS, *CLOCKS, *POOLED)
LOSES = {
    "requests lost": ("loses_requests",),
    "answers lost": ("loses_answers",),
    "both lost": ("loses_requests", "loses_answers"),
    "writer's bytes lost": ("loses_writers",),
    "commits unanswered": ("loses_commits",),
}
