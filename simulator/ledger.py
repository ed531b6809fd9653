"""Where the time and the samples of a simulated job went: every second into one use, once."""

from dataclasses import dataclass, field

from pacekeeper.simulator.sim_policy import Use


@dataclass(slots=True)
class Ledger:
    """`spent_s` by use adds up to `now_s`; `samples` are those that still count.

    `points`: (time, samples that count) wherever they bend, ascending in time.
    """

    now_s: float = 0.0
    samples: float = 0.0
    steps: int = 0
    spent_s: dict[Use, float] = field(default_factory=lambda: dict.fromkeys(Use, 0.0))
    points: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    _unsaved_s: float = 0.0
    _unsaved_samples: float = 0.0
    _unsaved_steps: int = 0
    _copied_s: float = 0.0
    _copied_samples: float = 0.0
    _copied_steps: int = 0

    @property
    def uncopied_steps(self) -> int:
        """Steps since the newest checkpoint was begun."""
        return self._unsaved_steps - self._copied_steps

    def spend(self, use: Use, until_s: float) -> None:
        """Time without steps."""
        self.spent_s[use] += self._pass(until_s)
        self._point()

    def train(self, num_steps: int, until_s: float, samples: float) -> None:
        """Finished steps, for the time being."""
        taken_s = self._pass(until_s)
        self.spent_s[Use.TRAINED] += taken_s
        self.steps += num_steps
        self.samples += samples
        self._unsaved_s += taken_s
        self._unsaved_steps += num_steps
        self._unsaved_samples += samples
        self._point()

    def begin_save(self) -> None:
        """All that was trained so far is copied."""
        self._copied_s, self._copied_samples = self._unsaved_s, self._unsaved_samples
        self._copied_steps = self._unsaved_steps

    def break_save(self) -> None:
        """What was copied will not be written."""
        self._copied_s = self._copied_samples = 0.0
        self._copied_steps = 0

    def save(self) -> None:
        """What was copied last is written, and can not be lost any more."""
        self._unsaved_s -= self._copied_s
        self._unsaved_samples -= self._copied_samples
        self._unsaved_steps -= self._copied_steps
        self.break_save()

    def roll_back(self) -> None:
        """What was not saved counts as never trained; its time was spent on steps to be redone."""
        self.spent_s[Use.TRAINED] -= self._unsaved_s
        self.spent_s[Use.REDONE] += self._unsaved_s
        self.steps -= self._unsaved_steps
        self.samples -= self._unsaved_samples
        self.begin_save()
        self.save()
        self.points.append((self.now_s, self.samples))

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
            if t1 > t0 and abs(before - after) <= 1e-9 * max(abs(before), abs(after), 1.0):
                self.points.pop()
        self.points.append((self.now_s, self.samples))
