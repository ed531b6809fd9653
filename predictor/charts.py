"""One-sided CUSUM charts per rank (Page 1954): how much evidence there is. Pure.

A fast chart for large slowdowns, slower ones for small ones. Arrays are replaced, never written to;
a rank that lacks a step keeps its charts as they were.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.predictor.calibration import REFERENCES
from pacekeeper.predictor.thresholds import Thresholds
from pacekeeper.predictor.workload import Array, Flags

WINDOW_STEPS = 32  # of recent log ratios kept
CEILING = 2.0  # of the threshold: evidence of long ago must drain within a few steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Charts:
    """Columns follow `ranks`, ascending; NaN where a rank had no record.

    `levels` [charts, ranks] in sigma. `baseline`: log of the rank's own healthy pace.
    `recent` [steps, ranks]: log ratios less the baseline, newest last; `recent_steps`: their steps;
    `recent_doubt`: what the model of the time may have been wrong by (log, at most).
    `doubt`: the same on the rank's newest work.
    """

    ranks: tuple[int, ...]
    levels: Array
    baseline: Array
    doubt: Array
    recent: Array
    recent_doubt: Array
    recent_steps: tuple[int, ...]


def no_charts() -> Charts:
    none = np.zeros(0)
    return Charts(
        ranks=(), levels=np.zeros((len(REFERENCES), 0)), baseline=none, doubt=none,
        recent=np.zeros((0, 0)), recent_doubt=np.zeros((0, 0)), recent_steps=(),
    )  # fmt: skip


def advance(
    limits: Thresholds,
    charts: Charts,
    *,
    step: int,
    log_ratio: Array,
    doubt: Array,
    sigma: float,
    is_open: Flags,
) -> Charts:
    """Fold one step into the charts: log_ratio, doubt, is_open [ranks]; NaN: no record.

    Only what exceeds the doubt is evidence, standardised and clipped. Ranks with an open finding
    rest at zero: what is known need not be found again.
    """
    has_record = np.isfinite(log_ratio)
    own = log_ratio - charts.baseline
    doubt = np.where(has_record, doubt, charts.doubt)
    beyond = np.sign(own) * np.maximum(np.abs(own) - doubt, 0.0)
    z = limits.weight * beyond / sigma
    levels = np.empty_like(charts.levels)
    for i, rule in enumerate(limits.rules):
        folded = charts.levels[i] + np.clip(z, -rule.clip, rule.clip) - rule.k
        folded = np.clip(folded, 0.0, CEILING * rule.h)
        levels[i] = np.where(is_open, 0.0, np.where(has_record, folded, charts.levels[i]))
    return replace(
        charts,
        levels=levels,
        doubt=doubt,
        recent=np.concatenate([charts.recent, own[None]])[-WINDOW_STEPS:],
        recent_doubt=np.concatenate([charts.recent_doubt, doubt[None]])[-WINDOW_STEPS:],
        recent_steps=(*charts.recent_steps, step)[-WINDOW_STEPS:],
    )


def suspicion(limits: Thresholds, charts: Charts) -> Array:
    """The highest of a rank's charts, in units of its threshold."""
    heights = np.array([rule.h for rule in limits.rules])
    highest: Array = (charts.levels / heights[:, None]).max(axis=0)
    return highest


def rebased(charts: Charts, baseline: Array) -> Charts:
    """The charts with another baseline; what is recent is told beside the new one."""
    return replace(charts, baseline=baseline, recent=charts.recent + (charts.baseline - baseline))


def with_ranks(charts: Charts, ranks: Collection[int]) -> Charts:
    """The charts with these ranks added at zero; itself where it has them all."""
    if charts.ranks == ranks or (charts.ranks and set(ranks) <= set(charts.ranks)):
        return charts
    return _columns(charts, tuple(sorted({*charts.ranks, *ranks})))


def without_ranks(charts: Charts, ranks: Collection[int]) -> Charts:
    return _columns(charts, tuple(rank for rank in charts.ranks if rank not in ranks))


def _columns(charts: Charts, ranks: tuple[int, ...]) -> Charts:
    """The charts of exactly `ranks`: known ones keep theirs, new ones start at zero."""
    known = {rank: i for i, rank in enumerate(charts.ranks)}
    source = np.array([known.get(rank, -1) for rank in ranks], dtype=np.intp)
    is_known = source >= 0

    def pick(values: Array, missing: float) -> Array:
        picked = np.full((*values.shape[:-1], len(ranks)), missing)
        picked[..., is_known] = values[..., source[is_known]]
        return picked

    return replace(
        charts,
        ranks=ranks,
        levels=pick(charts.levels, 0.0),
        baseline=pick(charts.baseline, 0.0),
        doubt=pick(charts.doubt, 0.0),
        recent=pick(charts.recent, np.nan),
        recent_doubt=pick(charts.recent_doubt, 0.0),
    )
