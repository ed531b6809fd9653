"""Did several ranks of one stage slow together, and fewer than half of it? Pure.

A rank that moves with a quarter of its peers is not accused by itself (`shift_test.py`): what many
share is mostly their work. It is a fault of all of them (a node, a switch, a cooling loop) where
each stands out by itself, those left lost less than half as much, and the mean of the group beside
the rest rose further than such means do by chance, whichever group of its size is looked at.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import comb

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.offline.noise import noise_of, thresholds
from pacekeeper.predictor.offline.residuals import Residuals
from pacekeeper.predictor.offline.shift_test import Judge, Shift, edges_of
from pacekeeper.predictor.stats.robust import column_medians

LEAST_APART = 0.5  # of what the least slow of the group lost: whoever is left lost less
LOOKS = 4  # at stretches of ranks of one stage

Seed = tuple[float, int, int, int]  # rough strength of a rank's stretch, the rank, first, end


def together(judge: Judge, seeds: Sequence[Seed], *, false_alarms: float) -> list[Shift]:
    """Of each stage the ranks that slowed together, the strongest such group; [] where none did.

    seeds: the strongest stretch of each rank that is worth a look, whoever shared it.
    false_alarms: expected number of groups per trace, if nothing is wrong.
    """
    found: list[Shift] = []
    stages = judge.noise.stage
    for stage in np.unique(stages):
        members = np.flatnonzero(stages == stage)
        own = sorted((seed for seed in seeds if stages[seed[1]] == stage), reverse=True)
        for _, _, first, end in own[:LOOKS]:
            group = _apart(judge, members, first, end)
            if len(group):
                company = _judged(judge, members, group, (first, end), false_alarms)
                if company:
                    found += company
                    break
    return found


def _apart(judge: Judge, members: Positions, first: int, end: int) -> Positions:
    """Two members or more, fewer than half, that stand apart from the others in this stretch."""
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


def _judged(
    judge: Judge,
    members: Positions,
    group: Positions,
    stretch: tuple[int, int],
    false_alarms: float,
) -> list[Shift]:
    """The shifts of the group's ranks; [] where chance may have made it, or one does not stand."""
    rest = np.setdiff1d(members, group)
    beside = _beside(judge.residuals, group, rest)
    # To chance one of them is one rank; what it may differ from the others by is a rank's.
    noise = replace(
        noise_of(beside, np.zeros(1, dtype=np.intp)),
        has_peers=np.ones(1, dtype=np.bool_),
        spread=judge.noise.spread,
    )
    num_steps = len(beside.by_step)
    sigmas = thresholds(num_steps, comb(len(members), len(group)), false_alarms, noise.freedom)
    as_one = Judge(beside, noise, sigmas, judge.min_slowdown)
    rough = as_one.shift(0, *stretch)
    if rough is None:
        return []
    # Where the group parts from the rest, each of its ranks must have risen.
    first, end = edges_of(beside.by_step[:, 0], rough)
    joint = as_one.shift(0, first, end)
    if joint is None or joint.strength < 1.0:
        return []
    company = replace(judge, company=tuple(group.tolist()))
    shifts = [company.shift(rank, first, end) for rank in group.tolist()]
    stand = [shift for shift in shifts if shift is not None and shift.strength >= 1.0]
    if len(stand) < len(group):
        return []
    return [replace(shift, strength=min(shift.strength, joint.strength)) for shift in stand]


def _beside(residuals: Residuals, group: Positions, rest: Positions) -> Residuals:
    """The mean of the group beside the middle of the rest, as one rank."""

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
