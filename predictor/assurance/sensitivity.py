"""The smallest detectable slowdown, how soon it is detected, and why it is not. Pure.

A promise made of the rules that a finding must pass (predictor/detector/cusum.py,
predictor/detector/slowdown.py), with a margin for chance; the canary (canary.py) takes it at its
word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, hypot, inf, log, sqrt

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Blindness
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.predictor.cost.features import Flags
from pacekeeper.predictor.detector.cusum import WINDOW_STEPS
from pacekeeper.predictor.detector.slowdown import required_steps_factor
from pacekeeper.predictor.detector.state import (
    Evidence,
    among,
    lacks_reference,
    limits_of,
    sigma_of,
)
from pacekeeper.predictor.detector.thresholds import Thresholds
from pacekeeper.predictor.stats.peers import MIN_PEERS
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR

MEASURING_STEPS = 8  # healthy ones, before which a sight that is too poor is no blindness
MARGIN = 4.0  # standard errors of chance against a slowdown that is promised to be seen
MOST = log(1e6)  # a log slowdown beyond which nothing is told apart any more
APART = 2.0  # sigmas from half of a slowdown to nothing, or too many steps would contradict it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """A rank that becomes slower by the factor `slowdown` is named within `steps` steps."""

    slowdown: float
    steps: int

    def __str__(self) -> str:
        return f"able to see x{self.slowdown:.2f} within {self.steps} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blind:
    """Nothing would be seen: the kind for programs, the reason for people."""

    why: Blindness
    reason: str


def sensitivity_of(
    config: DetectorConfig, evidence: Evidence, ranks: Sequence[int]
) -> Sensitivity | None:
    """The smallest slowdown that is named within `see_within_steps` whichever of `ranks` it
    strikes; infinite where none would be. None during the warm-up.

    The model's doubt of a rank's present work hides that much of it.
    """
    if evidence.model is None:
        return None
    charts, sigma = evidence.charts, sigma_of(config, evidence)
    steps = max(config.see_within_steps, config.min_steps * required_steps_factor(config, sigma))
    at = among(charts.ranks, ranks)
    charted = crossing_level(limits_of(evidence), sigma, steps, charts.num_parts)
    level = max(
        charted + float(charts.sample_doubt[at].max(initial=0.0)),
        _agreed(config, evidence, sigma, steps) + float(charts.doubt[at].max(initial=0.0)),
    )
    level += MARGIN * MEDIAN_ERROR * _chance(evidence, sigma, len(ranks)) / sqrt(steps)
    level = max(level, 2.0 * APART * sigma)
    return Sensitivity(slowdown=exp(level) if level < MOST else inf, steps=steps)


def _chance(evidence: Evidence, sigma: float, num_ranks: int) -> float:
    """What a step's log ratio may err by (one sigma); more where one step repeats the last.

    With one witness a rank must be late by the clock as well: what both share, and how it lasts,
    hides as much (a host that is faster for some steps).
    """
    own, common = sigma / limits_of(evidence).weight, evidence.common
    if num_ranks > MIN_PEERS or common is None or common.limits is None:
        return own
    return hypot(own, common.sigma / common.limits.weight)


def blindness(
    config: DetectorConfig, evidence: Evidence, ranks: Sequence[int], *, step: int
) -> Blind | None:
    """Why a slowdown of one of `ranks` would not be named after this `step`; None: it would be.

    None during the warm-up, too, and while noise is known from too few steps: that is measuring.
    """
    sensitivity = sensitivity_of(config, evidence, ranks)
    if sensitivity is None:
        return None
    if len(ranks) < 2:
        text = f"rank {ranks[0]} has no peer" if ranks else "no rank runs"
        return Blind(why=Blindness.NO_PEERS, reason=f"{text}: it can not be told from everybody")
    if lacks_reference(evidence, ranks):
        (last,) = set(ranks) - evidence.slow.keys()
        text = f"rank {last} has no peer without a finding, and the pace of its role is not known"
        return Blind(why=Blindness.NO_PEERS, reason=text)
    charts, steps = evidence.charts, sensitivity.steps
    newest = charts.recent_steps[-1] if charts.recent_steps else -1
    if step - newest > steps:
        reason = f"no step since {newest} could be charted: the layout changes all the time"
        return Blind(why=Blindness.FROZEN, reason=reason)
    missing = _missing(evidence, ranks, steps)
    if missing:
        reason = (
            f"ranks {format_ranks(missing)} are in none of the last {steps} steps that were judged"
        )
        return Blind(why=Blindness.MISSING_RANK, reason=reason)
    if evidence.steps_since_fit > config.history_steps:
        reason = (
            f"the cost model is {evidence.steps_since_fit} steps old: too many ranks are under "
            "suspicion to fit it again"
        )
        return Blind(why=Blindness.STALE_MODEL, reason=reason)
    if sensitivity.slowdown > config.blind_slowdown and len(evidence.history) >= MEASURING_STEPS:
        sigma = sigma_of(config, evidence)
        reason = (
            f"only x{sensitivity.slowdown:.2f} would be seen within {steps} steps, beyond "
            f"x{config.blind_slowdown:.2f}: one step's noise is {sigma:.1%}"
        )
        return Blind(why=Blindness.NOISE, reason=reason)
    return None


def crossing_level(limits: Thresholds, sigma: float, steps: int, parts: int) -> float:
    """The log slowdown with which a chart crosses at the last of `steps` steps of `parts` samples.

    n samples of z add up to n (z - k), with z below its clip; infinite where none gets there. A
    sample counts in sqrt(parts) sigma; less where residuals repeat (`weight`).
    """
    unit = sqrt(parts) * sigma / limits.weight
    needed = [(rule.k + rule.h / (steps * parts), rule.clip) for rule in limits.rules]
    return min((unit * z for z, clip in needed if z < clip), default=inf)


def _agreed(config: DetectorConfig, evidence: Evidence, sigma: float, steps: int) -> float:
    """The log slowdown on which the steps agree surely enough: of a noisy clock."""
    at_most = sigma / limits_of(evidence).weight
    if required_steps_factor(config, at_most) == 1:
        return 0.0
    return config.min_sigmas * at_most / sqrt(steps)


def _missing(evidence: Evidence, ranks: Sequence[int], steps: int) -> list[int]:
    """Ranks without a record in the last charted steps, where there were so many."""
    recent = evidence.charts.recent[-min(steps, WINDOW_STEPS) :]
    if len(recent) < steps:
        return []
    is_seen: Flags = np.logical_or.reduce(np.isfinite(recent), axis=0)
    if is_seen.all() and evidence.charts.ranks == tuple(ranks):
        return []  # nearly always, and each step asks
    seen = {rank for rank, was in zip(evidence.charts.ranks, is_seen, strict=True) if was}
    return [rank for rank in ranks if rank not in seen]
