"""Whether this controller may command agents: always without a lease, with one during its term.

`ingest` asks for the term before each message to agents; `app` passes the fence to the store.
"""

from typing import Protocol

from pacekeeper.controller.storage.postgres import Fence
from pacekeeper.controller.storage.store import Store


class Leadership(Protocol):
    """The right to command agents.

    Attributes:
        answer_within_s: Seconds without an answer after which agents try another controller; 0:
            there is no other one.
        write_within_s: Seconds that one call to the store may take; 0: no limit.
        fence: The term to write in; None: no other controller writes this store.
    """

    @property
    def answer_within_s(self) -> float: ...

    @property
    def write_within_s(self) -> float: ...

    @property
    def fence(self) -> Fence | None: ...

    def term(self) -> int | None:
        """The term to command in; None: no command may be sent now."""
        ...

    def describe_newer_term(self, seen: int) -> str:
        """The message to an agent that has seen a later term."""
        ...

    def opened(self, store: Store) -> None:
        """Called once with the open store."""
        ...

    def lost(self) -> None:
        """Called when the store belongs to a later term."""
        ...


class Standalone:
    """The only controller of a fleet, with an SQLite store."""

    answer_within_s = 0.0
    write_within_s = 0.0
    fence = None

    def __init__(self) -> None:
        self._term = 0

    def opened(self, store: Store) -> None:
        """Take the next term if the store had a lease before."""
        self._term = store.next_term()

    def term(self) -> int | None:
        """The term; 0 for a store that never had a lease."""
        return self._term

    def describe_newer_term(self, seen: int) -> str:
        """Ask the operator for the store of the controller whose term the agent has seen."""
        return (
            f"this node has obeyed a controller of term {seen}, and this one has no lease: start "
            "it with that one's --store"
        )

    def lost(self) -> None:
        """Never called: no other controller writes the store."""
