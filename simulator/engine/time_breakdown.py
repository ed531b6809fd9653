"""Where the time and the samples of a simulated job went: every second into one use, once."""

from dataclasses import dataclass, field

from pacekeeper.simulator.policies.base import Use


@dataclass(slots=True)
class Trained:
    """Finished steps: seconds of them at full pace, and what they took longer."""

    steps: int = 0
    samples: float = 0.0
    paced_s: float = 0.0
    held_up_s: float = 0.0

    def plus(self, other: "Trained", sign: int = 1) -> "Trained":
        return Trained(
            self.steps + sign * other.steps,
            self.samples + sign * other.samples,
            self.paced_s + sign * other.paced_s,
            self.held_up_s + sign * other.held_up_s,
        )


@dataclass(slots=True)
class Ledger:
    """`spent_s` by use adds up to `now_s`; `samples` and `steps` are those that still count.

    `points`: (time, samples that count) wherever they bend, ascending in time; bends nearer than
    `resolution_s` to each other are one, unless samples are lost between them.
    """

    resolution_s: float = 0.0
    now_s: float = 0.0
    samples: float = 0.0
    steps: int = 0
    spent_s: dict[Use, float] = field(default_factory=lambda: dict.fromkeys(Use, 0.0))
    points: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    _unsaved: Trained = field(default_factory=Trained)
    _copied: Trained = field(default_factory=Trained)  # the part of it that is being written

    @property
    def uncopied_steps(self) -> int:
        """Steps since the newest checkpoint was begun."""
        return self._unsaved.steps - self._copied.steps

    def spend(self, use: Use, until_s: float) -> None:
        """Time without steps."""
        self.spent_s[use] += self._pass(until_s)
        self._point()

    def train(self, num_steps: int, until_s: float, samples: float, *, paced_s: float) -> None:
        """Finished steps, for the time being. `paced_s`: what they would take at full pace."""
        taken_s = self._pass(until_s)
        paced_s = min(paced_s, taken_s)
        done = Trained(num_steps, samples, paced_s, taken_s - paced_s)
        self._count(done)
        self._unsaved = self._unsaved.plus(done)
        self._point()

    def begin_save(self) -> None:
        """All that was trained so far is copied."""
        self._copied = self._unsaved

    def break_save(self) -> None:
        """What was copied will not be written."""
        self._copied = Trained()

    def save(self) -> None:
        """What was copied last is written, and can not be lost any more."""
        self._unsaved = self._unsaved.plus(self._copied, -1)
        self.break_save()

    def roll_back(self) -> None:
        """What was not saved counts as never trained; its time was spent on steps to be redone."""
        lost = self._unsaved
        self._count(lost, -1)
        self.spent_s[Use.REDONE] += lost.paced_s + lost.held_up_s
        self._unsaved = Trained()
        self.break_save()
        self.points.append((self.now_s, self.samples))

    def _count(self, trained: Trained, sign: int = 1) -> None:
        self.steps += sign * trained.steps
        self.samples += sign * trained.samples
        self.spent_s[Use.TRAINED] += sign * trained.paced_s
        self.spent_s[Use.HELD_UP] += sign * trained.held_up_s

    def _pass(self, until_s: float) -> float:
        """Seconds since what was told last."""
        taken_s = until_s - self.now_s
        assert taken_s >= 0.0, f"{until_s} s is before {self.now_s} s"
        self.now_s = until_s
        return taken_s

    def _point(self) -> None:
        """A straight line goes on: its end moves."""
        if len(self.points) > 1:
            (t0, s0), (t1, s1) = self.points[-2:]
            before, after = (s1 - s0) * (self.now_s - t1), (self.samples - s1) * (t1 - t0)
            is_straight = abs(before - after) <= 1e-9 * max(abs(before), abs(after), 1.0)
            is_near = self.now_s - t0 <= self.resolution_s
            if t1 > t0 and (is_straight or is_near):  # else samples were lost at this moment
                self.points.pop()
        self.points.append((self.now_s, self.samples))
