"""The right to command: a controller has it alone, or a lease gives it for one term.

The sender of messages to agents asks for the term with each message. `app` and `ingest` use this.
"""

from typing import Protocol

from pacekeeper.controller.storage.postgres import Fence
from pacekeeper.controller.storage.store import Store


class Leadership(Protocol):
    """The right to command.

    Attributes:
        answer_within_s: After so long without an answer agents look for another controller; 0:
            there is none.
        write_within_s: Limit of one use of the store; 0: none.
        fence: The term to write in; None: nobody else writes this store.
    """

    @property
    def answer_within_s(self) -> float: ...

    @property
    def write_within_s(self) -> float: ...

    @property
    def fence(self) -> Fence | None: ...

    def term(self) -> int | None:
        """The term to command in; None: just now nobody may be told anything."""
        ...

    def describe_newer_term(self, seen: int) -> str:
        """An agent has seen a later term: what to tell it."""
        ...

    def opened(self, store: Store) -> None:
        """This is the store of what is commanded."""
        ...

    def lost(self) -> None:
        """The store belongs to a later term."""
        ...

    def refused_since(self, monotonic_s: float) -> None:
        """The store has rejected writes since then."""
        ...


class Standalone:
    """The one controller of a fleet, with an SQLite store: nobody else commands."""

    answer_within_s = 0.0
    write_within_s = 0.0
    fence = None

    def __init__(self) -> None:
        self._term = 0

    def opened(self, store: Store) -> None:
        """A store that was led from under a lease has a term: the next one is ours."""
        self._term = store.next_term()

    def term(self) -> int | None:
        """0, where there never was a lease."""
        return self._term

    def describe_newer_term(self, seen: int) -> str:
        """It was another controller's; this one can not know whether that still leads."""
        return (
            f"this node has obeyed a controller of term {seen}, and this one has no lease: start "
            "it with that one's --store"
        )

    def lost(self) -> None:
        """Never."""

    def refused_since(self, monotonic_s: float) -> None:
        """It waits for its disk."""
