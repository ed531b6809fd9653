"""Finds the stretch of steps in which each rank's level rose, beyond noise and wander.

Scores all stretches approximately and tests the best of each rank (`shift_test.py`). Fast noise
averages out over steps, slow wander and differences between ranks do not: each has its own part of
the false-alarm budget. If no single rank stands out, groups of ranks that slowed together are
tested.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import comb, sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.recorded.noise import (
    AlarmLevels,
    Noise,
    needed_strength,
    noise_of,
    thresholds,
)
from pacekeeper.predictor.recorded.residuals import Residuals
from pacekeeper.predictor.recorded.shift_test import (
    SAMPLE_CLIP,
    WORTH_A_LOOK,
    Levels,
    Shift,
    ShiftTest,
    beyond,
    edges_of,
)
from pacekeeper.predictor.stats.robust import column_medians

LEAST_APART = 0.5  # of the smallest loss in the group: all other ranks lost at most that
GROUP_LOOKS = 4  # stretches of a stage's ranks that are tried
GROWTH = 1.2  # of the lengths tried, beyond the first few
LOOKS = 6  # stretches of one rank that are tested, none overlapping another by half
AT_ONCE = 64  # ranks whose scores of all stretches are kept in memory


Seed = tuple[float, int, int, int]  # approximate strength of a stretch, its rank, first, end


def together(judge: ShiftTest, seeds: Sequence[Seed], *, false_alarms: float) -> list[Shift]:
    """Return the strongest group of ranks that slowed down together in each stage; [] without any.

    Args:
        judge: test of single ranks.
        seeds: the strongest stretch of each rank that is worth testing, also where peers share it.
        false_alarms: expected number of groups per trace of a healthy job.
    """
    found: list[Shift] = []
    stages = judge.noise.stage
    for stage in np.unique(stages):
        members = np.flatnonzero(stages == stage)
        own = sorted((seed for seed in seeds if stages[seed[1]] == stage), reverse=True)
        for _, _, first, end in own[:GROUP_LOOKS]:
            group = _outlying_group(judge, members, first, end)
            if len(group):
                company = _test_group(judge, members, group, (first, end), false_alarms)
                if company:
                    found += company
                    break
    return found


def _outlying_group(judge: ShiftTest, members: Positions, first: int, end: int) -> Positions:
    """Two members or more, fewer than half, that are separated from the rest in this stretch."""
    lost = judge.slowdowns((0, first), (first, end))[members]
    known = np.isfinite(lost)
    members, lost = members[known], lost[known]
    order = np.argsort(-lost)
    size = np.arange(2, (len(known) + 1) // 2)
    size = size[size < len(members)]
    least, next_best = lost[order[size - 1]], lost[order[size]]
    is_apart = (least > 0.0) & (next_best <= LEAST_APART * least)
    if not is_apart.any():
        return members[:0]
    best = int(np.where(is_apart, least - next_best, -np.inf).argmax())
    return np.sort(members[order[: size[best]]])


def _test_group(
    judge: ShiftTest,
    members: Positions,
    group: Positions,
    stretch: tuple[int, int],
    false_alarms: float,
) -> list[Shift]:
    """Return the shifts of the group's ranks; [] if the group or a member is not significant."""
    rest = np.setdiff1d(members, group)
    relative = _group_residuals(judge.residuals, group, rest)
    # The group is tested as if it were one rank, with the spread of single ranks.
    noise = replace(
        noise_of(relative, np.zeros(1, dtype=np.intp)),
        has_peers=np.ones(1, dtype=np.bool_),
        spread=judge.noise.spread,
    )
    num_steps = len(relative.by_step)
    sigmas = thresholds(num_steps, comb(len(members), len(group)), false_alarms, noise.freedom)
    as_one = ShiftTest(relative, noise, sigmas, judge.min_slowdown)
    rough = as_one.shift(0, *stretch)
    if rough is None:
        return []
    # Each rank must have risen between the steps where the group departs from the rest.
    first, end = edges_of(relative.by_step[:, 0], rough)
    joint = as_one.shift(0, first, end)
    if joint is None or joint.strength < 1.0:
        return []
    company = replace(judge, company=tuple(group.tolist()))
    shifts = [company.shift(rank, first, end) for rank in group.tolist()]
    stand = [shift for shift in shifts if shift is not None and shift.strength >= 1.0]
    if len(stand) < len(group):
        return []
    return [replace(shift, strength=min(shift.strength, joint.strength)) for shift in stand]


def _group_residuals(residuals: Residuals, group: Positions, rest: Positions) -> Residuals:
    """Mean of the group relative to the median of the rest, as the residuals of one rank."""

    def one(table: Array) -> Array:
        known = np.isfinite(table[:, group])
        count = known.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(known, table[:, group], 0.0).sum(axis=1) / count
        column: Array = (mean - column_medians(table[:, rest], axis=1))[:, None]
        return column

    squares = (residuals.errors[:, group] ** 2).sum(axis=1, keepdims=True)
    return replace(
        residuals,
        columns=residuals.columns[:0],
        samples=one(residuals.samples),
        by_step=one(residuals.by_step),
        counts=residuals.counts[:, group].min(axis=1, keepdims=True),
        errors=np.sqrt(squares) / len(group),
        shared=residuals.shared[:, group].mean(axis=1, keepdims=True),
    )


