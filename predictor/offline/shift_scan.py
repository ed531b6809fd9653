"""Did a rank's level rise, when, by how much, and could chance or wander have done it? Pure.

All stretches are scanned roughly, the best of each rank judged (`shift_test.py`). Fast noise
averages out over steps, slow wander and the ranks' own paces do not: each has its own share of the
false alarms allowed. What several ranks share is looked for where none stands out by itself.
"""

from collections.abc import Iterator
from math import sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.offline.group_shifts import Seed, together
from pacekeeper.predictor.offline.noise import Noise, Sigmas, needed_strength, thresholds
from pacekeeper.predictor.offline.residuals import Residuals
from pacekeeper.predictor.offline.shift_test import (
    SAMPLE_CLIP,
    WORTH_A_LOOK,
    Judge,
    Shift,
    beyond,
    edges_of,
)
from pacekeeper.predictor.stats.robust import column_medians

GROWTH = 1.2  # of the lengths tried, beyond the first few
LOOKS = 6  # at stretches of one rank that are not much the same
AT_ONCE = 64  # ranks of which all stretches are kept: bounds the memory


def strongest_shifts(
    residuals: Residuals, noise: Noise, *, false_alarms: float, min_slowdown: float
) -> list[Shift]:
    """The stretch that speaks most against each rank, where it suffices. [ranks] at most.

    Where none does by itself: those of one stage that slowed together.
    false_alarms: expected number per trace, of all ranks together, if nothing is wrong.
    """
    num_steps, num_ranks = residuals.by_step.shape
    sigmas = thresholds(num_steps, num_ranks, false_alarms, noise.freedom)
    segments = np.array(_segments(num_steps), dtype=np.intp)
    every = np.arange(num_ranks)
    highest = np.full(num_ranks, -np.inf)
    for scores in _scan(residuals, noise, segments, sigmas, every):
        np.maximum(highest, scores.max(axis=0), out=highest)
    needed = needed_strength(highest, false_alarms)
    judge = Judge(residuals, noise, sigmas, min_slowdown, needed)
    found, seeds = list[Shift](), list[Seed]()
    worth = np.flatnonzero(highest / needed > WORTH_A_LOOK)
    for ranks in (worth[at : at + AT_ONCE] for at in range(0, len(worth), AT_ONCE)):
        scores = np.concatenate([*_scan(residuals, noise, segments, sigmas, ranks)]) / needed
        for rank, score in zip(ranks.tolist(), scores.T, strict=True):
            best = int(score.argmax())
            seeds.append((float(score[best]), rank, *segments[best].tolist()))
            shift = _found(judge, rank, segments, score.copy())
            if shift is not None:
                found.append(shift)
    return found or together(judge, seeds, false_alarms=false_alarms)


def _found(judge: Judge, rank: int, segments: Positions, score: Array) -> Shift | None:
    """The best stretch of a rank that stands; one that does not may hide another beside it."""
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


def _segments(num_steps: int) -> list[tuple[int, int]]:
    """Stretches to try: every start, lengths that grow by a fifth, and to the end."""
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


def _scan(
    residuals: Residuals, noise: Noise, segments: Positions, sigmas: Sigmas, ranks: Positions
) -> Iterator[Array]:
    """Roughly how strongly each stretch speaks against each of the ranks; 1: enough.

    [segments, ranks], those of one first step at a time, in order: all at once would be large.
    """
    noise, by_step = noise.of(ranks), residuals.by_step[:, ranks]
    levels = column_medians(by_step)
    samples = float(np.median(residuals.counts))
    # A step may count for what its micro-batches are worth, so that one wild step hides nothing.
    worth = max(1.0, SAMPLE_CLIP * sqrt(samples) / sigmas.sure)
    most = worth * (sigmas.fast * noise.fast + sigmas.slow * noise.wander)
    apart = np.clip(by_step - levels, -most, most)
    zero = np.zeros((1, len(ranks)))
    sums = np.concatenate([zero, np.cumsum(np.nan_to_num(apart), axis=0)])
    counts = np.concatenate([zero, np.cumsum(np.isfinite(apart), axis=0)])
    for same in np.split(segments, np.flatnonzero(np.diff(segments[:, 0])) + 1):
        first, ends = same[0, 0], same[:, 1]
        num_inside, num_before = counts[ends] - counts[first], counts[first]
        with np.errstate(invalid="ignore", divide="ignore"):
            inside = levels + (sums[ends] - sums[first]) / num_inside
            before = levels + sums[first] / num_before
        score, _ = beyond(noise, inside, before, num_inside, num_before, sigmas)
        fewest = np.where(noise.has_peers, num_inside, np.minimum(num_inside, num_before))
        most_score = SAMPLE_CLIP * np.sqrt(fewest * samples) / sigmas.sure
        yield np.nan_to_num(np.minimum(score, most_score), nan=0.0)
