"""Estimates a rank's slowdown from its recent log ratios, and whether it has ended. Pure.

Whether a rank is slow at all is decided by its chart (`cusum.py`). All estimates are medians over
several steps, so that neither a wild sample nor the mixed step in which a fault begins or ends
decides anything; the noisier the clock, the more steps they need.
"""

from dataclasses import dataclass
from math import ceil, exp, log, sqrt

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.detector.intermittent import is_ongoing, period, slow_steps, spells
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR, ratio_interval

DISSENT = 5  # one step in so many may contradict
PARTIAL_SIGMAS = 4.0  # a first step this far below the next ones saw only part of the fault
APART_SIGMAS = 3.0  # two levels are two if they differ by this many standard errors
CHANGE_WORTH_TELLING = 1.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """The slowdown that the last `num_steps` steps of a series agree on.

    Attributes:
        error: one sigma of its log, with a third of the model's doubt.
        num_parts: it is one step, and so many of its micro-batches; 0: whole steps were looked at.
        num_slow: the rank was slow in so many of the steps only, and `value` is the mean of all; 0:
            the steps agree.
        when_slow: median slowdown of these.
        every: a slow spell began in every so many-th step; 0: not as regularly.
    """

    value: float
    num_steps: int
    error: float = 0.0
    num_parts: int = 0
    num_slow: int = 0
    when_slow: float = 1.0
    every: int = 0

    @property
    def pattern(self) -> str:
        """The pattern of the slow steps of a rank that is slow now and then, as a text."""
        if not self.every:
            return "it is slow now and then, and more often than by chance"
        return (
            f"it is slow once in every {self.every} steps, as periodic work such as logging, "
            "evaluation or checkpoints would make it: rule that out before its device"
        )

    @property
    def interval(self) -> tuple[float, float]:
        """Least and most, with 95 % confidence."""
        return ratio_interval(log(self.value), self.error)[1:]


def required_steps_factor(config: DetectorConfig, sigma: float) -> int:
    """How many times as many steps a clock of this noise must show."""
    return 2 if sigma > config.noisy_sigma else 1


def measured(
    config: DetectorConfig,
    log_ratios: Array,
    *,
    sigma: float,
    doubt: float | Array,
    least: float = 1.0,
    sure: float = 0.0,
) -> Slowdown | None:
    """Estimate the slowdown from the last steps.

    The run of last steps with the strongest evidence is used, so that it starts at the onset.

    Args:
        config: settings of the detector.
        log_ratios: log(observed / expected) of one rank [steps], newest last.
        sigma: one sigma of a step.
        doubt: bound on the model's error (log) in each step, as of when it was judged.
        least: smallest slowdown (ratio) to report.
        sure: standard errors by which the slowdown must exceed health.

    Returns:
        None if no run of steps agrees, or if there are too few steps without the first one, which
        may contain only a part of the fault.
    """
    needed = config.min_steps * required_steps_factor(config, sigma)
    doubts = np.broadcast_to(doubt, log_ratios.shape)
    best, most, unsure = None, sure * sigma, 0.0
    for count in range(needed, len(log_ratios) + 1):
        unknown = float(doubts[-count:].max())
        strength = _strength(log_ratios[-count:], unknown, log(least))
        if strength > most:
            best, most, unsure = log_ratios[-count:], strength, unknown
    if best is None:
        return None
    if len(best) > 1 and best[0] < float(np.median(best[1:])) - PARTIAL_SIGMAS * sigma:
        best = best[1:]
    if len(best) < needed:
        return None
    error = sqrt((MEDIAN_ERROR * sigma) ** 2 / len(best) + (unsure / APART_SIGMAS) ** 2)
    return Slowdown(value=exp(float(np.median(best))), num_steps=len(best), error=error)


