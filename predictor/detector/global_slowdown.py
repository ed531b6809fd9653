"""Detects slowdowns that all ranks of a role share and that their work does not explain. Pure.

No single rank is named. The median rank's log ratio has a chart of its own, relative to its level
in healthy steps of the present layout. While the chart rises, for HELD_STEPS at most, nothing is
learnt; an open finding is divided out of the steps that the cost model learns from. Slow drift
below the chart's threshold is learnt by the cost model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample
from pacekeeper.predictor.cost.model import LEVEL_STEPS, CostModel
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.cusum import Charts
from pacekeeper.predictor.detector.slowdown import Slowdown, changed, is_over, measured
from pacekeeper.predictor.detector.thresholds import Thresholds
from pacekeeper.predictor.stats.cusum_design import WHITEN_ABOVE, autocorrelation, whitened_shift
from pacekeeper.predictor.stats.robust import tailed_scale

LEAST_RANKS = 2  # of which both must be slow; one alone is judged as itself
MIN_STEPS = 4  # that must agree: everybody waits for the host now and then
HELD_STEPS = 32  # for which a rise is not learnt: what is worth naming is named by then
DOUBTS = 3.0  # sigmas of the model's own doubt that count as explained
LEAST_SLOWDOWN = 1.10  # of all ranks together: what they share wanders
LEAST_STEPS = 12  # of a layout that say what is health on it
SIGMA_FLOOR = 0.015
NOBODY = (0,)  # the one column of the chart is no rank's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalSlowdown:
    """Detector state for the ranks of one role together.

    `limits` is None until enough steps of the present layout are known; then nothing is judged.

    `reference`: log of observed / expected in health, with one `sigma` of a step, and the `work`
    [FEATURES] it was seen at, as shares of the expected time. `slowdown` of the open finding, 1.0
    if there is none. `held_steps`: newest steps from which nothing was learnt.
    """

    charts: Charts = field(default_factory=cusum.no_charts)
    limits: Thresholds | None = None
    reference: float = 0.0
    sigma: float = 0.0
    work: Array = field(default_factory=lambda: np.zeros(len(FEATURES)))
    slowdown: float = 1.0
    held_steps: int = 0

    @property
    def is_open(self) -> bool:
        return self.slowdown > 1.0

    @property
    def is_held(self) -> bool:
        """Is it too early to learn from the newest step, lest a fault be learnt?"""
        return not self.is_open and 0 < self.held_steps <= HELD_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSlowdownChange:
    """Change caused by one step: a new finding, its end, or its new slowdown (ratio).

    `why`: the reason for the end; empty if all ranks are back at their expected time.
    """

    found: Finding | None = None
    is_over: bool = False
    changed: float | None = None
    why: str = ""


NO_NEWS = GlobalSlowdownChange()


def update_global_slowdown(
    config: DetectorConfig,
    pace: GlobalSlowdown,
    model: CostModel,
    sample: StepSample,
    slow: Collection[int],
) -> tuple[GlobalSlowdown, GlobalSlowdownChange]:
    """Process one complete step; ranks in `slow` have findings of their own and are left out."""
    if pace.limits is None or len({*sample.ranks} - {*slow}) < LEAST_RANKS:
        return pace, NO_NEWS
    ratio = _common_ratio(model, sample, slow)
    limits = pace.limits
    config = replace(config, min_steps=max(MIN_STEPS, config.min_steps))
    other = _work_of(model, sample) - pace.work
    doubt = DOUBTS * sqrt(max(0.0, float(other @ model.covariance @ other)))
    charts = cusum.advance(
        limits,
        cusum.with_ranks(pace.charts, NOBODY),
        step=sample.step,
        log_ratio=np.array([ratio - pace.reference]),
        doubt=np.array([doubt]),
        sigma=pace.sigma,
        is_open=np.array([pace.is_open]),
    )
    suspicion = float(cusum.suspicion(limits, charts)[0])
    is_rising = suspicion > cusum.QUIET_SUSPICION
    pace = replace(pace, charts=charts, held_steps=pace.held_steps + 1 if is_rising else 0)
    sigma = pace.sigma / limits.weight  # what repeats itself tells less
    series = charts.recent[:, 0]
    if pace.is_open:
        now, news = followed(config, series, slowdown=pace.slowdown, sigma=sigma, doubt=doubt)
        return replace(pace, slowdown=now), news
    if suspicion < 1.0:
        return pace, NO_NEWS
    slowdown = measured(
        config,
        series,
        sigma=sigma,
        doubt=charts.recent_doubt[:, 0],
        least=LEAST_SLOWDOWN,
        sure=config.min_sigmas,
    )
    if slowdown is None:
        return pace, NO_NEWS
    found = _finding(charts, sample, slowdown, len({*sample.ranks} - {*slow}))
    return replace(pace, slowdown=slowdown.value, held_steps=0), GlobalSlowdownChange(found=found)


def followed(
    config: DetectorConfig, series: Array, *, slowdown: float, sigma: float, doubt: float
) -> tuple[float, GlobalSlowdownChange]:
    """Return the slowdown of an open finding now, 1.0 if it is over, and the change.

    Arguments as in `is_over`; `series`: log ratios, newest last.
    """
    if is_over(config, series, slowdown=slowdown, sigma=sigma, doubt=doubt):
        return 1.0, GlobalSlowdownChange(is_over=True)
    now = changed(config, series, slowdown=slowdown, sigma=sigma, doubt=doubt)
    return (slowdown, NO_NEWS) if now is None else (now, GlobalSlowdownChange(changed=now))


def settled(
    config: DetectorConfig,
    pace: GlobalSlowdown,
    model: CostModel,
    history: Sequence[StepSample],
    limits: Thresholds,
    generation: int,
) -> GlobalSlowdown:
    """Set the healthy level from the newest learnt steps of the present layout.

    Returns the state unchanged if there are too few. `limits`: thresholds of the ranks' charts,
    which the chart of all ranks shares.
    """
    own = [sample for sample in history if sample.generation == generation][-LEVEL_STEPS:]
    ratios = np.array([_common_ratio(model, sample) for sample in own])
    if len(ratios) < max(LEAST_STEPS, config.warmup_steps):
        return pace
    repeated = autocorrelation(ratios[:, None])
    weight = whitened_shift(1.0, repeated) if repeated > WHITEN_ABOVE else 1.0
    return replace(
        pace,
        limits=replace(limits, weight=weight),
        reference=float(np.median(ratios)),
        sigma=max(SIGMA_FLOOR, float(tailed_scale(np.abs(ratios - np.median(ratios)), 0.9))),
        work=np.mean([_work_of(model, sample) for sample in own], axis=0),
    )


def on_new_layout(pace: GlobalSlowdown) -> GlobalSlowdown:
    """Reset the healthy level for a new layout, whose work differs.

    An open finding is kept, relative to the level it was found with.
    """
    return pace if pace.is_open else GlobalSlowdown()


def healthy(pace: GlobalSlowdown, sample: StepSample) -> StepSample:
    """Divide the open finding out of a step, so that the cost model can learn from it."""
    if not pace.is_open:
        return sample
    return replace(sample, observed_s=sample.observed_s / pace.slowdown)


def _common_ratio(model: CostModel, sample: StepSample, slow: Collection[int] = ()) -> float:
    """Log observed / expected of the middle rank, the lower one of two; `slow` are left out."""
    ratio = np.log(np.maximum(sample.observed_s, 1e-9) / model.expected_s(sample.features))
    if slow:
        ratio = ratio[~np.isin(sample.ranks, list(slow))]
    middle = (len(ratio) - 1) // 2
    return float(np.partition(ratio, middle)[middle])


def _work_of(model: CostModel, sample: StepSample) -> Array:
    """Return each feature as a share of the expected time, mean over ranks [FEATURES]."""
    work: Array = (sample.features / model.expected_s(sample.features)[:, None]).mean(axis=0)
    return work


def _finding(charts: Charts, sample: StepSample, slowdown: Slowdown, num_ranks: int) -> Finding:
    onset = charts.recent_steps[-slowdown.num_steps]
    return Finding(
        kind=FindingKind.HOST,
        tier=Tier.PROBABLE,
        rank=None,
        slowdown=slowdown.value,
        onset_step=onset,
        step=sample.step,
        reason=(
            f"the job became slower: {num_ranks} ranks together computed x{slowdown.value:.2f} of "
            f"what their work should take, in the median of {slowdown.num_steps} steps since step "
            f"{onset}; the work that is told does not explain it: host, power, fabric or code"
        ),
    )
