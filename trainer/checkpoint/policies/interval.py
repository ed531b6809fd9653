"""How long a step takes this rank, how long saving holds it, and how often it has to save for that.

Time is an argument: seconds of a clock that never goes back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pacekeeper.core.checkpoint.interval import SaveCosts

HELD_RATIO = 0.02  # of a step, that the copies after it may hold training
BESIDE_RATIO = 1.0  # of a step, that they may take where a device makes them beside the next one
_STEPS = 16  # the newest, of which the middle one counts


class CheckpointCostMeter:
    """One rank's measurements, from `now_s` on."""

    def __init__(self, now_s: float) -> None:
        self._took_s: deque[float] = deque(maxlen=_STEPS)
        self._last: tuple[int, float] | None = None
        self._began_s, self._ran_s, self._num_restores = now_s, 0.0, 0
        self._copy_s, self._copied_bytes = 0.0, 0  # of the last copy
        self._held_s = 0.0  # by the last checkpoint, all its steps
        self._waited_s = 0.0  # for the last copies that were made beside a step, at its end
        self._ratio = HELD_RATIO

    def step_is_over(self, step: int, now_s: float) -> None:
        """`step` are committed; only what lies between two in a row is a step's time."""
        if self._last is not None and self._last[0] == step - 1:
            self._took_s.append(now_s - self._last[1])
        self._last = step, now_s

    def copied(self, size_bytes: int, took_s: float, *, is_first: bool) -> None:
        """Training was held for so long; `is_first`: by another checkpoint than before."""
        self._held_s = took_s + (0.0 if is_first else self._held_s)
        if size_bytes and took_s > 0.0:
            self._copy_s, self._copied_bytes = took_s, size_bytes

    def settled(self, size_bytes: int, took_s: float, waited_s: float) -> None:
        """Copies were made beside a step, which was held at its end as long as was waited."""
        self._copy_s, self._copied_bytes = took_s, size_bytes
        self._waited_s, self._ratio = waited_s, BESIDE_RATIO

    def went_back(self, told: SaveCosts | None, now_s: float) -> None:
        """To a checkpoint that tells this of the run before it."""
        if told is not None:
            self._ran_s = max(self._ran_s + now_s - self._began_s, told.running_s)
            self._num_restores = max(self._num_restores, told.num_restores)
            self._began_s = now_s
        self._num_restores += 1

    @property
    def step_s(self) -> float | None:
        """Of one step; None: not measured yet."""
        return median(self._took_s) if self._took_s else None

    @property
    def budget_bytes(self) -> float:
        """What may be copied after a step; 0.0: not measured yet."""
        if self.step_s is None or not self._copied_bytes:
            return 0.0
        return self._ratio * self.step_s * self._copied_bytes / self._copy_s

    def costs(self, now_s: float) -> SaveCosts | None:
        """As far as this rank knows; None: no step was measured yet."""
        if self.step_s is None:
            return None
        return SaveCosts(
            held_s=self._held_s + self._waited_s,
            step_s=self.step_s,
            running_s=self._ran_s + now_s - self._began_s,
            num_restores=self._num_restores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalVote:
    """The step of the last checkpoint, and the steps to the next."""

    last_step: int
    period_steps: int


class CheckpointInterval:
    """When the next checkpoint is due: every `steps`; where these are 0, as the first rank says."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._last_step = 0
        self._vote: IntervalVote | None = None  # the first rank's

    @property
    def is_chosen(self) -> bool:
        """Does it follow what is measured?"""
        return not self._steps

    def own_vote(self, costs: SaveCosts | None) -> IntervalVote:
        """Of each step; 1 step while nothing is known: the first one measures."""
        best = None if costs is None else costs.best_period_steps
        return IntervalVote(last_step=self._last_step, period_steps=best or 1)

    def receive_votes(self, votes: Sequence[IntervalVote]) -> None:
        """Everybody's, the first rank's first."""
        self._vote = votes[0]

    def is_due(self, step: int) -> bool:
        """With `step` committed; where it is chosen, as was said in the vote on it."""
        if self._steps:
            return step % self._steps == 0
        heard, self._vote = self._vote, None
        return heard is not None and step - heard.last_step >= heard.period_steps

    def begun(self, step: int) -> None:
        """One is being made, or was gone back to."""
        self._last_step = step
