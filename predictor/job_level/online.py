"""Detects slowdowns of a running job whose ranks report no compute times. Pure.

The newest steps are judged again every LOOK_STEPS steps by the rules of recorded runs (detect.py);
no rank is named. Slowdowns that last are found only where work is reported; without it, slowdowns
that have ended. While a finding is open, the steps before it remain its reference. Steps just after
an evaluation or a checkpoint are not judged: the pause between two steps shows it.

A level must be as far from health as noise alone brings about in the remembered steps as often as
false alarms per job-day are asked for. FLOOR bounds what wanders more slowly than a window shows:
where it is the higher of the two, fewer alarms are raised than asked for.
"""

from dataclasses import dataclass, field, replace
from math import exp, log, sqrt

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind
from pacekeeper.predictor.assurance.sensitivity import MARGIN, Sensitivity
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.job_level.blocks import BLOCK_STEPS, Knowledge
from pacekeeper.predictor.job_level.detect import (
    FLOOR,
    MIN_STEPS,
    Basis,
    judged,
    measured,
    min_sigmas,
)
from pacekeeper.predictor.job_level.transient_rises import ALIKE
from pacekeeper.predictor.offline.anomalies import Anomaly
from pacekeeper.predictor.offline.trace import StepTable, Trace
from pacekeeper.predictor.online.global_slowdown import NO_NEWS, GlobalSlowdownChange
from pacekeeper.predictor.stats.cusum_design import DAY_S

LOOK_STEPS = BLOCK_STEPS
LEAST_STEPS = 2 * MIN_STEPS  # before anything is judged
WINDOW_STEPS = 1024
MEASURE_STEPS = 512  # of them at most, from before an open finding
PER_MEASURE = 3  # steps since then, for each of those: the fastest fifth must be of health
QUIET_LOOKS = 3  # without it, until a finding is over
SIGHT_STEPS = 100  # for which the smallest visible slowdown is stated
LEAST_PAUSE = 1.0  # of a step's duration, between two steps: an evaluation or a checkpoint
UNSETTLED_STEPS = 12  # after a pause: caches and input pipelines fill again
LEAST_BETWEEN_PAUSES = 4 * UNSETTLED_STEPS  # more frequent ones are part of the job's usual pace
MOST_CHANCE = 0.5  # of a false alarm in the remembered steps
_STEP, _DURATION, _TOKENS, _SQUARES = range(4)
DEFAULT = DetectorConfig()


