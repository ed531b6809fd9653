"""What waits in the front for agents that read slowly, each message once, and no more than it may.

Offers are megabytes, made for a thousand nodes at once and said again until they are followed. One
that finds no room is left out: the next time there may be some. Pure.
"""

ALWAYS_BYTES = 64 << 10  # of a message that is taken however much waits


class Shared(bytes):
    """A message, in the memory as long as any stream has some of it to send."""

    shelf: "Shelf"

    def __del__(self) -> None:
        self.shelf.held_bytes -= len(self)


class Shelf:
    """All of one front. `held_bytes`: of messages that are not sent to the last stream yet."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.held_bytes = most_bytes, 0

    def put(self, message: bytes) -> Shared | None:
        """To be given to each stream that hears it; None: there is no room for it."""
        is_small = len(message) <= ALWAYS_BYTES
        if not is_small and self.held_bytes + len(message) > self.most_bytes:
            return None
        shared = Shared(message)
        shared.shelf = self
        self.held_bytes += len(shared)
        return shared
