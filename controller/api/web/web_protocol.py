"""HTTP connections on which nobody asks anything end: they are turned out by age and by number.

uvicorn waits for a request's end for ever, and beyond its number of connections answers nobody:
a few hundred that each say half a line would keep all others out. They are cut, not closed: under
TLS the other side would have to agree to an end.
"""

from asyncio import Transport
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_WITHIN_S = 10.0
MOST_WAITING = 256  # the oldest goes


class ImpatientProtocol(H11Protocol):
    """One connection. It waits as long as no whole request is being answered."""

    _count = 0

    @property
    def is_waiting(self) -> bool:
        """Is it the other side's turn?"""
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.response_complete or cycle.more_body)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """One more waits, and perhaps one too many."""
        super().connection_made(transport)
        ImpatientProtocol._count += 1
        self._number = ImpatientProtocol._count
        self._timer = self.loop.call_later(REQUEST_WITHIN_S, self._look)
        ours = [one for one in self.connections if isinstance(one, ImpatientProtocol)]
        waiting = [one for one in ours if one.is_waiting]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda one: one._number).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Its next request has as much time."""
        self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_WITHIN_S, self._look)
        super().on_response_complete()

    def _look(self) -> None:
        if self.is_waiting:
            self.transport.abort()
        else:  # what is asked takes us long: that is not their fault
            self._timer = self.loop.call_later(REQUEST_WITHIN_S, self._look)
