"""Finds persistent slowdowns of a whole job from its step times alone. Pure; names no rank.

The rule depends on what is known of the work. With replicates, work or schedule: time above what
the steps should take. With nothing: only a rise that goes away again, as a suspicion; a jump that
stays may be the schedule's and becomes a note.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from statistics import NormalDist

import numpy as np

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.cost.features import Positions
from pacekeeper.predictor.job_level import step_time_model
from pacekeeper.predictor.job_level.blocks import (
    Blocks,
    Knowledge,
    block_size,
    blocks_of,
    edge,
    paced_over,
)
from pacekeeper.predictor.job_level.step_time_model import StepTimes, UsableSteps
from pacekeeper.predictor.job_level.transient_rises import (
    STEADY_BLOCKS,
    Rise,
    by_size,
    mean,
    passing_rises,
)
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind, TraceReport
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.predictor.stats.change_points import Level, block_means, levels
from pacekeeper.predictor.stats.robust import column_medians, ratio_interval

MIN_STEPS = 30  # that a slowdown must last; shorter ones are hiccups
LEAST_HICCUPS = 3  # of one size, together so long, are a slowdown that recurs
MIN_SLOWDOWN = 1.03  # replicates of one recipe differ by as much between allotments of devices
CHANCE = 1.0 / 300.0  # of a healthy run to have an interval that noise alone makes as slow
SAME_PACE = 1.25  # of the run: what is further off is no replicate
HEALTHY_IN_BOTH = 0.2  # of the steps that two runs share, at least
SHIFT_REACH = 0.1  # of the recipe's steps: how far a run's schedule may be shifted
FLOOR = log(MIN_SLOWDOWN)
_QUANTILES = (HEALTHY_IN_BOTH, 0.5, 1.0 - HEALTHY_IN_BOTH)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Basis:
    """The input of a judgement: the pace in blocks of `block_steps`, and how the work is known."""

    known_by: Knowledge
    pace: StepTimes
    block_steps: int
    blocks: Blocks
    notes: tuple[str, ...]


def measured(
    trace: Trace, *, replicates: Sequence[Trace] = (), schedule: Positions | None = None
) -> Basis | None:
    """Return the pace of the job over the time its work should take; None: too few steps."""
    table = trace.steps
    if table is not None and schedule is not None and len(schedule) != table.step.size:
        raise ValueError(f"schedule: {len(schedule)} classes for {table.step.size} steps")
    run = step_time_model.usable_steps(trace)
    if run is None or table is None or run.step.size < 2 * MIN_STEPS:
        return None
    size = block_size(run, trace.resolution_s)
    others, notes = _comparable(run, replicates)
    if others:
        known_by = Knowledge.REPLICATES
        pace = step_time_model.from_replicates(run, others, trace.resolution_s, size)
        notes.extend(_from_the_start(run, others, size))
    elif (told := step_time_model.with_tokens(run)) is not None:
        known_by = Knowledge.WORK
        pace = step_time_model.from_work(told, trace.resolution_s)
        if told.step.size < run.step.size:
            notes.append(f"{run.step.size - told.step.size} steps tell no tokens: left out")
    elif schedule is not None:
        known_by = Knowledge.SCHEDULE
        classes = np.asarray(schedule)[run.rows]
        pace = step_time_model.from_schedule(run, classes, trace.resolution_s)
    else:
        known_by = Knowledge.NOTHING
        pace = step_time_model.unknown(run, trace.resolution_s)
    return Basis(
        known_by=known_by,
        pace=pace,
        block_steps=size,
        blocks=blocks_of(pace, size, known_by),
        notes=tuple(notes),
    )


def judge_job(
    trace: Trace, *, replicates: Sequence[Trace] = (), schedule: Positions | None = None
) -> TraceReport:
    """Slowdowns of the whole job (kind HOST, no rank), with notes on what could not be judged.

    `replicates`: other runs of the same recipe, aligned by step number. `schedule`: the work class
    of each row of trace.steps. Used is what says most: replicates, then known tokens, then the
    schedule. PROBABLE where one of them is there, else SUSPECTED. The pace of the fastest fifth of
    the run (of each class) counts as healthy: a job slow for longer is a note at most, as is one
    slow from its first step that nothing but itself tells the health of. Raises ValueError if
    `schedule` is not as long as the steps.
    """
    basis = measured(trace, replicates=replicates, schedule=schedule)
    if basis is None:
        return TraceReport(
            anomalies=(), what_if=None, notes=("too few step times to judge the job",)
        )
    return judged(basis)


def min_sigmas(num_blocks: int, chance: float = CHANCE) -> float:
    """Sigmas that a mean over some of a run's blocks must reach.

    The interval is chosen after the fact, among all n (n - 1) / 2 of the run (Bonferroni).

    Args:
        num_blocks: of the run.
        chance: that some interval of a healthy run reaches it, if noise is normal.
    """
    return NormalDist().inv_cdf(1.0 - chance / max(1.0, num_blocks * (num_blocks - 1) / 2.0))


def judged(basis: Basis, chance: float = CHANCE) -> TraceReport:
    """Judge a basis as `judge_job` does; `chance`: of a false finding in a healthy run."""
    pace, blocks, known_by = basis.pace, basis.blocks, basis.known_by
    notes = [*basis.notes]
    least = min_sigmas(blocks.excess.size, chance)
    found = levels(blocks.excess, sigma=blocks.sigma, penalty=least**2 / 2.0)
    if known_by is Knowledge.NOTHING:
        rises, jumps, periodic = passing_rises(found, floor=FLOOR)
        if len(periodic) > 1:
            notes.append(_period_note(pace, blocks, found, periodic))
        notes.extend(_jump_note(pace, blocks, found, at) for at in jumps)
    else:
        rises = _above(found)
    if known_by is Knowledge.REPLICATES:
        shifted = [rise for rise in rises if _is_shift(blocks, found, rise)]
        rises = [rise for rise in rises if rise not in shifted]
        notes.extend(_shift_note(pace, blocks, found, rise) for rise in shifted)
    elif rises:
        begin, end = _steps(pace, blocks, found, rises[0])
        if begin < MIN_STEPS:
            # Caches fill, compilers run, routing finds its balance: hardly any health was seen.
            settled = int(pace.step[end - 1])
            notes.append(f"slower from the start to step {settled}: it settled or was mended")
            rises = rises[1:]
    incidents = by_size(found, rises, FLOOR)
    anomalies = (_anomaly(pace, blocks, found, one, known_by, least) for one in incidents)
    return TraceReport(
        anomalies=tuple(t for t in anomalies if t is not None), what_if=None, notes=tuple(notes)
    )


def _comparable(
    run: UsableSteps, replicates: Sequence[Trace]
) -> tuple[list[UsableSteps], list[str]]:
    """The replicates that share most of the run's steps and about its pace; why others are not."""
    kept, short, paces = [], 0, list[float]()
    for other in map(step_time_model.usable_steps, replicates):
        if other is None:
            short += 1
            continue
        inside = (run.step >= other.step[0]) & (run.step <= other.step[-1])
        if inside.mean() < 0.5:
            short += 1
            continue
        beside = np.interp(run.step[inside], other.step, other.duration_s)
        low, pace, high = np.quantile(run.duration_s[inside] / beside, _QUANTILES)
        if low > SAME_PACE or high < 1.0 / SAME_PACE:
            paces.append(float(pace))
        else:
            kept.append(other)
    notes = [f"{short} replicates share too few steps: left out"] if short else []
    if paces:
        notes.append(
            f"{len(paces)} replicates have another pace (the run takes x{min(paces):.2f} to "
            f"x{max(paces):.2f} of their time), as with another number of devices: left out"
        )
    return kept, notes


