"""Figures of the demo, computed from step logs and incidents by pure functions.

Times are of this machine's monotonic clock, which trainer, controller and demo share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import nan
from statistics import mean
from typing import Any

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import PacekeeperError

MAX_OVERRUN_SHARE = 0.05  # of a phase; above it the rate is that of this machine
_JUDGED = {"healthy", "degraded", "mitigated"}  # phases by which the relief is judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps at which the faults happen: fixed shares of the run."""

    steps: int
    fault_step: int
    lift_step: int
    kill_step: int

    @classmethod
    def of(cls, steps: int) -> "Schedule":
        """Return the schedule of a run.

        Raises:
            ValueError: the run is too short for all phases.
        """
        if steps < 80:
            raise ValueError(f"steps: expected at least 80 (warm-up, four phases), got {steps}")
        return cls(
            steps=steps,
            fault_step=round(steps * 0.30),
            lift_step=round(steps * 0.60),
            kill_step=round(steps * 0.80),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One committed step of a rank's log.

    Attributes:
        overrun_s: cumulative time by which the real arithmetic exceeded the emulated device's time.
        compute_s: device time of this step; None unless the clock is the emulated one.
    """

    step: int
    generation: int
    ended_s: float
    tokens: int
    loss: float
    is_redone: bool = False
    overrun_s: float = 0.0
    compute_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedIncident:
    """An incident as received by the demo.

    Attributes:
        slowdown: as first reported.
        last_slowdown: as measured since.
        found_s: time at which the demo received it first.
    """

    incident_id: int
    kind: str
    rank: int | None
    slowdown: float
    onset_step: int
    found_step: int
    found_s: float
    reason: str
    last_slowdown: float | None = None
    closed_s: float | None = None
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruth:
    """Faults injected by the demo, and when."""

    rank: int
    slowdown: float
    fault_first_step: int
    fault_s: float
    lift_first_step: int
    killed_rank: int
    kill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Tokens per second of each phase; None: too few steps, or this machine limited it."""

    healthy: float | None
    degraded: float | None
    mitigated: float | None
    recovered: float | None
    after_kill: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionFigures:
    """What was injected, and what was found of it."""

    injected_rank: int
    injected_slowdown: float
    found_rank: int | None
    found_slowdown: float | None
    last_slowdown: float | None
    delay_iterations: int | None
    false_findings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFigures:
    """Throughput of the phases, and what limited it.

    Attributes:
        fluid_limit_tokens_per_s: healthy rate times mean speed: the rate if every part of a healthy
            step scaled with the speeds. Not an upper bound: devices also idle in a healthy step
            (hot experts, collectives), and a plan balances what the even layout did not.
        mitigated_of_fluid: mitigated rate relative to it; above 1 if `devices_busy_mitigated` is
            above `devices_busy_healthy`. These two are never above 1.
        host_was_measured: this machine limited a rate that the relief is judged by (healthy,
            degraded, mitigated), not the devices. None if unknown.
        host_overrun_share: share of the phase with most of it in which real arithmetic delayed the
            emulated device.
        busy_phases: phases whose rate this machine limited. Their figures are None.
    """

    tokens_per_s: Throughput
    fluid_limit_tokens_per_s: float | None
    degraded_of_fluid: float | None
    mitigated_of_fluid: float | None
    host_was_measured: bool | None
    devices_busy_healthy: float | None
    devices_busy_mitigated: float | None
    host_overrun_share: float | None
    busy_phases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFigures:
    """What the killed rank cost."""

    killed_rank: int
    survivors: int
    kill_to_next_step_s: float | None
    steps_lost: int
    steps_redone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFigures:
    """The training as a whole, by the log of the first survivor."""

    loss_first: float
    loss_last: float
    generations: int
    clock: str
    steps: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Steps of each phase; transitions belong to no phase."""

    healthy: range
    degraded: range
    mitigated: range
    recovered: range
    after_kill: range

    def items(self) -> list[tuple[str, range]]:
        """Return name and steps of each phase, in order."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The figures of the demo, by subject, and the phases that they were taken of."""

    detection: DetectionFigures
    speed: SpeedFigures
    recovery: RecoveryFigures
    training: TrainingFigures
    phases: Phases

    def to_json(self) -> dict[str, Any]:
        """Return all figures in one object: the last line of `pacekeeper demo --json`."""
        parts = (self.detection, self.speed, self.recovery, self.training)
        return {name: value for part in parts for name, value in asdict(part).items()}


def split_phases(
    steps: Sequence[LoggedStep], truth: GroundTruth, *, warmup_steps: int, kill_step: int
) -> Phases:
    """Divide the logged steps into phases, which end where the layout generation changes.

    Healthy: after the warm-up, from the last layout change before the fault. Degraded: from the
    fault's first step to the first plan. Mitigated: from the last plan before the lift on.
    Recovered: from the last plan before the kill on. The step during which a plan or a fault
    begins belongs to no phase.
    """
    by_step = {s.step: s for s in steps}
    last = max(by_step)

    def first_in_generation_at(step: int, not_before: int) -> int:
        """Return the first step of the run of equal generations around `step`."""
        first = step
        while first - 1 >= not_before and by_step.get(first - 1) is not None:
            if by_step[first - 1].generation != by_step[step].generation:
                break
            first -= 1
        return first

    fault, lift = truth.fault_first_step, truth.lift_first_step
    degraded_end = fault
    while degraded_end < lift and by_step[degraded_end].generation == by_step[fault].generation:
        degraded_end += 1
    return Phases(
        healthy=range(first_in_generation_at(fault - 1, warmup_steps) + 1, fault),
        degraded=range(fault, degraded_end),
        mitigated=range(first_in_generation_at(lift - 1, degraded_end) + 1, lift),
        recovered=range(first_in_generation_at(kill_step - 1, lift) + 1, kill_step),
        after_kill=range(first_in_generation_at(last, kill_step + 1) + 1, last + 1),
    )


def tokens_per_s(steps: Sequence[LoggedStep], phase: range) -> float | None:
    """Return tokens per second of a phase; None if it is empty."""
    by_step = {s.step: s for s in steps}
    if len(phase) < 1 or phase.start - 1 not in by_step:
        return None
    spent_s = by_step[phase.stop - 1].ended_s - by_step[phase.start - 1].ended_s
    return sum(by_step[s].tokens for s in phase) / spent_s


def throughput_of_phases(steps: Sequence[LoggedStep], phases: Phases) -> Throughput:
    """Return the tokens per second of each phase."""
    return Throughput(
        healthy=tokens_per_s(steps, phases.healthy),
        degraded=tokens_per_s(steps, phases.degraded),
        mitigated=tokens_per_s(steps, phases.mitigated),
        recovered=tokens_per_s(steps, phases.recovered),
        after_kill=tokens_per_s(steps, phases.after_kill),
    )


def overrun_share(logs: Mapping[int, Sequence[LoggedStep]], phase: range) -> float:
    """Return the share of a phase that the rank with most overruns spent on them; 0 if empty.

    The other ranks wait for that rank, so this share is due to the machine, not to the devices.
    """
    worst = 0.0
    for steps in logs.values():
        by_step = {s.step: s for s in steps}
        first, last = by_step.get(phase.start - 1), by_step.get(phase.stop - 1)
        if len(phase) and first is not None and last is not None:
            spent_s = last.ended_s - first.ended_s
            worst = max(worst, (last.overrun_s - first.overrun_s) / spent_s)
    return worst


def busy_share(
    logs: Mapping[int, Sequence[LoggedStep]], phase: range, slowdowns: Mapping[int, float]
) -> float | None:
    """Return the share of a phase that its work needs if divided ideally over the ranks, 0 to 1.

    Work is device time at full speed, sum_j c_j / slowdown_j; all ranks together process it at the
    sum of speeds, sum_j 1 / slowdown_j. None if the phase is empty or a device time is unknown.
    """
    work_s = 0.0
    for rank, steps in logs.items():
        times = {s.step: s.compute_s for s in steps}
        spent = [times.get(step) for step in phase]
        known = [c for c in spent if c is not None]
        if len(known) < len(spent):
            return None
        work_s += sum(known) / slowdowns.get(rank, 1.0)
    by_step = {s.step: s for s in logs[min(logs)]}
    if not phase or phase.start - 1 not in by_step:
        return None
    spent_s = by_step[phase.stop - 1].ended_s - by_step[phase.start - 1].ended_s
    return work_s / (spent_s * sum(1.0 / slowdowns.get(rank, 1.0) for rank in logs))


def lost_steps(logs: Sequence[Sequence[LoggedStep]], num_steps: int) -> int:
    """Count the steps that a survivor committed twice, never, or with another loss.

    Different losses of one step mean that a rank computed on wrong state.
    """
    losses: dict[int, set[float]] = {}
    lost = 0
    for steps in logs:
        numbers = [s.step for s in steps]
        missing = set(range(num_steps)) - set(numbers)
        lost = max(lost, len(numbers) - len(set(numbers)) + len(missing))
        for s in steps:
            losses.setdefault(s.step, set()).add(s.loss)
    return lost + sum(len(found) > 1 for found in losses.values())


def kill_to_next_step_s(logs: Sequence[Sequence[LoggedStep]], kill_s: float) -> float | None:
    """Return the time from the kill to the last survivor's first step on the survivors' layout.

    A step that was already voted on when the rank died needs no recovery and does not count.
    """
    ended = []
    for steps in logs:
        before = max((s.generation for s in steps if s.ended_s <= kill_s), default=0)
        after = [s.ended_s for s in steps if s.ended_s > kill_s and s.generation > before]
        if not after:
            return None
        ended.append(min(after))
    return max(ended) - kill_s


def compute_outcome(
    *,
    logs: Mapping[int, tuple[LoggedStep, ...]],
    incidents: Sequence[LoggedIncident],
    truth: GroundTruth,
    schedule: Schedule,
    trained: EngineConfig,
) -> Outcome:
    """Compute the outcome.

    Incidents without a rank (advice, job-level slowdowns of a busy machine) are not false findings.

    Args:
        logs: committed steps of each rank.
        incidents: incidents received by the demo.
        truth: injected faults.
        schedule: steps of the faults.
        trained: warm-up, clock and seed of the trainer.

    Raises:
        PacekeeperError: no rank survived.
    """
    survivors = {r: s for r, s in logs.items() if r != truth.killed_rank and s}
    if not survivors:
        raise PacekeeperError("no rank survived: no figures can be computed")
    steps = survivors[min(survivors)]
    phases = split_phases(
        steps, truth, warmup_steps=trained.warmup_steps, kill_step=step_at(steps, truth.kill_s)
    )
    known, clock = list(survivors.values()), "emulated" if trained.emulate else "cpu"
    return Outcome(
        detection=_detection_figures(steps, incidents, truth),
        speed=_speed_figures(logs, steps, phases, truth, is_cpu=clock == "cpu"),
        recovery=RecoveryFigures(
            killed_rank=truth.killed_rank,
            survivors=len([log for log in known if log[-1].ended_s > truth.kill_s]),
            kill_to_next_step_s=kill_to_next_step_s(known, truth.kill_s),
            steps_lost=lost_steps(known, schedule.steps),
            steps_redone=sum(s.is_redone for s in steps),
        ),
        training=TrainingFigures(
            loss_first=mean(s.loss for s in steps[:5]),
            loss_last=mean(s.loss for s in steps[-5:]),
            generations=steps[-1].generation,
            clock=clock,
            steps=steps[-1].step + 1,
            seed=trained.seed,
        ),
        phases=phases,
    )


def _detection_figures(
    steps: Sequence[LoggedStep], incidents: Sequence[LoggedIncident], truth: GroundTruth
) -> DetectionFigures:
    true_findings = [i for i in incidents if i.kind == "device" and is_true_finding(i, truth)]
    found = min(true_findings, key=lambda i: i.found_s, default=None)
    true_deaths = [i for i in incidents if i.kind == "death" and i.rank == truth.killed_rank]
    accusing = [i for i in incidents if i.rank is not None]
    expected_incidents = min(1, len(true_findings)) + min(1, len(true_deaths))
    return DetectionFigures(
        injected_rank=truth.rank,
        injected_slowdown=truth.slowdown,
        found_rank=None if found is None else found.rank,
        found_slowdown=None if found is None else round(found.slowdown, 4),
        last_slowdown=None if found is None else found.last_slowdown,
        delay_iterations=None if found is None else delay_iterations(steps, truth, found),
        false_findings=len(accusing) - expected_incidents,
    )


def _speed_figures(
    logs: Mapping[int, tuple[LoggedStep, ...]],
    steps: Sequence[LoggedStep],
    phases: Phases,
    truth: GroundTruth,
    *,
    is_cpu: bool,
) -> SpeedFigures:
    def limit(rates: Throughput) -> float | None:
        return None if is_cpu else fluid_limit(rates.healthy, truth.slowdown, len(logs))

    measured = throughput_of_phases(steps, phases)
    overruns = {} if is_cpu else {n: overrun_share(logs, phase) for n, phase in phases.items()}
    is_hidden = is_fault_hidden(measured, limit(measured))
    busy = {name for name, share in overruns.items() if is_hidden or share > MAX_OVERRUN_SHARE}
    shown = replace(measured, **dict.fromkeys(busy))
    fluid = limit(shown)
    devices = {"healthy": busy_share(logs, phases.healthy, {})}
    devices["mitigated"] = busy_share(logs, phases.mitigated, {truth.rank: truth.slowdown})
    return SpeedFigures(
        tokens_per_s=shown,
        fluid_limit_tokens_per_s=fluid,
        degraded_of_fluid=_ratio(shown.degraded, fluid),
        mitigated_of_fluid=_ratio(shown.mitigated, fluid),
        host_was_measured=True if busy & _JUDGED else is_hidden,
        devices_busy_healthy=None if "healthy" in busy else devices["healthy"],
        devices_busy_mitigated=None if "mitigated" in busy else devices["mitigated"],
        host_overrun_share=max(overruns.values(), default=None),
        busy_phases=tuple(name for name in overruns if name in busy),
    )


def drawn_rates(
    steps: Sequence[LoggedStep], phases: Phases, busy_phases: Sequence[str]
) -> list[float]:
    """Return tokens per second of each step but the first; NaN where this machine limited them.

    Steps between two phases count to the one before, those of the warm-up to the first.
    """
    rates = []
    for before, s in pairwise(steps):
        name = "healthy"
        for later, phase in phases.items():
            name = later if phase.start <= s.step else name
        rates.append(nan if name in busy_phases else s.tokens / (s.ended_s - before.ended_s))
    return rates


def fluid_limit(healthy: float | None, slowdown: float, num_ranks: int) -> float | None:
    """Return the healthy rate times the mean speed with one slow rank (see `Outcome`).

    Undefined for the CPU clock, where ranks compete for cores.
    """
    return None if healthy is None else healthy * (num_ranks - 1 + 1 / slowdown) / num_ranks


def is_fault_hidden(speed: Throughput, fluid: float | None) -> bool | None:
    """Return whether the degraded rate, before any plan, reaches the fluid limit.

    All ranks wait for the slow one, so a fault must cost throughput if the devices limit the rate
    (idle machine at x1.6: 0.82 to 0.87 of the limit remain). None if a rate is unknown.
    """
    if fluid is None or speed.degraded is None:
        return None
    return speed.degraded >= fluid


def _ratio(rate: float | None, whole: float | None) -> float | None:
    return None if rate is None or whole is None else rate / whole


def is_true_finding(incident: LoggedIncident, truth: GroundTruth) -> bool:
    """Return whether an incident names the slowed rank while it was slow."""
    in_time = truth.fault_s <= incident.found_s and incident.onset_step < truth.lift_first_step
    return incident.rank == truth.rank and in_time


def delay_iterations(steps: Sequence[LoggedStep], truth: GroundTruth, found: LoggedIncident) -> int:
    """Count the slow iterations that had ended when the incident arrived."""
    return sum(1 for s in steps if s.step >= truth.fault_first_step and s.ended_s <= found.found_s)


def step_at(steps: Sequence[LoggedStep], at_s: float) -> int:
    """Return the step in progress at `at_s`."""
    over = [s.step for s in steps if s.ended_s <= at_s]
    return max(over, default=steps[0].step - 1) + 1