def of_mean(
    log_ratios: Array, is_slow: Flags, num_steps: int, steps: Positions | None = None
) -> Slowdown:
    """Return the slowdown of a rank that is slow in some of its last `num_steps` steps.

    Args:
        log_ratios: log(observed / expected) of its steps [steps], newest last.
        is_slow: in which of them it is slow [steps].
        num_steps: how many of the last steps count.
        steps: their numbers [steps], for the period of the slow spells; None: not looked at.
    """
    ratios = np.exp(log_ratios[-num_steps:])
    value, slow = float(ratios.mean()), ratios[is_slow[-num_steps:]]
    return Slowdown(
        value=value,
        num_steps=num_steps,
        error=float(ratios.std()) / (value * sqrt(num_steps)),
        num_slow=len(slow),
        when_slow=float(np.median(slow)),
        every=0 if steps is None else period(is_slow[-num_steps:], steps[-num_steps:]),
    )


def is_over(
    config: DetectorConfig, log_ratios: Array, *, slowdown: float, sigma: float, doubt: float
) -> bool:
    """Return whether a rank with an open finding of `slowdown` is back at its expected time.

    Requires as many steps as separate the two levels under this noise, `recover_steps` at least. A
    residual within the model's doubt counts as recovered: otherwise a healthy rank on a layout that
    the model has not seen could stay in the finding for ever. A rank that is slow now and then is
    not back before it has been quiet for longer than chance allows (`is_ongoing`).
    """
    ill = log(slowdown)
    back = min(log(config.recover_slowdown), 0.5 * ill)
    gap = ill - back
    needed = config.recover_steps * required_steps_factor(config, sigma)
    count = max(needed, min(len(log_ratios), ceil((4.0 * sigma / gap) ** 2))) if gap > 0 else needed
    if len(log_ratios) < count:
        return False
    last = log_ratios[-count:]
    if int((last > 0.5 * (ill + back)).sum()) > count // DISSENT:
        return False
    if is_ongoing(slow_steps(log_ratios, doubts=doubt, sigmas=sigma)):
        return False
    middle = float(np.median(last))
    error = sqrt(doubt**2 + (APART_SIGMAS * MEDIAN_ERROR * sigma) ** 2 / count)
    return middle < back + doubt and ill - middle > error


def changed(
    config: DetectorConfig, log_ratios: Array, *, slowdown: float, sigma: float, doubt: float
) -> float | None:
    """Return the new slowdown of an open finding, if it has settled on a clearly different one.

    That is the mean of all steps since the first slow one where a rank is slow now and then, else
    the median of the last steps. Near health it takes four times the steps: a rank on its way back
    must not be reported as hardly slow, from where its recovery could not be seen any more.
    """
    back = log(config.recover_slowdown)
    is_slow = slow_steps(log_ratios, doubts=doubt, sigmas=sigma)
    seen = spells(is_slow)
    if seen is not None and seen.mean() <= 1.0 - 1.0 / DISSENT:
        mean = of_mean(log_ratios, is_slow, len(log_ratios) - int(is_slow.argmax()))
        apart = abs(log(mean.value / slowdown)) - mean.error
        return mean.value if apart >= log(CHANGE_WORTH_TELLING) else None
    for patient in (1, 4):
        count = patient * config.measure_steps * required_steps_factor(config, sigma)
        if len(log_ratios) < count:
            return None
        last = log_ratios[-count:]
        now, error = float(np.median(last)), MEDIAN_ERROR * sigma / sqrt(count)
        is_clearly_slow = now >= 2.0 * back + 2.0 * error
        if is_clearly_slow or patient > 1:
            break
    if now < back + doubt:
        return None
    if abs(now - log(slowdown)) < log(CHANGE_WORTH_TELLING) + max(doubt, 2.0 * error):
        return None
    # Both halves on one level: in the middle of a change a median would tell something between.
    first, second = float(np.median(last[: count // 2])), float(np.median(last[count // 2 :]))
    if abs(first - second) > APART_SIGMAS * 2.0 * error:
        return None
    return exp(now)


def _strength(run: Array, doubt: float, least: float) -> float:
    """Return the strength of a run of steps: its lower median beyond the doubt, times sqrt(steps).

    0 unless all steps but one in five are above half of a median that exceeds doubt and `least`.
    """
    middle = float(np.median(run))
    if middle - doubt < least or run[0] < 0.5 * middle:
        return 0.0
    if int((run < 0.5 * middle).sum()) > len(run) // DISSENT:
        return 0.0
    lower = float(np.sort(run)[(len(run) - 1) // 2])
    return (lower - doubt) * sqrt(len(run))
