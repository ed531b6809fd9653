"""Finds the slow ranks of a recorded run: since when, by how much, with the reason.

The strongest shift is reported and subtracted from the record, then the rest is searched again,
because a slow rank distorts the reference of its peers. Residuals exclude the effect of work; a
slowdown that all ranks share, a single outlier, or the level at which a rank settles in a new
layout is no fault. Each layout is judged separately; a shift extends into the next layout only if
it lasted to the end of the previous one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind
from pacekeeper.predictor.recorded.intermittent import with_intermittent
from pacekeeper.predictor.recorded.noise import Noise, noise_of
from pacekeeper.predictor.recorded.residuals import Residuals, TraceTimes, residuals_of, times_of
from pacekeeper.predictor.recorded.shift_scan import strongest_shifts
from pacekeeper.predictor.recorded.shift_test import Shift, base_of
from pacekeeper.predictor.recorded.trace import Chunk, Trace
from pacekeeper.predictor.stats.peers import MIN_PEERS
from pacekeeper.predictor.stats.robust import ratio_interval

FALSE_ALARMS = 0.01  # per trace, if nothing is wrong
MIN_SLOWDOWN = 1.01
CLEAR = 1.5  # times the evidence needed: enough to be confirmed where peers contradict
GOES_ON = 0.5  # of the slowdown: at least this much in the next layout, to count as the same one


# By layout (first and end step): all compute, then each kind of chunk; residuals with their noise.
_Views = Mapping[tuple[int, int], tuple[tuple[Residuals, Noise], ...]]


def rank_faults(trace: Trace) -> tuple[Anomaly, ...]:
    """Return the slow ranks of a trace, the largest slowdown first; () without compute times.

    A rank may be slow in one kind of pass only; the slowdown then refers to that kind, which the
    reason names.

    Raises:
        ValueError: the compute table has no usable time of a known rank.
    """
    if trace.compute is None:
        return ()
    times = times_of(trace)
    known = np.zeros((len(times.steps), len(times.rank_of)))
    lost = np.zeros((len(times.steps), len(times.ranks)))
    found: list[Shift] = []
    for _ in range(2 * len(times.ranks) * len(times.layouts)):
        kinds = residuals_of(times, known)
        views = {
            span: tuple(
                (own, noise_of(own, times.stage))
                for own in (kind.within(*span, times.stage) for kind in kinds)
            )
            for span in times.layouts
        }
        # A slower device is slow in the longest kind of pass: the other kinds are not judged.
        num_judged = len(kinds[:2])
        shifts = [
            replace(shift, first=shift.first + begin, end=shift.end + begin)
            for (begin, _), of_layout in views.items()
            for residuals, noise in of_layout[:num_judged]
            for shift in strongest_shifts(
                residuals,
                noise,
                false_alarms=FALSE_ALARMS / (num_judged * len(views)),
                min_slowdown=MIN_SLOWDOWN,
            )
        ]
        if not shifts:
            break
        taken = list[Shift]()
        for shift in sorted(_strongest_per_pipeline(times, shifts), key=lambda one: one.first):
            if not any(part.rank == shift.rank and shift.first < part.end for part in taken):
                taken += _subtract(times, views, shift, known, lost)
        found += taken
    merged = _merged(times, found)
    for (begin, end), ((residuals, noise), *_) in views.items():
        merged = with_intermittent(
            merged,
            residuals,
            noise,
            lost=lost[begin:end],
            steps=times.steps[begin:end],
            begin=begin,
            false_alarms=FALSE_ALARMS / len(views),
        )
    anomalies = [_anomaly(trace, times, shift, merged) for shift in merged]
    return tuple(sorted(anomalies, key=lambda anomaly: -anomaly.slowdown))


def _strongest_per_pipeline(times: TraceTimes, shifts: Sequence[Shift]) -> list[Shift]:
    """Keep the strongest shift of each data-parallel rank in a layout.

    The stages of a data-parallel rank serve each other as reference, so one shift can cause others.
    Shifts from the beginning of a layout take precedence: when a rank that was slow from the start
    recovers, the ranks compared with it seem to slow down. A shift of all compute takes precedence
    over one of a single kind, because it measures the rank's whole loss.
    """
    starts = {begin for begin, _ in times.layouts}
    whole = {shift.rank for shift in shifts if shift.chunk is None}
    kept = [shift for shift in shifts if shift.chunk is None or shift.rank not in whole]
    best: dict[tuple[int, int], Shift] = {}
    for shift in sorted(kept, key=lambda one: (one.first in starts, one.strength)):
        begin = max(start for start in starts if start <= shift.first)
        best[int(times.dp[shift.rank]), begin] = shift
    return list(best.values())


def _subtract(
    times: TraceTimes, views: _Views, shift: Shift, known: Array, lost: Array
) -> list[Shift]:
    """Subtract a shift and its continuations in later layouts, and return them.

    Adds the measured loss of each step to `known` [steps, columns]: what remained of an uneven
    fault would accuse the ranks compared with it. `lost` [steps, ranks] takes that of all compute.
    """
    parts = [shift, *_continuations(times, views, shift)]
    for part in parts:
        begin, end = next(one for one in times.layouts if one[0] <= part.first < one[1])
        there = replace(part, first=part.first - begin, end=part.end - begin)
        for residuals, noise in views[begin, end][1:] or views[begin, end]:
            base = base_of(residuals, noise, there)
            own = residuals.columns[times.rank_of[residuals.columns] == part.rank]
            by_step = residuals.by_step[there.first : there.end, part.rank]
            known[part.first : part.end, own] += np.nan_to_num(by_step - base)[:, None]
        residuals, noise = views[begin, end][0]
        by_step = residuals.by_step[there.first : there.end, part.rank]
        lost[part.first : part.end, part.rank] += np.nan_to_num(
            by_step - base_of(residuals, noise, there)
        )
    return parts


def _continuations(times: TraceTimes, views: _Views, shift: Shift) -> list[Shift]:
    """Return the continuations of a shift at the start of later layouts, until the first gap."""
    parts = list[Shift]()
    ends = [end for _, end in times.layouts]
    for begin, end in times.layouts:
        last = parts[-1] if parts else shift
        if begin <= last.first or last.end not in ends or begin != last.end + 1:
            continue
        residuals, noise = next(v for v in views[begin, end] if v[0].chunk == shift.chunk)
        whole = replace(last, first=0, end=end - begin)
        above = residuals.by_step[:, shift.rank] - base_of(residuals, noise, whole)
        half = GOES_ON * last.log_slowdown
        votes = np.cumsum(np.nan_to_num(np.clip(above - half, -half, half)))
        length = int(votes.argmax()) + 1
        level = float(np.nanmedian(above[:length])) if np.isfinite(above[:length]).any() else 0.0
        if votes[length - 1] > 0.0 and level > half:
            parts.append(replace(last, first=begin, end=begin + length, log_slowdown=level))
    return parts


def _merged(times: TraceTimes, found: Sequence[Shift]) -> list[Shift]:
    """Merge adjacent shifts of one rank, also beside a mixed step between two layouts."""
    starts = {begin for begin, _ in times.layouts}
    merged: list[Shift] = []
    for shift in sorted(found, key=lambda shift: (shift.rank, shift.first)):
        last = merged[-1] if merged else None
        gap = int(shift.first in starts)
        if last is None or last.rank != shift.rank or shift.first > last.end + gap:
            merged.append(shift)
            continue
        last = replace(last, end=max(last.end, shift.first))
        end = max(last.end, shift.end)
        # Where both apply, they add up.
        lost = sum(one.log_slowdown * (one.end - one.first) for one in (last, shift))
        merged[-1] = replace(
            max(last, shift, key=lambda one: one.strength),
            first=last.first,
            end=end,
            log_slowdown=lost / (end - last.first),
            num_before=last.num_before,
        )
    return merged


def _anomaly(trace: Trace, times: TraceTimes, shift: Shift, all_found: Sequence[Shift]) -> Anomaly:
    rank, stage = times.ranks[shift.rank], int(times.stage[shift.rank])
    value, low, high = ratio_interval(shift.log_slowdown, shift.error)
    slow = {one.rank for one in all_found if one.first < shift.end and shift.first < one.end}
    witnesses = int((np.delete(times.stage, list(slow)) == stage).sum())
    chunk = ""
    if shift.chunk is not None:
        chunk = f"its {Chunk(shift.chunk).name.lower().replace('_', ' ')} passes "
    others = f"{witnesses} peers of stage {stage} did not" if witnesses else "it has no peer"
    evident = f"{shift.strength:.1f} x the evidence needed"
    if shift.now_and_then is not None:
        chunk, spells = "in the mean ", shift.now_and_then
        evident = (
            f"slow by x{spells.when_slow:.2f} in {spells.num_slow} of {spells.num_steps} "
            f"recorded steps; {spells.pattern}"
        )
    return Anomaly(
        kind=AnomalyKind.COMPUTE,
        rank=rank,
        stage=stage,
        slowdown=value,
        low=low,
        high=high,
        first_step=int(times.steps[shift.first]),
        last_step=None if shift.end == len(times.steps) else int(times.steps[shift.end - 1]),
        tier=_tier(shift, witnesses),
        reason=(
            f"rank {rank} (stage {stage}, data-parallel {int(times.dp[shift.rank])}) computed "
            f"{chunk}for x{value:.3f} of the time that its work explains "
            f"(95 %: {low:.3f} to {high:.3f}), {_describe_period(times, shift)}; "
            f"{_describe_group(trace, times, shift)}{others}; {evident}"
        ),
    )


def _describe_period(times: TraceTimes, shift: Shift) -> str:
    first, last = int(times.steps[shift.first]), int(times.steps[shift.end - 1])
    if shift.first == 0:
        since = f"from the first recorded step, {first}"
    elif shift.num_before:
        since = f"since step {first}, after {shift.num_before} steps at its healthy pace"
    elif shift.first in {begin for begin, _ in times.layouts}:
        since = f"since step {first}, where a layout begins"
    else:
        since = f"since step {first}, the first that it told"
    if shift.end == len(times.steps):
        return f"{since}, to the end of the record, {last}"
    return f"{since}, to step {last}, and recovered"


def _describe_group(trace: Trace, times: TraceTimes, shift: Shift) -> str:
    """Name the ranks that slowed down together with this one, and the node if they share it."""
    if not shift.company:
        return ""
    others = [times.ranks[at] for at in shift.company if at != shift.rank]
    text = f"together with rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    group = {times.ranks[at] for at in shift.company}
    nodes = {worker.node for worker in trace.workers if worker.rank in group}
    if len(nodes) == 1 and "" not in nodes:
        text += f", all on node {nodes.pop()}"
    return text + "; "


def _tier(shift: Shift, witnesses: int) -> Tier:
    """CONFIRMED: enough peers contradict it clearly; SUSPECTED: too few, and no past of its own."""
    if witnesses >= MIN_PEERS:
        return Tier.CONFIRMED if shift.strength >= CLEAR else Tier.PROBABLE
    return Tier.PROBABLE if shift.num_before else Tier.SUSPECTED
