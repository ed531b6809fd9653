"""Detects slowdowns of a running job whose ranks report no compute times. Pure.

Where work is reported, each block of steps beside what its work should take is a sample of charts
as ranks have them (`block_charts.py`), for a job that has no peers. Where it is not, the remembered
steps are judged by the rules of recorded runs (`detect.py`), which find what has ended again: what
lasts may be the schedule's. No rank is named. Steps just after an evaluation or a checkpoint are
not judged: the pause between two steps shows it.
"""

from dataclasses import dataclass, field, replace
from math import ceil, exp, sqrt

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.predictor.assurance.sensitivity import MARGIN, Sensitivity, crossing_level
from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.cusum import QUIET_SUSPICION, Charts
from pacekeeper.predictor.detector.global_slowdown import (
    DOUBTS,
    HELD_STEPS,
    NO_NEWS,
    NOBODY,
    GlobalSlowdownChange,
    followed,
)
from pacekeeper.predictor.detector.thresholds import Thresholds
from pacekeeper.predictor.job_level import step_time_model
from pacekeeper.predictor.job_level.block_charts import (
    HealthyPace,
    healthy_pace,
    limits_of,
    with_findings,
)
from pacekeeper.predictor.job_level.blocks import BLOCK_STEPS, Knowledge
from pacekeeper.predictor.job_level.detect import MIN_STEPS, judged, measured
from pacekeeper.predictor.recorded.trace import StepTable, Trace
from pacekeeper.predictor.stats.cusum_design import DAY_S, REFERENCES
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR, column_medians, ratio_interval

LOOK_STEPS = BLOCK_STEPS
LEAST_STEPS = 2 * MIN_STEPS  # before anything is judged
RECENT_STEPS = cusum.WINDOW_STEPS * BLOCK_STEPS  # newest ones, kept whatever they took
WINDOW_STEPS = 100 * BLOCK_STEPS  # kept in all; the older ones without suspicion
SIGHT_STEPS = 100  # for which the smallest visible slowdown is stated
LEAST_PAUSE = 1.0  # of a step's duration, between two steps: an evaluation or a checkpoint
UNSETTLED_STEPS = 12  # after a pause: caches and input pipelines fill again
LEAST_BETWEEN_PAUSES = 4 * UNSETTLED_STEPS  # more frequent ones are part of the job's usual pace
LASTING = 0.25  # of its blocks may be below half its size (less one sigma) if a slowdown lasts
MOST_CHANCE = 0.5  # of a false alarm in the remembered steps
_STEP, _DURATION, _TOKENS, _SQUARES, _IS_QUIET = range(5)
DEFAULT = DetectorConfig()


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
    """The remembered steps of a job: rows of (step, seconds, tokens, tokens^2, no suspicion).

    They ascend, in blocks of BLOCK_STEPS. `charts` have one column; `blocks_since_zero` [charts]:
    newest blocks, from each chart's last zero on. `slowdown` of the finding, 1.0 if there is none.
    `held_looks`: newest ones under suspicion. `told_step`: up to there all has been told.
    `knowledge` that the newest look rested on, with its `note` and its `sensitivity`; None before
    the first. `ended_s`: end of the newest step; `since_pause`: steps since a pause;
    `is_unsettled`: they are not judged yet.
    """

    generation: int = 0
    rows: Array = field(default_factory=lambda: np.zeros((0, 5)))
    charts: Charts = field(default_factory=lambda: cusum.with_ranks(cusum.no_charts(), NOBODY))
    blocks_since_zero: Positions = field(default_factory=lambda: np.zeros(len(REFERENCES), np.intp))
    slowdown: float = 1.0
    held_looks: int = 0
    told_step: int = -1
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
        return len(self.rows)


