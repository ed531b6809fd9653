"""What one node is to be told: in order, the newest of a kind, never more than its capacity."""

import asyncio
from dataclasses import dataclass, field

OUTBOX_COMMANDS = 256  # per node; commands are said again, so the oldest may go


@dataclass(slots=True, eq=False, kw_only=True)
class Outbox:
    """Messages, oldest first. A newer one with the same key takes over."""

    capacity: int = OUTBOX_COMMANDS
    _waiting: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False

    def put(self, key: bytes, message: bytes, until_ms: int = 0) -> None:
        """Queue `message`; beyond the capacity the oldest one goes. 0: it may wait for ever."""
        self._waiting.pop(key, None)
        self._waiting[key] = until_ms, message
        while len(self._waiting) > self.capacity:
            del self._waiting[next(iter(self._waiting))]
        self._news.set()

    def close(self) -> None:
        """Nothing more will come after what waits."""
        self._is_closed = True
        self._news.set()

    async def get(self) -> tuple[int, bytes] | None:
        """Until when the oldest message may be sent, and it; None once closed and empty."""
        while not self._waiting and not self._is_closed:
            self._news.clear()
            await self._news.wait()
        if not self._waiting:
            return None
        return self._waiting.pop(next(iter(self._waiting)))
