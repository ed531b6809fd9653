"""Reports that are not acknowledged yet: bounded, oldest dropped first, every drop counted."""

from collections import deque
from dataclasses import dataclass, field

from pacekeeper.core.reports import NodeReport


@dataclass(slots=True, kw_only=True)
class Spool:
    """Kept until acknowledged; sent in order, again from the first one after a reconnect."""

    capacity: int
    num_dropped: int = 0
    _reports: deque[NodeReport] = field(default_factory=deque)
    _sent_up_to: int = 0  # sequence of the last report handed out on this connection

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, report: NodeReport) -> None:
        """Keep a report; over capacity the oldest one goes."""
        assert not self._reports or report.sequence > self._reports[-1].sequence, "ascending"
        self._reports.append(report)
        while len(self._reports) > self.capacity:
            self._reports.popleft()
            self.num_dropped += 1

    def acknowledge(self, sequence: int) -> None:
        """Everything up to `sequence` is stored on the other side."""
        while self._reports and self._reports[0].sequence <= sequence:
            self._reports.popleft()

    def rewind(self) -> None:
        """A new connection: what is not acknowledged is sent again."""
        self._sent_up_to = 0

    def next(self) -> NodeReport | None:
        """The next report to send on this connection, or None."""
        # Unsent ones are at the end: look from there.
        unsent = None
        for report in reversed(self._reports):
            if report.sequence <= self._sent_up_to:
                break
            unsent = report
        if unsent is not None:
            self._sent_up_to = unsent.sequence
        return unsent
