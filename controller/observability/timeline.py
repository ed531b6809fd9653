"""Records the timeline of each incident and of each job, within fixed limits.

The newest steps of a job are kept with the times of all its ranks. A timeline of an incident starts
with those of its rank, continues until some steps after its end, and notes decisions and actions. A
full timeline merges its two shortest neighbouring rows.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pacekeeper.controller.state.events import StepSummary
from pacekeeper.core.incidents.findings import ConsideredLayout, Decision, Incident, MitigationLevel
from pacekeeper.core.telemetry.sign_of_life import RankStack

RECENT_STEPS = 48  # with the times of all ranks
MOST_ROWS = 240  # of one incident
RAW_ROWS = 96  # of these the first are never merged: before the onset, and what followed at once
MAX_JOB_ROWS = 480  # of one job
AFTER_STEPS = 24  # that an incident's timeline goes on once it is closed
MOST_PLANS, MOST_NOTES, MOST_STACKS = 12, 64, 8  # of one incident
MAX_INCIDENT_TIMELINES = (
    64  # of one job at a time: what strikes more ranks at once is the same of all
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRow:
    """One step of a job during an incident, or the means of `num_steps` from `step` on.

    `observed_s`, `expected_s`: of the incident's rank, or the median of all ranks if it has none;
    `peers_slowdown`: the median of the other ranks. NaN: unknown.
    """

    step: int
    unix_s: float
    num_steps: int
    generation: int
    step_s: float
    observed_s: float
    expected_s: float
    peers_slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One step of a job, or the means of `num_steps`; `slowest`: the largest slowdown of a rank."""

    step: int
    unix_s: float
    num_steps: int
    generation: int
    step_s: float
    tokens_per_s: float
    slowest: float


