"""A selector that lets its sockets gather: of thousands that talk, to look at each alone is dear.

Between two looks lie at least `rest_s`. Whoever looked longer ago than that looks at once, so that
a process that has more to do than it has time for never rests.
"""

import selectors
import time
from typing import Any


class CoalescingSelector(selectors.DefaultSelector):
    """The machine's own, used the same way; who waits waits up to `rest_s` longer."""

    def __init__(self) -> None:
        super().__init__()
        self.rest_s = 0.0
        self._looked_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """As any selector's. With a timeout of 0 something else is due: then it does not rest."""
        left_s = self._looked_s + self.rest_s - time.monotonic()
        if left_s > 0.0 and (timeout is None or timeout > 0.0):
            rest_s = left_s if timeout is None else min(left_s, timeout)
            time.sleep(rest_s)
            timeout = None if timeout is None else timeout - rest_s
        found = super().select(timeout)
        self._looked_s = time.monotonic()
        return found