def _from_the_start(run: UsableSteps, others: Sequence[UsableSteps], size: int) -> tuple[str, ...]:
    """A note where the run is slower than its replicates throughout, by more than they differ."""
    paces = [
        block_means(np.interp(run.step, of.step, of.duration_s, left=np.nan, right=np.nan), size)
        for of in (run, *others)
    ]
    middle = column_medians(np.stack(paces[1:]))
    ratios = [np.log(pace / middle) for pace in paces]
    own, *rest = (float(np.quantile(one[np.isfinite(one)], HEALTHY_IN_BOTH)) for one in ratios)
    typical = float(np.median(rest))
    widest = max(FLOOR, max(rest) - typical)
    if own - typical <= widest:
        return ()
    return (
        f"slow from the start: x{exp(own - typical):.2f} beside its replicates, which differ by "
        f"x{exp(widest):.2f} at most; other devices or another number of them look the same",
    )


def _above(found: Sequence[Level]) -> list[Rise]:
    """Runs of neighbouring levels that are each too slow."""
    rises: list[Rise] = []
    for i, level in enumerate(found):
        if level.mean < FLOOR:
            continue
        begin = rises.pop().begin if rises and rises[-1].end == i else i
        rises.append(Rise(begin=begin, end=i + 1))
    return rises