R = TypeVar("R", IncidentRow, JobRow)
_MEANS: Mapping[type, tuple[str, ...]] = {
    IncidentRow: ("step_s", "observed_s", "expected_s", "peers_slowdown"),
    JobRow: ("step_s", "tokens_per_s", "slowest"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNote:
    """A decision while the incident was open. `generation`: of its plan; None: no plan."""

    step: int
    unix_s: float
    level: MitigationLevel
    reason: str
    generation: int | None
    current_step_s: float
    planned_step_s: float
    fluid_step_s: float
    cost_s: float
    moved_bytes: int
    considered: tuple[ConsideredLayout, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One action, at a step and a time."""

    step: int
    unix_s: float
    text: str


@dataclass(slots=True, eq=False, kw_only=True)
class IncidentTimeline:
    """The timeline of one incident; `left_steps`: rows still to come, None while it is open."""

    incident_id: int
    job: str
    rank: int | None
    rows: list[IncidentRow] = field(default_factory=list)
    plans: list[PlanNote] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    stacks: list[RankStack] = field(default_factory=list)
    left_steps: int | None = None

    def plan(self, note: PlanNote) -> None:
        """Add a decision; one without a plan replaces a newest one without a plan."""
        before = self.plans[-1] if self.plans else None
        if before is not None and before.generation is None and note.generation is None:
            self.plans.pop()
        self.plans.append(note)
        if len(self.plans) > MOST_PLANS:
            del self.plans[1]  # the first answer stays, and the newest ones

    def note(self, note: Note) -> None:
        """Add an action; beyond the limit, old ones in the middle are dropped."""
        self.notes.append(note)
        if len(self.notes) > MOST_NOTES:
            del self.notes[MOST_NOTES // 4]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The times of all ranks in one step, for incidents that open later."""

    step: int
    unix_s: float
    generation: int
    step_s: float
    at: Mapping[int, int]
    observed_s: NDArray[np.float32]
    expected_s: NDArray[np.float32]


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    recent: deque[_Step] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    rows: list[JobRow] = field(default_factory=list)
    step: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class TimelineRecorder:
    """The timelines of all jobs; `stored_*` return those an earlier process stored."""

    stored_incident_timeline: Callable[[int], IncidentTimeline | None] = lambda incident_id: None
    stored_job_timeline: Callable[[str], Sequence[JobRow]] = lambda job: ()
    incident_timelines: dict[int, IncidentTimeline] = field(
        default_factory=dict
    )  # open, or over since a few steps
    # Of these, since they were stored; who has waited longest is the first.
    changed: dict[int, None] = field(default_factory=dict)
    changed_jobs: dict[str, None] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)

    def job_timeline(self, job: str) -> list[JobRow]:
        """The timeline of a job, oldest first."""
        return self._job(job).rows

    def on_step(self, summary: StepSummary, unix_s: float) -> None:
        """Record a complete step."""
        job = self._job(summary.job)
        job.step = summary.step
        known = _kept(summary, unix_s, job.recent[-1].at if job.recent else {})
        job.recent.append(known)
        slowest = max((s for s in summary.slowdown if not isnan(s)), default=nan)
        _append(
            job.rows,
            JobRow(
                step=summary.step,
                unix_s=unix_s,
                num_steps=1,
                generation=summary.generation,
                step_s=summary.duration_s,
                tokens_per_s=summary.tokens / summary.duration_s if summary.duration_s else nan,
                slowest=slowest,
            ),
            most=MAX_JOB_ROWS,
            raw=0,
        )
        self.changed_jobs[summary.job] = None
        for timeline in [one for one in self.incident_timelines.values() if one.job == summary.job]:
            _append(timeline.rows, _row(known, timeline.rank), most=MOST_ROWS, raw=RAW_ROWS)
            self.changed[timeline.incident_id] = None
            if timeline.left_steps is not None:
                timeline.left_steps -= 1

    def on_incident(self, incident: Incident, unix_s: float) -> None:
        """Record that an incident opened or changed."""
        timeline = self.incident_timelines.get(incident.incident_id)
        if timeline is None:
            timeline = self.stored_incident_timeline(incident.incident_id)
            if timeline is None:
                if (
                    sum(one.job == incident.job for one in self.incident_timelines.values())
                    >= MAX_INCIDENT_TIMELINES
                ):
                    return
                timeline = self._begun(incident)
            self.incident_timelines[incident.incident_id] = timeline
        known = {note.text for note in timeline.notes}
        for action in incident.actions:
            if action not in known:
                timeline.note(Note(step=self._job(incident.job).step, unix_s=unix_s, text=action))
        if not incident.is_open and timeline.left_steps is None:
            timeline.left_steps = AFTER_STEPS
        self.changed[incident.incident_id] = None

    def on_stack(self, incident_id: int, stack: RankStack) -> None:
        """Keep a dump of a rank's stacks; a later one of the same rank takes its place."""
        timeline = self.incident_timelines.get(incident_id)
        if timeline is None:
            return
        others = [one for one in timeline.stacks if one.rank != stack.rank]
        timeline.stacks = [*others, stack][-MOST_STACKS:]
        self.changed[incident_id] = None

    def go_on(self, incidents: Iterable[Incident]) -> None:
        """Continue the stored timelines of incidents that are open at the start."""
        for incident in incidents:
            timeline = self.stored_incident_timeline(incident.incident_id)
            if timeline is not None:
                self.incident_timelines.setdefault(incident.incident_id, timeline)

    def decided(self, job: str, decision: Decision, unix_s: float) -> None:
        """Record a decision of the policy in the timelines of a job's open incidents."""
        note = PlanNote(
            step=self._job(job).step,
            unix_s=unix_s,
            level=decision.level,
            reason=decision.reason,
            generation=None if decision.layout is None else decision.layout.generation,
            current_step_s=decision.current_step_s,
            planned_step_s=decision.planned_step_s,
            fluid_step_s=decision.fluid_step_s,
            cost_s=decision.cost_s,
            moved_bytes=decision.moved_bytes,
            considered=decision.considered,
        )
        for timeline in self.incident_timelines.values():
            if timeline.job == job and timeline.left_steps is None:
                timeline.plan(note)
                self.changed[timeline.incident_id] = None

    def stored(self, incidents: Iterable[int], jobs: Iterable[str]) -> None:
        """Mark timelines as stored; finished ones are dropped from memory."""
        for incident_id in incidents:
            self.changed.pop(incident_id, None)
            timeline = self.incident_timelines[incident_id]
            if timeline.left_steps is not None and timeline.left_steps <= 0:
                del self.incident_timelines[incident_id]
        for job in jobs:
            self.changed_jobs.pop(job, None)

    def forget(self, jobs: Iterable[str]) -> None:
        """Forget all other jobs; their timelines are in the store."""
        known = set(jobs)
        for name in self._jobs.keys() - known:
            if name not in self.changed_jobs:
                del self._jobs[name]
        for incident_id, timeline in list(self.incident_timelines.items()):
            if timeline.job not in known and incident_id not in self.changed:
                del self.incident_timelines[incident_id]

    def _job(self, name: str) -> _Job:
        if name not in self._jobs:
            rows = list(self.stored_job_timeline(name))
            self._jobs[name] = _Job(rows=rows, step=rows[-1].step if rows else 0)
        return self._jobs[name]

    def _begun(self, incident: Incident) -> IncidentTimeline:
        rank = incident.finding.rank
        rows = [_row(step, rank) for step in self._job(incident.job).recent]
        return IncidentTimeline(
            incident_id=incident.incident_id, job=incident.job, rank=rank, rows=rows
        )


def _kept(summary: StepSummary, unix_s: float, known_at: Mapping[int, int]) -> _Step:
    at = known_at
    if tuple(at) != summary.ranks:
        at = {rank: i for i, rank in enumerate(summary.ranks)}
    unknown = (nan,) * len(summary.ranks)
    return _Step(
        step=summary.step,
        unix_s=unix_s,
        generation=summary.generation,
        step_s=summary.duration_s,
        at=at,
        observed_s=np.array(summary.observed_s or unknown, dtype=np.float32),
        expected_s=np.array(summary.expected_s or unknown, dtype=np.float32),
    )


def _row(step: _Step, rank: int | None) -> IncidentRow:
    """A step as a row: of one rank and its peers, or of all ranks."""
    i = None if rank is None else step.at.get(rank)
    ratio = step.observed_s / step.expected_s
    others = ratio if i is None else np.delete(ratio, i)
    if rank is None:
        observed_s, expected_s = _median(step.observed_s), _median(step.expected_s)
    else:
        observed_s = nan if i is None else float(step.observed_s[i])
        expected_s = nan if i is None else float(step.expected_s[i])
    return IncidentRow(
        step=step.step,
        unix_s=step.unix_s,
        num_steps=1,
        generation=step.generation,
        step_s=step.step_s,
        observed_s=observed_s,
        expected_s=expected_s,
        peers_slowdown=_median(others),
    )


def _median(values: NDArray[np.float32]) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else nan


def _append(rows: list[R], row: R, *, most: int, raw: int) -> None:
    """Append a row; beyond `most` rows the two shortest neighbours after `raw` are merged."""
    rows.append(row)
    if len(rows) <= most:
        return

    def length(i: int) -> tuple[bool, int]:
        one, next_one = rows[i], rows[i + 1]
        return one.generation != next_one.generation, one.num_steps + next_one.num_steps

    i = min(range(raw, most), key=length)
    rows[i : i + 2] = [_merged(rows[i], rows[i + 1])]


def _merged(one: R, other: R) -> R:
    """The mean of two rows, weighted by their steps."""
    count = one.num_steps + other.num_steps
    means: dict[str, Any] = {}
    for name in _MEANS[type(one)]:
        a, b = getattr(one, name), getattr(other, name)
        mean = (a * one.num_steps + b * other.num_steps) / count
        means[name] = b if isnan(a) else a if isnan(b) else mean
    return replace(one, num_steps=count, generation=other.generation, **means)