def update_job_level(
    pace: JobLevelState, told: JobStep, config: DetectorConfig = DEFAULT
) -> tuple[JobLevelState, GlobalSlowdownChange]:
    """Take in one step that all ranks have ended. Another layout is measured anew."""
    if told.generation != pace.generation:
        pace = JobLevelState(
            generation=told.generation, slowdown=pace.slowdown, told_step=pace.told_step
        )
    pace = _after_pause(pace, told)
    if pace.is_unsettled or told.duration_s <= 0.0:
        return pace, NO_NEWS
    before = pace.rows[pace.rows[:, _STEP] < told.step]
    if len(before) < len(pace.rows):  # steps done again count once
        before = before[: len(before) // BLOCK_STEPS * BLOCK_STEPS]
    row = np.array([[told.step, told.duration_s, told.tokens, told.sum_len_squared, 1.0]])
    is_lost = pace.is_open and not len(before)
    pace = replace(
        pace,
        rows=np.concatenate([before, row]),
        told_step=min(pace.told_step, told.step - 1),
    )
    if is_lost:  # a restart, or another layout: what is healthy is not known
        pace = replace(pace, slowdown=1.0)
        return pace, GlobalSlowdownChange(is_over=True, why="its pace is measured anew")
    if pace.num_steps < LEAST_STEPS or pace.num_steps % BLOCK_STEPS:
        return pace, NO_NEWS
    is_told = pace.rows[:, _TOKENS] > 0.0
    if is_told.mean() < step_time_model.KNOWN_SHARE:
        pace, news = _suspected(pace, config)
    else:
        pace, news = _charted(pace, config)
    older, recent = pace.rows[:-RECENT_STEPS], pace.rows[-RECENT_STEPS:]
    older = older[older[:, _IS_QUIET] > 0.0][-(WINDOW_STEPS - RECENT_STEPS) :]
    return replace(pace, rows=np.concatenate([older, recent])), news


def _after_pause(pace: JobLevelState, told: JobStep) -> JobLevelState:
    """Count the steps since the last pause between two steps, such as an evaluation."""
    pause_s = told.ended_s - told.duration_s - pace.ended_s
    since = pace.since_pause + 1
    is_unsettled = pace.is_unsettled and since < UNSETTLED_STEPS
    if pace.ended_s > 0.0 and pause_s >= LEAST_PAUSE * told.duration_s:
        is_unsettled, since = since >= LEAST_BETWEEN_PAUSES, 0
    return replace(pace, ended_s=told.ended_s, since_pause=since, is_unsettled=is_unsettled)


def _suspected(
    pace: JobLevelState, config: DetectorConfig
) -> tuple[JobLevelState, GlobalSlowdownChange]:
    """Find slowdowns that have ended again, where the work is not reported."""
    basis = measured(_trace_of(pace.rows))
    assert basis is not None, "LEAST_STEPS are enough"
    days = float(pace.rows[:, _DURATION].sum()) / DAY_S
    verdict = judged(basis, min(MOST_CHANCE, config.false_alarms_per_job_day * days))
    pace = replace(
        pace, knowledge=Knowledge.NOTHING, note="; ".join(verdict.notes), sensitivity=None
    )
    fresh = [found for found in verdict.anomalies if found.first_step > pace.told_step]
    if not fresh:
        return pace, NO_NEWS
    worst, newest = max(fresh, key=lambda found: found.slowdown), int(pace.rows[-1, _STEP])
    pace = replace(pace, told_step=max(found.last_step or newest for found in fresh))
    found = Finding(
        kind=FindingKind.HOST,
        tier=worst.tier,
        rank=None,
        slowdown=worst.slowdown,
        onset_step=worst.first_step,
        step=newest,
        reason=worst.reason,
    )
    return pace, GlobalSlowdownChange(found=found, is_over=True)


def _charted(
    pace: JobLevelState, config: DetectorConfig
) -> tuple[JobLevelState, GlobalSlowdownChange]:
    """Judge the newest block beside what the work of its steps should take."""
    ratio, variance, blocks, is_quiet = _beside_work(pace.rows)
    quiet = blocks[is_quiet & np.isfinite(blocks)]
    charts = pace.charts
    health = healthy_pace(quiet[:, None], charts.excursions)
    # What is known of steps like these, beyond what is of the usual ones.
    unlike = np.maximum(variance[-BLOCK_STEPS:].mean() * BLOCK_STEPS - 1.0 / len(quiet), 0.0)
    health = replace(health, doubt=health.doubt + DOUBTS * health.sigma * np.sqrt(unlike))
    sigma, doubt = float(health.sigma[0]), float(health.doubt[0])
    step_s = float(np.median(pace.rows[:, _DURATION]))
    limits = limits_of(config.false_alarms_per_job_day, step_s, charts.excursions)
    since_zero = pace.blocks_since_zero
    for block in blocks[-1:] if charts.recent_steps else blocks:  # the first time all of them
        since_zero = np.where(charts.levels[:, 0] == 0.0, 0, since_zero) + 1
        charts = cusum.advance(
            limits,
            charts,
            step=int(pace.rows[-1, _STEP]),
            log_ratio=block - health.log_ratio,
            doubt=health.doubt,
            sigma=health.sigma,
            is_open=np.array([pace.is_open]),
        )
    suspicion = float(cusum.suspicion(limits, charts)[0])
    level = crossing_level(limits, sigma, SIGHT_STEPS // BLOCK_STEPS, 1) + doubt
    level += MARGIN * MEDIAN_ERROR * sigma / sqrt(SIGHT_STEPS / BLOCK_STEPS)
    pace = replace(
        pace,
        charts=charts,
        blocks_since_zero=since_zero,
        held_looks=0 if suspicion <= QUIET_SUSPICION else pace.held_looks + 1,
        knowledge=Knowledge.WORK,
        note="",
        sensitivity=Sensitivity(slowdown=exp(level), steps=SIGHT_STEPS + LOOK_STEPS),
    )
    if pace.is_open:
        known = charts.recent[np.isfinite(charts.recent[:, 0]), 0]
        slowdown, news = followed(config, known, slowdown=pace.slowdown, sigma=sigma, doubt=doubt)
        rows = pace.rows
        if not news.is_over:
            rows = _suspected_from(rows, len(rows) - BLOCK_STEPS)
        return replace(pace, rows=rows, slowdown=slowdown), news
    if suspicion >= 1.0 and np.isfinite(blocks[-1]):
        return _opened(pace, limits, health, ratio - health.log_ratio[0])
    if 0 < pace.held_looks <= HELD_STEPS:
        pace = replace(pace, rows=_suspected_from(pace.rows, len(pace.rows) - BLOCK_STEPS))
    return pace, NO_NEWS


def _beside_work(rows: Array) -> tuple[Array, Array, Array, Flags]:
    """Log of observed / expected of each step and its variance in those of a healthy step; the
    middle of each block, and whether it is one without suspicion before the newest.
    """
    is_quiet = rows[:, _IS_QUIET] > 0.0
    if len(rows) > LEAST_STEPS:
        is_quiet[-BLOCK_STEPS:] = False
    is_told = rows[:, _TOKENS] > 0.0
    ratio, variance = np.full(len(rows), np.nan), np.zeros(len(rows))
    _, took_s, tokens, squares, _ = rows[is_told].T
    squares = np.where(squares > 0.0, squares, np.nan)
    expected_s, variance[is_told] = step_time_model.work_seconds(
        took_s, tokens, squares, is_quiet[is_told]
    )
    ratio[is_told] = np.log(took_s / expected_s)
    blocks = column_medians(ratio.reshape(-1, BLOCK_STEPS), axis=1)
    return ratio, variance, blocks, is_quiet[::BLOCK_STEPS]


def _suspected_from(rows: Array, first: int) -> Array:
    """The rows, of which nothing is learnt from the block of row `first` on."""
    rows = rows.copy()
    rows[first // BLOCK_STEPS * BLOCK_STEPS :, _IS_QUIET] = 0.0
    return rows


def _opened(
    pace: JobLevelState, limits: Thresholds, health: HealthyPace, excess: Array
) -> tuple[JobLevelState, GlobalSlowdownChange]:
    """Open a finding, or measure anew where hardly any health was seen before it.

    Of a slowdown that comes and goes since the chart was zero, the size is that of the slow blocks.

    excess: log slowdown of each remembered step over health.
    """
    charts, sigma = pace.charts, float(health.sigma[0])
    heights = charts.peaks[:, 0] / [rule.h for rule in limits.rules]
    at = int(heights.argmax())
    rule, peak = limits.rules[at], float(charts.peaks[at, 0])
    blocks = charts.recent[-pace.blocks_since_zero[at] :, 0]
    num_blocks, blocks = len(blocks), blocks[np.isfinite(blocks)]
    slow = blocks[blocks >= min(rule.k * sigma, blocks.max())]
    size = float(np.median(slow))
    level = size * len(slow) / len(blocks)
    near = min(len(excess), (num_blocks + 2) * BLOCK_STEPS)
    beyond = np.clip(np.nan_to_num(excess[-near:]) - level / 2.0, -size, size)
    first = len(excess) - 1 - int(np.cumsum(beyond[::-1]).argmax())
    rows, charts = pace.rows, with_findings(charts, np.array(NOBODY))
    is_health = (rows[:first, _IS_QUIET] > 0.0) & (rows[:first, _TOKENS] > 0.0)
    if is_health.sum() < MIN_STEPS:
        kept = rows[first // BLOCK_STEPS * BLOCK_STEPS :].copy()
        kept[:, _IS_QUIET] = 1.0
        return replace(pace, rows=kept, charts=charts), NO_NEWS
    num_steps = len(slow) * BLOCK_STEPS
    blocks = charts.recent[-ceil((len(rows) - first) / BLOCK_STEPS) :, 0]
    if np.nanquantile(blocks, LASTING) > size / 2.0 - sigma:
        steps = excess[first:][np.isfinite(excess[first:])]
        size, num_steps = max(float(np.median(steps)), rule.k * sigma), len(steps)
    error = MEDIAN_ERROR * sigma * sqrt(BLOCK_STEPS / num_steps)
    slowdown, low, high = ratio_interval(size, error)
    onset, newest = int(rows[first, _STEP]), int(rows[-1, _STEP])
    found = Finding(
        kind=FindingKind.HOST,
        tier=Tier.PROBABLE,
        rank=None,
        slowdown=slowdown,
        onset_step=onset,
        step=newest,
        reason=(
            f"the whole job took x{slowdown:.2f} (95 %: {low:.3f} to {high:.3f}) of its time from "
            f"step {onset} on ({num_steps} steps; expected from {Knowledge.WORK}; its chart of "
            f"{2.0 * rule.k:g} sigma reached {peak:.1f}, threshold {rule.h:.1f}); step times alone "
            "name no rank"
        ),
    )
    pace = replace(pace, rows=_suspected_from(rows, first), charts=charts, slowdown=slowdown)
    return pace, GlobalSlowdownChange(found=found)


def _trace_of(rows: Array) -> Trace:
    unknown = np.full(len(rows), np.nan)
    steps = StepTable(
        step=rows[:, _STEP].astype(np.intp),
        duration_s=rows[:, _DURATION],
        tokens=unknown,
        sum_len_squared=unknown,
    )
    return Trace(name="", source="live", workers=(), steps=steps)
