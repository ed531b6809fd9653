"""How long a step takes this rank, and how fast it copies what is saved: what a copy may hold."""

from collections import deque
from statistics import median

HELD_RATIO = 0.02  # of a step, that copies hold training
_STEPS = 16  # the newest, of which the middle one counts


class SavePace:
    """One rank's measurements. Time is an argument, in seconds."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=_STEPS)
        self._last: tuple[int, float] | None = None
        self.copy_s, self.copied_bytes = 0.0, 0  # of the last copy

    def step_is_over(self, step: int, now_s: float) -> None:
        """`step` are committed; only what lies between two in a row is a step's time."""
        if self._last is not None and self._last[0] == step - 1:
            self._took_s.append(now_s - self._last[1])
        self._last = step, now_s

    def copied(self, size_bytes: int, took_s: float) -> None:
        """Training was held for so long."""
        if size_bytes and took_s > 0.0:
            self.copy_s, self.copied_bytes = took_s, size_bytes

    @property
    def step_s(self) -> float | None:
        """Of one step; None: not measured yet."""
        return median(self._took_s) if self._took_s else None

    @property
    def budget_bytes(self) -> float:
        """What may be copied after a step; 0.0: not measured yet."""
        if self.step_s is None or not self.copied_bytes:
            return 0.0
        return HELD_RATIO * self.step_s * self.copied_bytes / self.copy_s
