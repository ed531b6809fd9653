"""Several CUSUM charts per rank, folded sample by sample for all ranks at once. Pure.

Each chart is tuned to one size of shift and has its part of the rate of false alarms; a rank alarms
with the first that crosses. State is a float per chart; no rank's depends on another rank.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.predictor.cost.features import Array, Flags
from pacekeeper.predictor.stats.cusum_design import ChartRule

Single = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CusumState:
    """`charts` [charts, ranks] in sigma, not to be written to."""

    charts: Single


def begin(rules: tuple[ChartRule, ...], num_ranks: int) -> CusumState:
    """All charts at zero: the worst case of a delay."""
    return CusumState(charts=np.zeros((len(rules), num_ranks), dtype=np.float32))


def fold(
    rules: tuple[ChartRule, ...], bank: CusumState, residuals: Array | Single
) -> tuple[CusumState, Flags]:
    """Fold standardised residuals [samples, ranks] (NaN: no record) in; (bank, alarms alike).

    Alarms are per sample and rank; a rank's charts begin again at zero after one.
    """
    values = np.asarray(residuals, dtype=np.float32)
    alarms = np.zeros(values.shape, dtype=np.bool_)
    charts = bank.charts.copy()
    has_gaps = not np.isfinite(values).all()
    for sample, crossed in zip(values, alarms, strict=True):
        for chart, rule in zip(charts, rules, strict=True):
            step = np.minimum(sample, np.float32(rule.clip)) + (chart - np.float32(rule.k))
            np.maximum(step, 0.0, out=step)
            if has_gaps:
                step = np.where(np.isfinite(sample), step, chart)
            chart[:] = step
            crossed |= step > rule.h
        if crossed.any():
            charts[:, crossed] = 0.0
    return CusumState(charts=charts), alarms
