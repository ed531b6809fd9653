"""Bounded queue of unacknowledged reports; drops the oldest first and counts drops."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class HasSequence(Protocol):
    """A report, decoded or encoded; the spool uses its sequence number only."""

    @property
    def sequence(self) -> int: ...


T = TypeVar("T", bound=HasSequence)


@dataclass(slots=True, kw_only=True)
class Spool(Generic[T]):
    """Reports in order, kept until acknowledged and sent again after a reconnect.

    Holds at most `capacity` reports and `capacity_bytes` (of the sizes passed to `put`), but always
    one. `last_sequence` is the number of the newest report ever put.
    """

    capacity: int
    capacity_bytes: int = 64 * 1024 * 1024
    num_dropped: int = 0
    num_bytes: int = 0
    last_sequence: int = 0
    _reports: deque[tuple[T, int]] = field(default_factory=deque)
    _num_sent: int = 0  # number of reports sent on this connection, from the front
    _newest_sent: int = 0  # on any connection

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def settled_sequence(self) -> int:
        """All reports up to this number are acknowledged or dropped."""
        return self._reports[0][0].sequence - 1 if self._reports else self.last_sequence

    def put(self, report: T, size_bytes: int = 0) -> None:
        """Append a report; drops the oldest ones over capacity."""
        assert report.sequence > self.last_sequence, "ascending"
        self.last_sequence = report.sequence
        self._reports.append((report, size_bytes))
        self.num_bytes += size_bytes
        while len(self._reports) > self.capacity or (
            self.num_bytes > self.capacity_bytes and len(self._reports) > 1
        ):
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drop the oldest report, if any, and count it."""
        if self._reports:
            self._remove_oldest()
            self.num_dropped += 1

    def count_rejected(self) -> None:
        """Count a report that the controller acknowledged and then rejected."""
        self.num_dropped += 1

    def acknowledge(self, sequence: int) -> None:
        """Remove reports up to `sequence`, but only those that were sent."""
        while self._reports and self._reports[0][0].sequence <= min(sequence, self._newest_sent):
            self._remove_oldest()

    def rewind(self) -> None:
        """Start again at the first report, for a new connection."""
        self._num_sent = 0

    def next_unsent(self) -> T | None:
        """The next report to send on this connection; None if there is none."""
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
