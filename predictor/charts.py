"""Two one-sided CUSUM charts per rank (Page 1954): how much evidence there is. Pure.

A fast chart for large slowdowns, a slow one for small ones. Arrays are replaced, never written to;
a rank that lacks a step keeps its charts as they were.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.core.config import DetectorConfig
from pacekeeper.predictor.workload import Array, Flags

WINDOW_STEPS = 32  # of recent log ratios kept
CEILING = 2.0  # of the threshold: evidence of long ago must drain within a few steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Charts:
    """Columns follow `ranks`, ascending; NaN where a rank had no record.

    `small`, `large`: the charts in sigma. `baseline`: log of the rank's own healthy pace.
    `recent` [steps, ranks]: log ratios less the baseline, newest last; `recent_steps`: their steps.
    `doubt`: what the model may be wrong by (log, at most) on the rank's newest work.
    """

    ranks: tuple[int, ...]
    small: Array
    large: Array
    baseline: Array
    doubt: Array
    recent: Array
    recent_steps: tuple[int, ...]


def no_charts() -> Charts:
    none = np.zeros(0)
    return Charts(
        ranks=(), small=none, large=none, baseline=none, doubt=none,
        recent=np.zeros((0, 0)), recent_steps=(),
    )  # fmt: skip


def advance(
    config: DetectorConfig,
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
    z = np.clip(beyond / sigma, -config.z_clip, config.z_clip)

    def fold(chart: Array, k: float, h: float) -> Array:
        folded: Array = np.where(has_record, np.clip(chart + z - k, 0.0, CEILING * h), chart)
        return np.where(is_open, 0.0, folded)

    return replace(
        charts,
        small=fold(charts.small, config.k_small, config.h_small),
        large=fold(charts.large, config.k_large, config.h_large),
        doubt=doubt,
        recent=np.concatenate([charts.recent, own[None]])[-WINDOW_STEPS:],
        recent_steps=(*charts.recent_steps, step)[-WINDOW_STEPS:],
    )


def suspicion(config: DetectorConfig, charts: Charts) -> Array:
    """The larger of the two charts, in units of its threshold."""
    larger: Array = np.maximum(charts.small / config.h_small, charts.large / config.h_large)
    return larger


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
        small=pick(charts.small, 0.0),
        large=pick(charts.large, 0.0),
        baseline=pick(charts.baseline, 0.0),
        doubt=pick(charts.doubt, 0.0),
        recent=pick(charts.recent, np.nan),
    )
