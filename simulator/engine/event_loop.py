"""One job under one policy through one history: the event loop.

Time passes only from one event to the next: changes of the cluster, ends of phases, and those steps
after which something is due. Between them all steps take the same time. A step that a loss
interrupts is broken off; any other change waits for the end of the step.
"""

from dataclasses import dataclass, field
from itertools import groupby
from math import ceil, floor, inf
from typing import Generic

from pacekeeper.simulator.cluster.history import (
    Change,
    History,
    NodesJoined,
    NodesLost,
    SpeedChanged,
)
from pacekeeper.simulator.engine.time_breakdown import Ledger
from pacekeeper.simulator.jobs.expert_routing import Routing
from pacekeeper.simulator.policies.base import (
    RECONFIGURING,
    AnswerOf,
    Cause,
    Draws,
    Job,
    MomentOf,
    PolicyOf,
    Saving,
    Use,
    W,
)

NEAR = 1e-9  # of a step, or of a second: as good as over
MANY = 1 << 40  # steps: nothing is due
MOST_POINTS = 20_000  # of an outcome, beside those at which samples were lost


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDecision:
    """One answer of the policy, for people."""

    at_s: float
    cause: Cause
    reason: str
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What became of the job. `spent_s` adds up to `duration_s`; samples and steps are those that
    counted in the end. `fluid_samples`: had all nodes that are there, at the speeds they have,
    trained at full pace all the time. `restarts`: begun after a loss, from what was saved, however
    long the job waited for nodes before; `needless_restarts`: those in spite of a living copy of
    every expert. `points`: (time, samples that counted then).
    """

    policy: str
    seed: int
    duration_s: float
    samples: float
    fluid_samples: float
    steps: int
    spent_s: dict[Use, float]
    restarts: int
    needless_restarts: int
    reconfigurations: int
    copied_bytes: int
    points: tuple[tuple[float, float], ...]
    decisions: tuple[PolicyDecision, ...]

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.duration_s


def simulate(
    history: History,
    job: Job[W],
    routing: Routing,
    policy: PolicyOf[W],
    *,
    seed: int = 0,
) -> SimulationResult:
    """Play the history. The same arguments give the same outcome. Raises ValueError where the
    routing is of another model.
    """
    if (routing.num_layers, routing.num_experts) != (job.num_layers, job.num_experts):
        raise ValueError(
            f"routing of {routing.num_layers} layers x {routing.num_experts} experts, a job of "
            f"{job.num_layers} x {job.num_experts}"
        )
    ledger = Ledger(resolution_s=history.duration_s / MOST_POINTS)
    run: _Run[W] = _Run(job=job, routing=routing, policy=policy, draws=Draws(seed), ledger=ledger)
    for at_s, changes in groupby(history.changes, key=lambda change: change.at_s):
        run.advance(at_s)
        run.apply_changes(at_s, tuple(changes))
    run.advance(history.duration_s)
    return run.outcome(seed, history)


@dataclass(slots=True, kw_only=True)
class _Run(Generic[W]):
    """`layout` is what is held; `target` takes its place when all `phases` are over.

    While steps run, the one under way began at the ledger's time.
    """

    job: Job[W]
    routing: Routing
    policy: PolicyOf[W]
    draws: Draws
    ledger: Ledger
    nodes: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    grow_s: float = inf  # when those who wait are let in
    speed: dict[int, float] = field(default_factory=dict)
    layout: W | None = None
    target: W | None = None
    phases: list[tuple[Use, float]] = field(default_factory=list)
    is_fresh: bool = True
    is_paced: bool = False  # speeds have changed: the policy is asked at the end of the step
    layout_step: int = 0
    due_step: int | None = None
    memory: object = None
    saving: Saving | None = None  # as the policy said last; None: what its costs say
    written_s: float = inf  # when the checkpoint under way is whole
    open_step_s: float = 0.0  # what the step under way takes; 0: none is
    step_s: float = 0.0  # of the next steps; 0: to be found
    step_s_until: int | None = None
    decisions: list[PolicyDecision] = field(default_factory=list)
    restarts: int = 0
    needless: int = 0
    reconfigurations: int = 0
    copied_bytes: int = 0

    def advance(self, until_s: float) -> None:
        """Let time pass."""
        while self.ledger.now_s < until_s:
            if self.phases:
                self._spend(until_s)
            elif self.layout is None:
                if not self._admit(Cause.START):
                    self.ledger.spend(Use.WAITED, min(until_s, self.grow_s))
            elif not self.open_step_s and self._is_due():
                continue
            elif not self._train(until_s):
                return

    def apply_changes(self, at_s: float, changes: tuple[Change, ...]) -> None:
        """All that happens at one moment."""
        lost: set[int] = set()
        for change in changes:
            match change:
                case NodesLost():
                    lost |= set(change.nodes)
                    self.nodes.difference_update(change.nodes)
                    self.waiting.difference_update(change.nodes)
                    for node in change.nodes:
                        self.speed.pop(node, None)
                case NodesJoined():
                    self.waiting.update(change.nodes)
                    wait_s = 0.0 if self.is_fresh else self.policy.costs.grow_wait_s
                    self.grow_s = min(self.grow_s, at_s + wait_s)
                case SpeedChanged():
                    self.speed[change.node] = change.speed
                    self.is_paced = True
        if not self.waiting:
            self.grow_s = inf
        self.step_s = 0.0
        in_use = {n for layout in (self.layout, self.target) if layout for n in layout.ranks}
        if lost & in_use:
            if self.waiting and at_s >= self.grow_s:
                self._let_in()  # survivors regroup with them at once (ADR 35)
            self.ledger.spend(Use.BROKEN_OFF, at_s)
            self._settle_save()
            self.ledger.break_save()
            self.written_s = inf
            self.open_step_s = 0.0
            self.phases, self.target = [], None
            self._ask(Cause.LOST)

    def outcome(self, seed: int, history: History) -> SimulationResult:
        """What is told at the end; the step under way counts for nothing."""
        end_s = history.duration_s
        self.ledger.spend(Use.BROKEN_OFF, end_s)
        return SimulationResult(
            policy=self.policy.name,
            seed=seed,
            duration_s=end_s,
            samples=self.ledger.samples,
            fluid_samples=history.node_s() * self.job.samples_per_node_s,
            steps=self.ledger.steps,
            spent_s=dict(self.ledger.spent_s),
            restarts=self.restarts,
            needless_restarts=self.needless,
            reconfigurations=self.reconfigurations,
            copied_bytes=self.copied_bytes,
            points=tuple(self.ledger.points),
            decisions=tuple(self.decisions),
        )

    def _spend(self, until_s: float) -> None:
        """The first phase, or its part until then."""
        use, left_s = self.phases[0]
        end_s = self.ledger.now_s + left_s
        if end_s > until_s:
            self.phases[0] = use, end_s - until_s
            self.ledger.spend(use, until_s)
            return
        self.ledger.spend(use, end_s)
        if use is Use.SAVED:
            self.ledger.begin_save()
            self.written_s = end_s + self._saving().behind_s
            self._settle_save()
        self.phases.pop(0)
        if not self.phases:
            self._arrive()

    def _saving(self) -> Saving:
        return self.saving or self.policy.costs.saving(self.job, len(self.nodes))

    def _settle_save(self) -> None:
        """A checkpoint counts from the moment it is whole."""
        if self.ledger.now_s >= self.written_s - NEAR:
            self.ledger.save()
            self.written_s = inf

    def _arrive(self) -> None:
        if self.target is not None and self.target is not self.layout:
            self.layout = self.target
            self.layout_step = self.ledger.steps
            self.step_s = 0.0
        self.target = None

    def _is_due(self) -> bool:
        """Between two steps: has anything been begun that comes before the next?"""
        period = self.policy.checkpoint_steps
        self._settle_save()
        is_free = self.written_s == inf  # one checkpoint after the other
        if is_free and period is not None and self.ledger.uncopied_steps >= period:
            self.phases = [(Use.SAVED, self._saving().stop_s)]
        elif self.is_paced:
            self._ask(Cause.PACED)
        elif self.due_step is not None and self.ledger.steps >= self.due_step:
            self._ask(Cause.DUE)
        else:
            return self._admit(Cause.GROWN)
        return True

    def _admit(self, cause: Cause) -> bool:
        """Let those in who have waited long enough."""
        if not self.waiting or self.ledger.now_s < self.grow_s:
            return False
        self._let_in()
        self._ask(cause)
        return True

    def _let_in(self) -> None:
        self.nodes |= self.waiting
        self.waiting, self.grow_s = set(), inf

    def _train(self, until_s: float) -> bool:
        """Steps until something is due; False: the step under way is not over by then."""
        ledger = self.ledger
        if self.open_step_s:
            step_s, most = self.open_step_s, 1
        else:
            step_s = self._next_step_s()
            most = self._steps_until_due(step_s)
        whole = min(most, floor((until_s - ledger.now_s) / step_s + NEAR))
        if whole < 1:
            self.open_step_s = step_s
            return False
        assert self.layout is not None
        samples = whole * self.job.samples_per_step(self.layout)
        ledger.train(
            whole,
            min(until_s, ledger.now_s + whole * step_s),
            samples,
            paced_s=whole * self.job.paced_s(self.layout),
        )
        self.open_step_s = 0.0
        return True

    def _next_step_s(self) -> float:
        step = self.ledger.steps
        if not self.step_s or (self.step_s_until is not None and step >= self.step_s_until):
            assert self.layout is not None
            self.step_s = self.job.step_s(
                self.layout, self.routing.at(step), self.speed, self.policy.dispatch
            )
            self.step_s_until = self.routing.next_change(step)
        return self.step_s

    def _steps_until_due(self, step_s: float) -> int:
        ledger, period = self.ledger, self.policy.checkpoint_steps
        steps = [] if period is None else [period - ledger.uncopied_steps]
        if steps and self.written_s < inf:
            steps = [max(steps[0], ceil((self.written_s - ledger.now_s) / step_s))]
        steps += [due - ledger.steps for due in (self.due_step, self.step_s_until) if due]
        if self.waiting:
            steps.append(ceil((self.grow_s - ledger.now_s) / step_s))
        return max(1, min(steps, default=MANY))

    def _ask(self, cause: Cause) -> None:
        """Ask the policy, and do what it says."""
        self.is_paced = self.is_paced and cause is not Cause.PACED
        ledger = self.ledger
        answer = self.policy.answer(
            MomentOf(
                now_s=ledger.now_s,
                cause=cause,
                step=ledger.steps,
                nodes=tuple(sorted(self.nodes)),
                layout=self.layout,
                layout_step=self.layout_step,
                parts=self.routing.at(ledger.steps),
                speed=dict(self.speed),
                memory=self.memory,
                draws=self.draws,
                is_fresh=self.is_fresh,
            ),
            self.job,
        )
        self.memory, self.saving = answer.memory, answer.saving
        self._tell(cause, answer)
        if answer.is_rolled_back and not self.is_fresh:
            self._roll_back(is_begun=answer.layout is not None)
        if answer.layout is None:
            self.layout = None
        else:
            self.is_fresh = False
        self.copied_bytes += answer.copied_bytes
        self.reconfigurations += any(use in RECONFIGURING for use, _ in answer.phases)
        self.target, self.phases = answer.layout, list(answer.phases)
        if not self.phases:
            self._arrive()
        waits = [w for w in (self.policy.review_steps, answer.again_after_steps) if w is not None]
        self.due_step = ledger.steps + max(1, min(waits)) if waits else None

    def _roll_back(self, *, is_begun: bool) -> None:
        """Not begun: what was not saved is lost, and too few nodes are there to start again."""
        held, self.layout = self.layout, None
        self.ledger.roll_back()
        self.restarts += is_begun
        is_whole = held is not None and self.job.is_alive(held, self.nodes)
        self.needless += is_whole and self.job.has_room(len(self.nodes))

    def _tell(self, cause: Cause, answer: AnswerOf[W]) -> None:
        if answer.phases or answer.layout is not self.layout or answer.is_rolled_back:
            self.decisions.append(
                PolicyDecision(
                    at_s=self.ledger.now_s,
                    cause=cause,
                    reason=answer.reason,
                    num_nodes=len(self.nodes),
                )
            )
