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


ALWAYS_BYTES = 64 << 10  # of a message that is taken however much waits


class SharedPayload(bytes):
    """A message, in the memory as long as any stream has some of it to send."""

    buffer: "SendBuffer"

    def __del__(self) -> None:
        self.buffer.held_bytes -= len(self)


class SendBuffer:
    """Of one ingest process. `held_bytes`: of messages that are not sent to the last stream yet."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.held_bytes = most_bytes, 0

    def put(self, message: bytes) -> SharedPayload | None:
        """To be given to each stream that hears it; None: there is no room for it."""
        is_small = len(message) <= ALWAYS_BYTES
        if not is_small and self.held_bytes + len(message) > self.most_bytes:
            return None
        shared = SharedPayload(message)
        shared.buffer = self
        self.held_bytes += len(shared)
        return shared
