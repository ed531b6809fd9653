"""The charts of jobs that are judged by themselves, a block of steps at a time. Pure.

The charts, and the thresholds that follow a job's own excursions, are those of ranks
(`detector/`). A sample is the middle step of a block; health is the pace of the fastest fifth of
the blocks without suspicion, since a fault may hold for the rest. Columns are jobs that are judged
alike: one live job is one column.
"""

from dataclasses import dataclass, replace
from math import ceil, exp, log

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.detector.cusum import Charts
from pacekeeper.predictor.detector.excursions import Excursions, by_height, mean_excess
from pacekeeper.predictor.detector.thresholds import (
    RATE_GRID,
    TRUSTED_SAMPLES,
    Thresholds,
    chart_rules,
    trust,
)
from pacekeeper.predictor.job_level.blocks import (
    BLOCK_STEPS,
    HEALTHY_SHARE,
    NORMAL_20TH,
    SIGMA_FLOOR,
)
from pacekeeper.predictor.stats.change_points import SMALLER_THIRD
from pacekeeper.predictor.stats.cusum_design import samples_between_alarms
from pacekeeper.predictor.stats.robust import (
    MAD_TO_SIGMA,
    MEDIAN_ERROR,
    column_medians,
    column_quantiles,
)

TRUSTED_BLOCKS = TRUSTED_SAMPLES // BLOCK_STEPS
LEAST_SIGMA = 1e-6
LEAST_BETWEEN = 8.0  # blocks between two false alarms, however many are asked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HealthyPace:
    """Log of observed / expected of a healthy block [jobs], one `sigma` of it, and what
    `log_ratio` may be wrong by.
    """

    log_ratio: Array
    sigma: Array
    doubt: Array


def healthy_pace(quiet: Array, excursions: Excursions) -> HealthyPace:
    """Measure health on the blocks without suspicion [blocks, jobs], NaN where there is none.

    Noise is measured on differences, of which a fault that comes and goes leaves a third alone; it
    is no less than SIGMA_FLOOR until the job has shown its excursions, then than how far its blocks
    lie apart.
    """
    share, sigmas = SMALLER_THIRD
    changes = np.diff(quiet, axis=0)
    around = np.abs(changes - column_medians(changes))
    of_changes = column_quantiles(around, share) / (sigmas * np.sqrt(2.0))
    apart = MAD_TO_SIGMA * column_medians(np.abs(quiet - column_medians(quiet)))
    known = trust(excursions, TRUSTED_BLOCKS)
    least = (1.0 - known) * SIGMA_FLOOR + known * np.maximum(apart, LEAST_SIGMA)
    sigma = np.maximum(of_changes, least)
    count = np.isfinite(quiet).sum(axis=0)
    return HealthyPace(
        log_ratio=column_quantiles(quiet, HEALTHY_SHARE) + NORMAL_20TH * sigma,
        sigma=sigma,
        doubt=MEDIAN_ERROR * sigma / np.sqrt(count),
    )


def limits_of(false_alarms_per_job_day: float, step_s: float, excursions: Excursions) -> Thresholds:
    """Return the thresholds of a job whose steps take `step_s` and that rose this far in health."""
    between = samples_between_alarms(
        false_alarms_per_job_day, num_ranks=1, samples_per_rank_s=1.0 / (BLOCK_STEPS * step_s)
    )
    between = exp(ceil(log(max(between, LEAST_BETWEEN)) * RATE_GRID) / RATE_GRID)
    return Thresholds(rules=chart_rules(between, excursions, TRUSTED_BLOCKS), between=between)


def with_findings(charts: Charts, jobs: Positions) -> Charts:
    """Begin anew the charts of jobs that are found slow.

    The finding cuts the excursions off that charts are on: each counts as high as it would have
    risen in the mean. Were it left out, thresholds would sink with each alarm.
    """
    levels, rises, excursions = charts.levels.copy(), charts.rises.copy(), charts.excursions
    heights = rises[:, jobs]
    heights = np.where(heights > 0.0, heights + mean_excess(excursions)[:, None], 0.0)
    counts = excursions.counts + np.stack([by_height(own) for own in heights])
    levels[:, jobs] = rises[:, jobs] = 0.0
    return replace(
        charts, levels=levels, rises=rises, excursions=replace(excursions, counts=counts)
    )