def _no_steps() -> Array:
    return np.zeros((0, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStep:
    """A step of the whole job; tokens and sum_len_squared of the global batch, 0: not reported.

    `ended_s`: its end by the clock of one rank, the same for all steps; 0: not reported.
    """

    step: int
    generation: int
    duration_s: float
    tokens: int
    sum_len_squared: int
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobLevelState:
    """The remembered steps of a job: rows of (step, seconds, tokens, tokens^2), ascending.

    `measure`: from before the open finding, `recent`: since. `slowdown` of the finding, 1.0 if
    there is none. `told_step`: up to there all has been told. `knowledge` that the newest look
    rested on, with its `note` and its `sight`; None before the first. `ended_s`: end of the newest
    step; `since_pause`: steps since a pause; `is_unsettled`: they are not judged yet.
    """

    generation: int = 0
    measure: Array = field(default_factory=_no_steps)
    recent: Array = field(default_factory=_no_steps)
    slowdown: float = 1.0
    quiet_looks: int = 0
    told_step: int = -1
    steps_since_look: int = 0
    knowledge: Knowledge | None = None
    note: str = ""
    sensitivity: Sensitivity | None = None
    ended_s: float = 0.0
    since_pause: int = 0
    is_unsettled: bool = False

    @property
    def is_open(self) -> bool:
        return self.slowdown > 1.0

    @property
    def num_steps(self) -> int:
        return len(self.measure) + len(self.recent)


def update_job_level(
    pace: JobLevelState, told: JobStep, config: DetectorConfig = DEFAULT
) -> tuple[JobLevelState, GlobalSlowdownChange]:
    """Take in one step that all ranks have ended. Another layout is measured anew."""
    if told.generation != pace.generation:
        pace = JobLevelState(
            generation=told.generation, slowdown=pace.slowdown, told_step=pace.told_step
        )
    pace = _after_pause(pace, told)
    if pace.is_unsettled:
        return pace, NO_NEWS
    row = np.array([[told.step, told.duration_s, told.tokens, told.sum_len_squared]])
    before = pace.recent[pace.recent[:, _STEP] < told.step]  # a step done again counts once
    measure = pace.measure[pace.measure[:, _STEP] < told.step]
    pace = replace(
        pace,
        measure=measure,
        recent=np.concatenate([before, row])[-_room(pace, measure) :],
        steps_since_look=pace.steps_since_look + 1,
        told_step=min(pace.told_step, told.step - 1),
    )
    if pace.is_open and not len(pace.measure):
        # A restart, or another layout: what is healthy is not known any more.
        pace = replace(pace, slowdown=1.0)
        return pace, GlobalSlowdownChange(is_over=True, why="its pace is measured anew")
    if pace.num_steps < LEAST_STEPS or pace.steps_since_look < LOOK_STEPS:
        return pace, NO_NEWS
    return _looked(replace(pace, steps_since_look=0), config.false_alarms_per_job_day)


def _after_pause(pace: JobLevelState, told: JobStep) -> JobLevelState:
    """Count the steps since the last pause between two steps, such as an evaluation."""
    pause_s = told.ended_s - told.duration_s - pace.ended_s
    since = pace.since_pause + 1
    is_unsettled = pace.is_unsettled and since < UNSETTLED_STEPS
    if pace.ended_s > 0.0 and pause_s >= LEAST_PAUSE * told.duration_s:
        is_unsettled, since = since >= LEAST_BETWEEN_PAUSES, 0
    return replace(pace, ended_s=told.ended_s, since_pause=since, is_unsettled=is_unsettled)


def _room(pace: JobLevelState, measure: Array) -> int:
    if not pace.is_open:
        return WINDOW_STEPS
    return max(LEAST_STEPS, min(WINDOW_STEPS - len(measure), PER_MEASURE * len(measure)))


def _looked(
    pace: JobLevelState, false_alarms_per_job_day: float
) -> tuple[JobLevelState, GlobalSlowdownChange]:
    """Judge the remembered steps; return what has changed."""
    rows = np.concatenate([pace.measure, pace.recent])
    basis = measured(_trace_of(rows))
    if basis is None:
        return pace, NO_NEWS  # some took no time at all
    days = float(rows[:, _DURATION].sum()) / DAY_S
    chance = min(MOST_CHANCE, false_alarms_per_job_day * days)
    verdict = judged(basis, chance)
    knows = basis.known_by is not Knowledge.NOTHING
    pace = replace(
        pace,
        knowledge=basis.known_by,
        note="; ".join(verdict.notes),
        sensitivity=_sensitivity(basis, chance) if knows else None,
    )
    newest = int(pace.recent[-1, _STEP])
    lasting = next((t for t in verdict.anomalies if t.last_step is None), None)
    if pace.is_open:
        return _looked_again(pace, lasting, newest)
    if lasting is not None:
        return _opened(pace, lasting, newest)
    fresh = [t for t in verdict.anomalies if t.first_step > pace.told_step]
    if not fresh:
        return pace, NO_NEWS
    worst = max(fresh, key=lambda t: t.slowdown)
    told_step = max(t.last_step or newest for t in fresh)
    pace = replace(pace, told_step=told_step)
    return pace, GlobalSlowdownChange(found=_finding(worst, newest), is_over=True)


def _opened(
    pace: JobLevelState, anomaly: Anomaly, newest: int
) -> tuple[JobLevelState, GlobalSlowdownChange]:
    is_before = pace.recent[:, _STEP] < anomaly.first_step
    if is_before.sum() < MIN_STEPS:
        return pace, NO_NEWS  # hardly any health was seen before it
    pace = replace(
        pace,
        measure=pace.recent[is_before][-MEASURE_STEPS:],
        recent=pace.recent[~is_before],
        slowdown=anomaly.slowdown,
        quiet_looks=0,
    )
    return pace, GlobalSlowdownChange(found=_finding(anomaly, newest))


def _looked_again(
    pace: JobLevelState, anomaly: Anomaly | None, newest: int
) -> tuple[JobLevelState, GlobalSlowdownChange]:
    """The open finding: is it over, is it another one now?"""
    if anomaly is None:
        if pace.quiet_looks + 1 < QUIET_LOOKS:
            return replace(pace, quiet_looks=pace.quiet_looks + 1), NO_NEWS
        rows = np.concatenate([pace.measure, pace.recent])[-WINDOW_STEPS:]
        pace = replace(
            pace, measure=_no_steps(), recent=rows, slowdown=1.0, quiet_looks=0, told_step=newest
        )
        return pace, GlobalSlowdownChange(is_over=True)
    pace = replace(pace, quiet_looks=0)
    before, now = log(pace.slowdown), log(anomaly.slowdown)
    is_surely_other = not anomaly.low <= pace.slowdown <= anomaly.high
    if not is_surely_other or abs(now - before) <= ALIKE * max(before, FLOOR):
        return pace, NO_NEWS
    return replace(pace, slowdown=anomaly.slowdown), GlobalSlowdownChange(changed=anomaly.slowdown)


def _sensitivity(basis: Basis, chance: float) -> Sensitivity:
    """The smallest slowdown that is surely found, by the rule of a finding and a noise margin."""
    num_blocks = max(1, SIGHT_STEPS // basis.block_steps)
    sigmas = min_sigmas(basis.blocks.excess.size, chance) + MARGIN
    least = max(FLOOR, sigmas * basis.blocks.sigma / sqrt(num_blocks))
    return Sensitivity(slowdown=exp(least), steps=SIGHT_STEPS + LOOK_STEPS)


def _finding(anomaly: Anomaly, newest: int) -> Finding:
    return Finding(
        kind=FindingKind.HOST,
        tier=anomaly.tier,
        rank=None,
        slowdown=anomaly.slowdown,
        onset_step=anomaly.first_step,
        step=newest,
        reason=anomaly.reason,
    )


def _trace_of(rows: Array) -> Trace:
    def told(column: int) -> Array:
        return np.where(rows[:, column] > 0.0, rows[:, column], np.nan)

    steps = StepTable(
        step=rows[:, _STEP].astype(np.intp),
        duration_s=rows[:, _DURATION],
        tokens=told(_TOKENS),
        sum_len_squared=told(_SQUARES),
    )
    return Trace(name="", source="live", workers=(), steps=steps)
