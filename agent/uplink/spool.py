"""Reports that are not acknowledged yet: bounded, oldest dropped first, every drop counted."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class HasSequence(Protocol):
    """A report, plain or encoded: all the spool looks at is its number."""

    @property
    def sequence(self) -> int: ...


T = TypeVar("T", bound=HasSequence)


@dataclass(slots=True, kw_only=True)
class Spool(Generic[T]):
    """Kept until acknowledged; sent in order, again from the first one after a reconnect.

    At most `capacity` reports and `capacity_bytes` (of the sizes named by `put`) wait, but always
    one. `last_sequence` is the number of the newest report ever put.
    """

    capacity: int
    capacity_bytes: int = 64 * 1024 * 1024
    num_dropped: int = 0
    num_bytes: int = 0
    last_sequence: int = 0
    _reports: deque[tuple[T, int]] = field(default_factory=deque)
    _num_sent: int = 0  # of those that wait, from the front, on this connection
    _newest_sent: int = 0  # on any connection

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def settled_sequence(self) -> int:
        """Up to this number nothing waits any more: it was acknowledged or dropped."""
        return self._reports[0][0].sequence - 1 if self._reports else self.last_sequence

    def put(self, report: T, size_bytes: int = 0) -> None:
        """Keep a report; over capacity the oldest ones go."""
        assert report.sequence > self.last_sequence, "ascending"
        self.last_sequence = report.sequence
        self._reports.append((report, size_bytes))
        self.num_bytes += size_bytes
        while len(self._reports) > self.capacity or (
            self.num_bytes > self.capacity_bytes and len(self._reports) > 1
        ):
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Give the oldest waiting report up, where there is one: counted."""
        if self._reports:
            self._remove_oldest()
            self.num_dropped += 1

    def count_rejected(self) -> None:
        """The other side gave a report up that it has acknowledged: it is nowhere any more."""
        self.num_dropped += 1

    def acknowledge(self, sequence: int) -> None:
        """Everything up to `sequence` is stored on the other side; what was never sent is not."""
        while self._reports and self._reports[0][0].sequence <= min(sequence, self._newest_sent):
            self._remove_oldest()

    def rewind(self) -> None:
        """A new connection: what is not acknowledged is sent again."""
        self._num_sent = 0

    def next_unsent(self) -> T | None:
        """The next report to send on this connection, or None."""
        if self._num_sent == len(self._reports):
            return None
        report = self._reports[self._num_sent][0]
        self._num_sent += 1
        self._newest_sent = max(self._newest_sent, report.sequence)
        return report

    def _remove_oldest(self) -> None:
        _, size_bytes = self._reports.popleft()
        self.num_bytes -= size_bytes
        self._num_sent = max(0, self._num_sent - 1)
