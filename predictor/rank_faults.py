"""Which ranks of a recorded run computed slowly, since when, by how much, and why we say so. Pure.

The strongest shift is named, taken out of the record, and the rest is looked at again: a slow rank
must not make those look odd that are compared with it. Work accuses nobody, nor does a slowdown
that all ranks share, nor a single wild sample.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import exp

import numpy as np

from pacekeeper.core.findings import Tier
from pacekeeper.predictor.level_noise import noise_of
from pacekeeper.predictor.level_shifts import Shift, lost, strongest_shifts
from pacekeeper.predictor.peers import MIN_PEERS
from pacekeeper.predictor.trace import Chunk, Trace
from pacekeeper.predictor.trace_residuals import TraceTimes, residuals_of, times_of
from pacekeeper.predictor.verdict import Trouble, TroubleKind

FALSE_ALARMS = 0.01  # per trace, if nothing is wrong
MIN_SLOWDOWN = 1.01
TWO_SIDED = 1.96  # sigmas of a 95 % interval
CLEAR = 1.5  # times the evidence needed: enough to be confirmed where peers contradict


def rank_faults(
    trace: Trace, *, false_alarms: float = FALSE_ALARMS, min_slowdown: float = MIN_SLOWDOWN
) -> tuple[Trouble, ...]:
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
    for _ in range(2 * len(times.ranks)):
        views = [(view, noise_of(view, times.stage)) for view in residuals_of(times, known)]
        # A slower device is slow in the kind that takes longest; it alone says enough.
        judged = views[:2]
        shifts = [
            shift
            for residuals, noise in judged
            for shift in strongest_shifts(
                residuals,
                noise,
                false_alarms=false_alarms / len(judged),
                min_slowdown=min_slowdown,
            )
        ]
        if not shifts:
            break
        for shift in _independent(times, shifts):
            # All of it, step by step: what is left of an uneven fault would accuse its partners.
            for residuals, noise in views[1:] or views:
                own = residuals.columns[times.rank_of[residuals.columns] == shift.rank]
                known[shift.first : shift.end, own] += lost(residuals, noise, shift)[:, None]
            found.append(shift)
    merged = _merged(found)
    troubles = [_trouble(times, shift, merged) for shift in merged]
    return tuple(sorted(troubles, key=lambda trouble: -trouble.slowdown))


def _independent(times: TraceTimes, shifts: Sequence[Shift]) -> list[Shift]:
    """The strongest of each data-parallel rank: its stages are compared with one another.

    A rank that was slow from the start and recovered makes its mirror image look slowed: it goes
    first. All computing of a rank goes before one kind of it: it says what the rank loses.
    """
    whole = {shift.rank for shift in shifts if shift.chunk is None}
    kept = [shift for shift in shifts if shift.chunk is None or shift.rank not in whole]
    best: dict[int, Shift] = {}
    for shift in sorted(kept, key=lambda one: (one.first == 0, one.strength)):
        best[int(times.dp[shift.rank])] = shift
    return list(best.values())


def _merged(found: Sequence[Shift]) -> list[Shift]:
    """Stretches of one rank that touch are one finding, at their mean level."""
    merged: list[Shift] = []
    for shift in sorted(found, key=lambda shift: (shift.rank, shift.first)):
        last = merged[-1] if merged else None
        if last is None or last.rank != shift.rank or shift.first > last.end:
            merged.append(shift)
            continue
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


def _trouble(times: TraceTimes, shift: Shift, all_found: Sequence[Shift]) -> Trouble:
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
    if shift.first == 0:
        when = f"from the first recorded step, {first}, to "
    else:
        when = f"since step {first}, after {shift.num_before} steps at its healthy pace, to "
    when += f"the end of the record, {last}" if lasts else f"step {last}, and recovered"
    beside = f"{witnesses} peers of stage {stage} did not" if witnesses else "it has no peer"
    return Trouble(
        kind=TroubleKind.COMPUTE,
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
            f"(95 %: {low:.3f} to {high:.3f}), {when}; {beside}; "
            f"{shift.strength:.1f} x the evidence needed"
        ),
    )


def _part(shift: Shift) -> str:
    if shift.chunk is None:
        return ""
    return f"its {Chunk(shift.chunk).name.lower().replace('_', ' ')} passes "


def _tier(shift: Shift, witnesses: int) -> Tier:
    """Confirmed: peers contradict it clearly. Suspected: no past of its own and too few peers."""
    if witnesses >= MIN_PEERS:
        return Tier.CONFIRMED if shift.strength >= CLEAR else Tier.PROBABLE
    return Tier.PROBABLE if shift.num_before else Tier.SUSPECTED
