"""Which ranks of a recorded run computed slowly, since when, by how much, and why we say so. Pure.

The strongest shift is named, taken out of the record, and the rest is looked at again: a slow rank
must not make those look odd that are compared with it. Work accuses nobody, nor does a slowdown
that all ranks share, nor a single wild sample, nor the level at which a rank settles in a new
layout: each layout is judged by itself, and only who was slow at the end of one goes on being so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp

import numpy as np

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.offline.anomalies import Anomaly, AnomalyKind
from pacekeeper.predictor.offline.noise import Noise, noise_of
from pacekeeper.predictor.offline.residuals import Residuals, TraceTimes, residuals_of, times_of
from pacekeeper.predictor.offline.shift_scan import strongest_shifts
from pacekeeper.predictor.offline.shift_test import Shift, base_of
from pacekeeper.predictor.offline.trace import Chunk, Trace
from pacekeeper.predictor.stats.peers import MIN_PEERS

FALSE_ALARMS = 0.01  # per trace, if nothing is wrong
MIN_SLOWDOWN = 1.01
TWO_SIDED = 1.96  # sigmas of a 95 % interval
CLEAR = 1.5  # times the evidence needed: enough to be confirmed where peers contradict
GOES_ON = 0.5  # of a slowdown in the next layout: it did not end with the last one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """One kind of residuals of one layout, and how they vary."""

    residuals: Residuals
    noise: Noise


_Views = Mapping[tuple[int, int], tuple[_View, ...]]  # of each layout: all computing, each kind


def rank_faults(
    trace: Trace, *, false_alarms: float = FALSE_ALARMS, min_slowdown: float = MIN_SLOWDOWN
) -> tuple[Anomaly, ...]:
    """The slow ranks of a trace, those that lost most first; () where it tells no compute times.

    A rank may be found by one kind of pass alone; the slowdown is then of that, as the reason says.

    false_alarms: expected number of wrong findings per trace if nothing is wrong. Raises ValueError
    where the compute table holds no usable time of a known rank.
    """
    if not 0.0 < false_alarms < 1.0:
        raise ValueError(f"false_alarms must be between 0 and 1, not {false_alarms}")
    if min_slowdown < 1.0:
        raise ValueError(f"min_slowdown must be at least 1, not {min_slowdown}")
    if trace.compute is None:
        return ()
    times = times_of(trace)
    known = np.zeros((len(times.steps), len(times.rank_of)))
    found: list[Shift] = []
    for _ in range(2 * len(times.ranks) * len(times.layouts)):
        kinds = residuals_of(times, known)
        views = {span: tuple(_view(times, kind, *span) for kind in kinds) for span in times.layouts}
        # A slower device is slow in the kind that takes longest; it alone says enough.
        num_judged = len(kinds[:2])
        shifts = [
            replace(shift, first=shift.first + begin, end=shift.end + begin)
            for (begin, _), of_layout in views.items()
            for view in of_layout[:num_judged]
            for shift in strongest_shifts(
                view.residuals,
                view.noise,
                false_alarms=false_alarms / (num_judged * len(views)),
                min_slowdown=min_slowdown,
            )
        ]
        if not shifts:
            break
        taken = list[Shift]()
        for shift in sorted(_independent(times, shifts), key=lambda one: one.first):
            if not any(part.rank == shift.rank and shift.first < part.end for part in taken):
                taken += _taken_out(times, views, shift, known)
        found += taken
    merged = _merged(times, found)
    anomalies = [_anomaly(trace, times, shift, merged) for shift in merged]
    return tuple(sorted(anomalies, key=lambda anomaly: -anomaly.slowdown))


def _view(times: TraceTimes, kind: Residuals, begin: int, end: int) -> _View:
    residuals = kind.within(begin, end, times.stage)
    return _View(residuals=residuals, noise=noise_of(residuals, times.stage))


def _independent(times: TraceTimes, shifts: Sequence[Shift]) -> list[Shift]:
    """The strongest of each data-parallel rank in a layout: its stages are compared with one
    another.

    A rank that was slow from the start and recovered makes its mirror image look slowed: it goes
    first. All computing of a rank goes before one kind of it: it says what the rank loses.
    """
    starts = {begin for begin, _ in times.layouts}
    whole = {shift.rank for shift in shifts if shift.chunk is None}
    kept = [shift for shift in shifts if shift.chunk is None or shift.rank not in whole]
    best: dict[tuple[int, int], Shift] = {}
    for shift in sorted(kept, key=lambda one: (one.first in starts, one.strength)):
        begin = max(start for start in starts if start <= shift.first)
        best[int(times.dp[shift.rank]), begin] = shift
    return list(best.values())


def _taken_out(times: TraceTimes, views: _Views, shift: Shift, known: Array) -> list[Shift]:
    """The shift and how it goes on in later layouts.

    `known` [steps, columns] grows by all that they lost, step by step: what is left of an uneven
    fault would accuse its partners.
    """
    parts = [shift, *_going_on(times, views, shift)]
    for part in parts:
        begin, end = next(one for one in times.layouts if one[0] <= part.first < one[1])
        there = replace(part, first=part.first - begin, end=part.end - begin)
        for view in views[begin, end][1:] or views[begin, end]:
            base = base_of(view.residuals, view.noise, there)
            columns = view.residuals.columns
            own = columns[times.rank_of[columns] == part.rank]
            by_step = view.residuals.by_step[there.first : there.end, part.rank]
            known[part.first : part.end, own] += np.nan_to_num(by_step - base)[:, None]
    return parts


def _going_on(times: TraceTimes, views: _Views, shift: Shift) -> list[Shift]:
    """The same slowdown at the beginning of later layouts, as long as it lasts without a break."""
    parts = list[Shift]()
    ends = [end for _, end in times.layouts]
    for begin, end in times.layouts:
        last = parts[-1] if parts else shift
        if begin <= last.first or last.end not in ends or begin != last.end + 1:
            continue
        view = next(v for v in views[begin, end] if v.residuals.chunk == shift.chunk)
        whole = replace(last, first=0, end=end - begin)
        above = view.residuals.by_step[:, shift.rank] - base_of(view.residuals, view.noise, whole)
        half = GOES_ON * last.log_slowdown
        votes = np.cumsum(np.nan_to_num(np.clip(above - half, -half, half)))
        length = int(votes.argmax()) + 1
        level = float(np.nanmedian(above[:length])) if np.isfinite(above[:length]).any() else 0.0
        if votes[length - 1] > 0.0 and level > half:
            parts.append(replace(last, first=begin, end=begin + length, log_slowdown=level))
    return parts


def _merged(times: TraceTimes, found: Sequence[Shift]) -> list[Shift]:
    """Stretches of one rank that touch are one finding, at their mean level; the mixed step
    between two layouts parts nothing.
    """
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
        strongest = max(last, shift, key=lambda one: one.strength)
        merged[-1] = replace(
            strongest,
            first=last.first,
            end=end,
            log_slowdown=_mean_slowdown(last, shift, end),
            num_before=last.num_before,
        )
    return merged


def _mean_slowdown(one: Shift, other: Shift, end: int) -> float:
    """Over the steps from the first of `one` to `end`; where both hold, they add up."""
    steps = sum(shift.log_slowdown * (shift.end - shift.first) for shift in (one, other))
    return steps / (end - one.first)


def _anomaly(trace: Trace, times: TraceTimes, shift: Shift, all_found: Sequence[Shift]) -> Anomaly:
    rank, stage = times.ranks[shift.rank], int(times.stage[shift.rank])
    low, value, high = (
        exp(shift.log_slowdown + sigmas * shift.error) for sigmas in (-TWO_SIDED, 0.0, TWO_SIDED)
    )
    slow = {
        other.rank for other in all_found if other.first < shift.end and shift.first < other.end
    }
    witnesses = int((times.stage == stage).sum()) - sum(times.stage[i] == stage for i in slow)
    first, last = int(times.steps[shift.first]), int(times.steps[shift.end - 1])
    lasts = shift.end == len(times.steps)
    beside = f"{witnesses} peers of stage {stage} did not" if witnesses else "it has no peer"
    return Anomaly(
        kind=AnomalyKind.COMPUTE,
        rank=rank,
        stage=stage,
        slowdown=value,
        low=low,
        high=high,
        first_step=first,
        last_step=None if lasts else last,
        tier=_tier(shift, witnesses),
        reason=(
            f"rank {rank} (stage {stage}, data-parallel {int(times.dp[shift.rank])}) computed "
            f"{_part(shift)}for x{value:.3f} of the time that its work explains "
            f"(95 %: {low:.3f} to {high:.3f}), {_when(times, shift)}; "
            f"{_company(trace, times, shift)}{beside}; {shift.strength:.1f} x the evidence needed"
        ),
    )


def _when(times: TraceTimes, shift: Shift) -> str:
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


def _company(trace: Trace, times: TraceTimes, shift: Shift) -> str:
    """Who slowed together with the rank, and what they have in common."""
    if not shift.company:
        return ""
    ranks = [times.ranks[at] for at in shift.company]
    others = [rank for rank in ranks if rank != times.ranks[shift.rank]]
    named = ", ".join(map(str, others))
    text = f"together with rank{'s' if len(others) > 1 else ''} {named}"
    nodes = {worker.node for worker in trace.workers if worker.rank in ranks}
    if len(nodes) == 1 and "" not in nodes:
        (node,) = nodes
        text += f", all on node {node}"
    return text + "; "


def _part(shift: Shift) -> str:
    if shift.chunk is None:
        return ""
    return f"its {Chunk(shift.chunk).name.lower().replace('_', ' ')} passes "


def _tier(shift: Shift, witnesses: int) -> Tier:
    """Confirmed: peers contradict it clearly. Suspected: no past of its own and too few peers."""
    if witnesses >= MIN_PEERS:
        return Tier.CONFIRMED if shift.strength >= CLEAR else Tier.PROBABLE
    return Tier.PROBABLE if shift.num_before else Tier.SUSPECTED
