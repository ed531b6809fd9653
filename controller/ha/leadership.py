"""What a controller needs to know of its right to command: none is asked, or a lease gives it.

Whoever speaks to agents asks for the term with each message; whatever was stored is shipped to the
standbys before anybody is told of it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from pacekeeper.controller.storage.change_log import Change
from pacekeeper.controller.storage.store import Store


class Leadership(Protocol):
    """The right to command. `answer_within_s`: after so long without an answer agents look for
    another controller; 0: there is none.
    """

    @property
    def answer_within_s(self) -> float: ...

    def term(self) -> int | None:
        """The term to command in; None: just now nobody may be told anything."""
        ...

    def describe_newer_term(self, seen: int) -> str:
        """An agent has seen a later term: what to tell it."""
        ...

    def opened(self, store: Store) -> None:
        """This is the store of what is commanded."""
        ...

    async def ship(self, changes: Sequence[Change]) -> None:
        """Returns when all copies that count have stored them; never once the lease is lost."""
        ...

    def serve(self, server: Any) -> None:
        """Add what standbys call to a gRPC server."""
        ...


class Standalone:
    """The one controller of a fleet, without a lease: nobody else commands, nothing is shipped."""

    answer_within_s = 0.0

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
            "it with that one's --lease, or with its store"
        )

    async def ship(self, changes: Sequence[Change]) -> None:
        """To nobody."""

    def serve(self, server: Any) -> None:
        """Nobody follows."""
