"""Measures the lag of the event loop: the longest delay of the last minute.

A heartbeat runs every `BEAT_S` and is late while something blocks the loop. The metrics thread
reads the lag, so that a heartbeat that is still missing counts as well.
"""

import asyncio
import threading
import time
from collections import deque

BEAT_S = 0.1
WINDOW_S = 60.0  # longer than between two scrapes: none of them misses a stall


class LoopLag:
    """The lag; `began_s`: monotonic time of its creation."""

    def __init__(self, began_s: float) -> None:
        self._beat_s = began_s
        # (when, how late), the latest of the later ones only: values fall.
        self._late: deque[tuple[float, float]] = deque()
        self._lock = threading.Lock()

    def beat(self, now_s: float) -> None:
        """Record a heartbeat."""
        with self._lock:
            late_s = max(0.0, now_s - self._beat_s - BEAT_S)
            self._beat_s = now_s
            while self._late and self._late[-1][1] <= late_s:
                self._late.pop()
            self._late.append((now_s, late_s))
            self._forget(now_s)

    def worst_s(self, now_s: float) -> float:
        """The longest delay of the last minute, including the present one."""
        with self._lock:
            self._forget(now_s)
            waiting_s = max(0.0, now_s - self._beat_s - BEAT_S)
            return max(waiting_s, self._late[0][1] if self._late else 0.0)

    def _forget(self, now_s: float) -> None:
        while self._late and now_s - self._late[0][0] > WINDOW_S:
            self._late.popleft()


async def run_heartbeat(lag: LoopLag) -> None:
    """Record heartbeats until cancelled."""
    while True:
        lag.beat(time.monotonic())
        await asyncio.sleep(BEAT_S)
