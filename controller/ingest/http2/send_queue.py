"""What one node is to be told: in order, the newest of a kind, never more than its capacity."""

from dataclasses import dataclass, field

OUTBOX_COMMANDS = 256  # per node; commands are said again, so the oldest may go


@dataclass(slots=True, eq=False, kw_only=True)
class Outbox:
    """Messages, oldest first. A newer one with the same key takes over."""

    capacity: int = OUTBOX_COMMANDS
    _waiting: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)

    def put(self, key: bytes, message: bytes, until_ms: int = 0) -> None:
        """Queue `message`; beyond the capacity the oldest one goes. 0: it may wait for ever."""
        self._waiting.pop(key, None)
        self._waiting[key] = until_ms, message
        while len(self._waiting) > self.capacity:
            del self._waiting[next(iter(self._waiting))]

    def next(self, now_s: float) -> bytes | None:
        """The oldest message that may still be said, which it is from now on; None: nothing."""
        while self._waiting:
            until_ms, message = self._waiting.pop(next(iter(self._waiting)))
            if not until_ms or until_ms >= now_s * 1e3:
                return message
        return None
