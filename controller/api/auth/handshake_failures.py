"""Connections that never came to a call: those whose handshake failed are among them. Pure.

gRPC tells nobody that a handshake failed, whose it was, or why. It tells that one begins, and calls
tell whose came to something: the rest, after a while, is what was refused, counted.
"""

from collections import deque
from dataclasses import dataclass, field

MAX_PENDING = 65536


@dataclass(slots=True, eq=False, kw_only=True)
class Handshakes:
    """`patience_s`: after so long without a call a connection counts as come to nothing.

    Connections are paired with calls in the order of both: the number is right, not which.
    """

    patience_s: float
    _pending: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    _peers: dict[str, None] = field(default_factory=dict)  # that made a call, the newest last

    def began(self, now_s: float) -> None:
        """A connection begins its handshake. Any thread may say so."""
        self._pending.append(now_s)

    def called(self, peer: str) -> None:
        """A call came from this peer, which has one connection as long as it has this name."""
        if peer not in self._peers and self._pending:
            self._pending.popleft()
        self._peers.pop(peer, None)
        self._peers[peer] = None
        if len(self._peers) > MAX_PENDING:
            del self._peers[next(iter(self._peers))]

    def lost(self, now_s: float) -> int:
        """How many came to nothing since this was last asked."""
        count = 0
        while self._pending and now_s - self._pending[0] > self.patience_s:
            self._pending.popleft()
            count += 1
        return count
