"""The dumb twin of the event loop: one second after the other, whole seconds only."""

from collections import Counter
from dataclasses import dataclass, field

from pacekeeper.simulator.cluster.history import Change, History, NodesJoined, NodesLost
from pacekeeper.simulator.policies.base import Use

SAVE_S, RESTART_S, WAIT_S, SAMPLES = 3, 7, 4, 3  # what EXACT and small_job come to
SAVE, RESTART = 0, 1


@dataclass(slots=True, kw_only=True)
class Walk:
    """`Restarting` with groups of one node, a checkpoint every `every` steps of `step_s`."""

    every: int
    step_s: int
    spent: Counter[Use] = field(default_factory=Counter)
    samples: int = 0
    restarts: int = 0
    nodes: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    layout: set[int] = field(default_factory=set)
    target: set[int] = field(default_factory=set)
    phases: list[list[int]] = field(default_factory=list)  # [SAVE or RESTART, seconds left]
    unsaved: list[int] = field(default_factory=list)  # samples of each step
    into: int = 0  # seconds of the step under way
    let_in: int = 0
    is_fresh: bool = True

    def through(self, history: History) -> None:
        by_second: dict[int, list[Change]] = {}
        for change in history.changes:
            by_second.setdefault(int(change.at_s), []).append(change)
        for now in range(int(history.duration_s)):
            self._take(now, by_second.get(now, []))
            while not self.into and self._begin(now):
                pass
            self._pass()
        self.spent[Use.BROKEN_OFF] += self.into

    def _take(self, now: int, changes: list[Change]) -> None:
        lost: set[int] = set()
        for change in changes:
            if isinstance(change, NodesLost):
                lost |= set(change.nodes)
                self.nodes -= lost
                self.waiting -= lost
            elif isinstance(change, NodesJoined):
                if not self.waiting:
                    self.let_in = now + (0 if self.is_fresh else WAIT_S)
                self.waiting |= set(change.nodes)
        if lost & (self.layout | (self.target if self.phases else set())):
            self.spent[Use.BROKEN_OFF] += self.into
            self.into, self.phases = 0, []
            if self.waiting and now >= self.let_in:
                self.nodes |= self.waiting
                self.waiting = set()
            self._go_on(is_grown=False)

    def _begin(self, now: int) -> bool:
        """Something that comes before the next step?"""
        if self.phases and not self.phases[0][1]:
            self._end_phase()
        elif self.phases:
            return False
        elif self.layout and len(self.unsaved) >= self.every:
            self.phases, self.target = [[SAVE, SAVE_S]], set(self.layout)
        elif self.waiting and now >= self.let_in:
            self.nodes |= self.waiting
            self.waiting = set()
            self._go_on(is_grown=True)
        else:
            return False
        return True

    def _pass(self) -> None:
        if self.phases:
            self.spent[Use.SAVED if self.phases[0][0] == SAVE else Use.RESTARTED] += 1
            self.phases[0][1] -= 1
            if not self.phases[0][1]:
                self._end_phase()
        elif not self.layout:
            self.spent[Use.WAITED] += 1
        else:
            self.into += 1
            if self.into == self.step_s:
                self.spent[Use.TRAINED] += self.step_s
                self.unsaved.append(len(self.layout) * SAMPLES)
                self.samples += self.unsaved[-1]
                self.into = 0

    def _end_phase(self) -> None:
        if self.phases.pop(0)[0] == SAVE:
            self.unsaved = []
        if not self.phases:
            self.layout = set(self.target)

    def _go_on(self, *, is_grown: bool) -> None:
        self.target = set(self.nodes)
        if self.is_fresh and self.nodes:
            self.is_fresh, self.layout = False, set(self.nodes)
        elif is_grown and self.layout:
            self.phases = [[SAVE, SAVE_S], [RESTART, RESTART_S]]
        else:
            self._roll_back()
            self.phases = [[RESTART, RESTART_S]] if self.nodes else []

    def _roll_back(self) -> None:
        self.spent[Use.REDONE] += self.step_s * len(self.unsaved)
        self.spent[Use.TRAINED] -= self.step_s * len(self.unsaved)
        self.samples -= sum(self.unsaved)
        self.unsaved, self.layout = [], set()
        self.restarts += bool(self.nodes)