def _is_shift(blocks: Blocks, found: Sequence[Level], rise: Rise) -> bool:
    """Whether the run is only early or late in its schedule.

    It is where its replicates have the pace it has here nearby: in two blocks in a row, since one
    block across a jump has a pace that nobody keeps.
    """
    first, last = found[rise.begin].begin, found[rise.end - 1].end - 1
    begin, end = int(blocks.number[first]), int(blocks.number[last]) + 1
    inside = slice(first, last + 1)
    expected = np.log(blocks.expected_s[blocks.number[inside]])
    excess = float(np.median(blocks.excess[inside]))
    here = float(np.median(expected + blocks.excess[inside]))
    reach = ceil(SHIFT_REACH * blocks.expected_s.size)
    for near in (slice(end, end + reach), slice(max(begin - reach, 0), begin)):
        alike = np.abs(np.log(blocks.expected_s[near]) - here) <= max(FLOOR / 2.0, excess / 10.0)
        if (alike[1:] & alike[:-1]).any():
            return True
    return False


def _anomaly(
    pace: StepTimes,
    blocks: Blocks,
    found: Sequence[Level],
    rises: Sequence[Rise],
    known_by: Knowledge,
    least_sigmas: float,
) -> Anomaly | None:
    """Return the finding; None: it is too short, or too small for the noise."""
    spans = [_steps(pace, blocks, found, rise) for rise in rises]
    num_steps = sum(end - begin for begin, end in spans)
    longest = max(end - begin for begin, end in spans)
    if longest < MIN_STEPS and (num_steps < MIN_STEPS or len(rises) < LEAST_HICCUPS):
        return None
    excess = sum(
        (rise.size or paced_over(pace, blocks, *span) - rise.base) * (span[1] - span[0])
        for rise, span in zip(rises, spans, strict=True)
    )
    excess /= num_steps
    num_blocks = sum(found[rise.end - 1].end - found[rise.begin].begin for rise in rises)
    error = blocks.sigma / sqrt(num_blocks)
    if excess < max(FLOOR, least_sigmas * error):
        return None
    slowdown, low, high = ratio_interval(excess, error)
    first_step, last_step = int(pace.step[spans[0][0]]), int(pace.step[spans[-1][1] - 1])
    is_over = rises[-1].end < len(found)
    until = f"to {last_step}" if is_over else "on"
    times = f" again and again, {len(rises)} times" if len(rises) > 1 else ""
    if known_by is Knowledge.NOTHING:
        why = "went away again, as a schedule seldom does; but the workload is unknown"
    else:
        why = f"expected from {known_by}"
    return Anomaly(
        kind=AnomalyKind.HOST,
        rank=None,
        stage=None,
        slowdown=slowdown,
        low=low,
        high=high,
        first_step=first_step,
        last_step=last_step if is_over else None,
        tier=Tier.SUSPECTED if known_by is Knowledge.NOTHING else Tier.PROBABLE,
        reason=(
            f"the whole job took x{slowdown:.2f} of its time{times} from step {first_step} "
            f"{until} ({num_steps} steps; {why}); step times alone name no rank"
        ),
    )


def _steps(pace: StepTimes, blocks: Blocks, found: Sequence[Level], rise: Rise) -> tuple[int, int]:
    """Indices [begin, end) of the steps of a rise."""
    inside = found[rise.begin : rise.end]
    heights = [one.mean for one in inside if one.num_blocks >= STEADY_BLOCKS] or [mean(inside)]
    begin, end = 0, int(blocks.end[-1])
    if rise.begin:
        begin = edge(pace, blocks, inside[0].begin, before=rise.before, after=heights[0])
        begin = min(begin, end - 1)
    if rise.end < len(found):
        end = edge(pace, blocks, inside[-1].end, before=heights[-1], after=rise.after)
    return begin, max(end, begin + 1)


def _jump_note(pace: StepTimes, blocks: Blocks, found: Sequence[Level], at: int) -> str:
    before = [one for one in found[:at] if one.num_blocks >= STEADY_BLOCKS] or found[:at]
    size = exp(found[at].mean - before[-1].mean)
    step = int(pace.step[blocks.begin[found[at].begin]])
    return f"workload unknown: the pace changed by x{size:.2f} near step {step}; not judged"


def _period_note(
    pace: StepTimes, blocks: Blocks, found: Sequence[Level], rises: Sequence[Rise]
) -> str:
    onsets = [int(pace.step[blocks.begin[found[rise.begin].begin]]) for rise in rises]
    period = (onsets[-1] - onsets[0]) / (len(onsets) - 1)
    return (
        f"workload unknown: slower every {period:.0f} steps, {len(onsets)} times from step "
        f"{onsets[0]}: evaluations, checkpoints or the schedule; not judged"
    )


def _shift_note(pace: StepTimes, blocks: Blocks, found: Sequence[Level], rise: Rise) -> str:
    begin, end = _steps(pace, blocks, found, rise)
    return (
        f"steps {int(pace.step[begin])} to {int(pace.step[end - 1])} have a pace that the "
        "replicates have nearby: a shifted schedule, not judged"
    )