def strongest_shifts(
    residuals: Residuals, noise: Noise, *, false_alarms: float, min_slowdown: float
) -> list[Shift]:
    """Return the strongest significant shift of each rank, [ranks] at most.

    If no rank is significant by itself: the shifts of groups of one stage that slowed together.

    Args:
        residuals: of one layout.
        noise: of these residuals.
        false_alarms: expected number per trace of a healthy job, over all ranks.
        min_slowdown: smaller slowdowns are not reported.
    """
    num_steps, num_ranks = residuals.by_step.shape
    sigmas = thresholds(num_steps, num_ranks, false_alarms, noise.freedom)
    segments = np.array(_candidate_stretches(num_steps), dtype=np.intp)
    every = np.arange(num_ranks)
    highest = np.full(num_ranks, -np.inf)
    for scores in _scan_strengths(residuals, noise, segments, sigmas, every):
        np.maximum(highest, scores.max(axis=0), out=highest)
    needed = needed_strength(highest, false_alarms)
    judge = ShiftTest(residuals, noise, sigmas, min_slowdown, needed)
    found, seeds = list[Shift](), list[Seed]()
    worth = np.flatnonzero(highest / needed > WORTH_A_LOOK)
    for ranks in (worth[at : at + AT_ONCE] for at in range(0, len(worth), AT_ONCE)):
        scores = (
            np.concatenate([*_scan_strengths(residuals, noise, segments, sigmas, ranks)]) / needed
        )
        for rank, score in zip(ranks.tolist(), scores.T, strict=True):
            best = int(score.argmax())
            seeds.append((float(score[best]), rank, *segments[best].tolist()))
            shift = _best_shift(judge, rank, segments, score.copy())
            if shift is not None:
                found.append(shift)
    return found or together(judge, seeds, false_alarms=false_alarms)


def _best_shift(judge: ShiftTest, rank: int, segments: Positions, score: Array) -> Shift | None:
    """Return the strongest significant stretch of a rank, None if there is none.

    A stretch that fails the test may hide another one: those that overlap it by half are dropped,
    and the next best is tested.
    """
    for _ in range(LOOKS):
        best = int(score.argmax())
        if score[best] <= WORTH_A_LOOK:
            return None
        first, end = segments[best].tolist()
        shift = judge.shift(rank, first, end)
        if shift is not None:
            edges = edges_of(judge.residuals.by_step[:, rank], shift)
            wider = judge.shift(rank, *edges) if edges != (first, end) else None
            if wider is not None and wider.strength >= 1.0:
                return wider
            if shift.strength >= 1.0 and not judge.have_peers_fallen(
                rank, *edges, shift.log_slowdown
            ):
                return shift
        shared = np.minimum(segments[:, 1], end) - np.maximum(segments[:, 0], first)
        joint = np.maximum(segments[:, 1], end) - np.minimum(segments[:, 0], first)
        score[2 * shared >= joint] = 0.0
    return None


def _candidate_stretches(num_steps: int) -> list[tuple[int, int]]:
    """Candidate stretches (first, end): all starts, lengths growing by a fifth and to the end."""
    lengths, length = set(), 1.0
    while length <= num_steps:
        lengths.add(int(length))
        length = max(length + 1.0, length * GROWTH)
    return [
        (first, first + length)
        for first in range(num_steps)
        for length in sorted({*lengths, num_steps - first})
        if first + length <= num_steps
    ]


def _scan_strengths(
    residuals: Residuals, noise: Noise, segments: Positions, sigmas: AlarmLevels, ranks: Positions
) -> Iterator[Array]:
    """Yield the approximate strength of each stretch for each of the ranks; 1.0: the threshold.

    Arrays [segments, ranks] with the segments of one first step each, in order: a single array for
    all segments would be large.
    """
    noise, by_step = noise.of(ranks), residuals.by_step[:, ranks]
    middle = column_medians(by_step)
    samples = float(np.median(residuals.counts))
    # Clip a step to the weight of its micro-batches: an outlier must not mask a real shift.
    worth = max(1.0, SAMPLE_CLIP * sqrt(samples) / sigmas.sure)
    most = worth * (sigmas.fast * noise.fast + sigmas.slow * noise.wander)
    apart = np.clip(by_step - middle, -most, most)
    zero = np.zeros((1, len(ranks)))
    sums = np.concatenate([zero, np.cumsum(np.nan_to_num(apart), axis=0)])
    counts = np.concatenate([zero, np.cumsum(np.isfinite(apart), axis=0)])
    for same in np.split(segments, np.flatnonzero(np.diff(segments[:, 0])) + 1):
        first, ends = same[0, 0], same[:, 1]
        num_inside, num_before = counts[ends] - counts[first], counts[first]
        with np.errstate(invalid="ignore", divide="ignore"):
            inside = middle + (sums[ends] - sums[first]) / num_inside
            before = middle + sums[first] / num_before
        levels = Levels(inside=inside, before=before, num_inside=num_inside, num_before=num_before)
        score, _ = beyond(noise, levels, sigmas)
        fewest = np.where(noise.has_peers, num_inside, np.minimum(num_inside, num_before))
        most_score = SAMPLE_CLIP * np.sqrt(fewest * samples) / sigmas.sure
        yield np.nan_to_num(np.minimum(score, most_score), nan=0.0)
