"""How long the event loop let somebody wait: the longest of the last minute.

A beat shows it: it wants to come every `BEAT_S`, and comes late while something holds the loop. One
that does not come at all counts, too: who asks does so from another thread.
"""

import asyncio
import threading
import time
from collections import deque

BEAT_S = 0.1
WINDOW_S = 60.0  # longer than between two scrapes: none of them misses a stall


class LoopLag:
    """`began_s`: the first beat."""

    def __init__(self, began_s: float) -> None:
        self._beat_s = began_s
        # (when, how late), the latest of the later ones only: values fall.
        self._late: deque[tuple[float, float]] = deque()
        self._lock = threading.Lock()

    def beat(self, now_s: float) -> None:
        """The loop came to it now."""
        with self._lock:
            late_s = max(0.0, now_s - self._beat_s - BEAT_S)
            self._beat_s = now_s
            while self._late and self._late[-1][1] <= late_s:
                self._late.pop()
            self._late.append((now_s, late_s))
            self._forget(now_s)

    def worst_s(self, now_s: float) -> float:
        """The longest wait of the last minute, with the one that goes on now."""
        with self._lock:
            self._forget(now_s)
            waiting_s = max(0.0, now_s - self._beat_s - BEAT_S)
            return max(waiting_s, self._late[0][1] if self._late else 0.0)

    def _forget(self, now_s: float) -> None:
        while self._late and now_s - self._late[0][0] > WINDOW_S:
            self._late.popleft()


async def run_heartbeat(lag: LoopLag) -> None:
    """Until it is cancelled."""
    while True:
        lag.beat(time.monotonic())
        await asyncio.sleep(BEAT_S)
