"""One-sided CUSUM charts per rank (Page 1954). Pure.

A fast chart for large slowdowns, slower ones for small ones. Arrays are replaced, never written to;
a rank that lacks a step keeps its charts as they were.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags
from pacekeeper.predictor.detector.excursions import Excursions, by_height, with_finding
from pacekeeper.predictor.detector.microbatch_residuals import MicrobatchResiduals
from pacekeeper.predictor.detector.thresholds import Thresholds
from pacekeeper.predictor.stats.cusum_design import REFERENCES

WINDOW_STEPS = 32  # of recent log ratios kept
CEILING = 2.0  # of the threshold: evidence of long ago must drain within a few steps
QUIET_SUSPICION = 0.5  # of a threshold: above it nothing is learnt
PACE_SPREAD = 0.02  # one sigma of the log paces of healthy ranks
UNKNOWN_PACE = 3.0 * PACE_SPREAD  # what a rank may differ by that has no past of its own


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Charts:
    """Columns follow `ranks`, ascending; NaN where a rank had no record.

    `levels` [charts, ranks] in sigma, `peaks` their highest in the newest step, `rises` since they
    last were zero (where a finding is open: when it was opened). `excursions`: of the past.
    `baseline`: log of the rank's own healthy pace; `baseline_doubt`: what that may be wrong by,
    beyond what the charts allow for.
    `recent` [steps, ranks]: log ratios less the baseline, newest last; `recent_steps`: their steps;
    `recent_doubt`: what the model of the time may have been wrong by (log, at most).
    `doubt`: the same on the rank's newest work; `sample_doubt`: the mean of what was taken off the
    newest step's samples, its micro-batches where these are reported. `num_parts`: micro-batches
    of a step, 1 where none are reported.
    """

    ranks: tuple[int, ...]
    levels: Array
    peaks: Array
    rises: Array
    baseline: Array
    baseline_doubt: Array
    doubt: Array
    sample_doubt: Array
    recent: Array
    recent_doubt: Array
    recent_steps: tuple[int, ...]
    num_parts: int = 1
    excursions: Excursions = field(default_factory=Excursions)


def no_charts() -> Charts:
    none, no_levels = np.zeros(0), np.zeros((len(REFERENCES), 0))
    return Charts(
        ranks=(), levels=no_levels, peaks=no_levels, rises=no_levels, baseline=none,
        baseline_doubt=none, doubt=none, sample_doubt=none,
        recent=np.zeros((0, 0)), recent_doubt=np.zeros((0, 0)), recent_steps=(),
    )  # fmt: skip


def advance(
    limits: Thresholds,
    charts: Charts,
    *,
    step: int,
    log_ratio: Array,
    doubt: Array,
    sigma: float | Array,
    is_open: Flags,
    parts: MicrobatchResiduals | None = None,
) -> Charts:
    """Fold one step into the charts: log_ratio, doubt, is_open [ranks]; NaN: no record.

    `sigma`: of all ranks, or of each [ranks].

    With `parts` micro-batch by micro-batch: each counts in sqrt(parts) of the step's sigma, so that
    what all of them share is no more evidence than one step is.
    Only what exceeds the doubt is evidence, standardised and clipped. Ranks with an open finding
    rest at zero: what is known need not be found again.
    """
    own = log_ratio - charts.baseline
    doubt = np.where(np.isfinite(log_ratio), doubt, charts.doubt)
    if parts is None:
        rows, doubts, num_parts = own[None], doubt[None], 1
    else:
        rows, doubts, num_parts = parts.log_ratio - charts.baseline, parts.doubt, len(parts.doubt)
    beyond = np.sign(rows) * np.maximum(np.abs(rows) - doubts, 0.0)
    z = np.where(is_open, np.nan, limits.weight * beyond / (sqrt(num_parts) * sigma))
    levels, peaks, rises, ended = _folded(limits, charts, z)
    told = int(np.isfinite(z).sum())
    excursions = replace(
        charts.excursions,
        num_samples=charts.excursions.num_samples + told,
        num_folds=charts.excursions.num_folds + len(z),
        counts=charts.excursions.counts + ended,
    )
    return replace(
        charts,
        levels=np.where(is_open, 0.0, levels),
        peaks=np.where(is_open, 0.0, peaks),
        rises=rises,
        excursions=excursions,
        doubt=doubt,
        sample_doubt=_mean_of(doubts, charts.sample_doubt),
        recent=np.concatenate([charts.recent, own[None]])[-WINDOW_STEPS:],
        recent_doubt=np.concatenate([charts.recent_doubt, doubt[None]])[-WINDOW_STEPS:],
        recent_steps=(*charts.recent_steps, step)[-WINDOW_STEPS:],
        num_parts=num_parts,
    )


def _folded(limits: Thresholds, charts: Charts, z: Array) -> tuple[Array, Array, Array, Array]:
    """All charts after the samples z [samples, ranks], their highest on the way and since they were
    zero, and the excursions that ended, by height; a rank without a sample (NaN) stays.
    """
    has_record = np.isfinite(z)
    is_whole = bool(has_record.all())
    after, peaks, rises = charts.levels.copy(), np.zeros_like(charts.levels), charts.rises.copy()
    ended = np.zeros_like(charts.excursions.counts)
    for level, peak, rise, count, rule in zip(
        after, peaks, rises, ended, limits.rules, strict=True
    ):
        ceiling = CEILING * rule.h
        steps = np.clip(z, -rule.clip, rule.clip) - rule.k
        for row, is_there in zip(steps, has_record, strict=True):
            folded = np.clip(level + row, 0.0, ceiling)
            level[:] = folded if is_whole else np.where(is_there, folded, level)
            np.maximum(peak, level, out=peak)
            np.maximum(rise, level, out=rise)
            is_zero = (level == 0.0) & is_there
            count += by_height(rise[is_zero])
            rise[is_zero] = 0.0
    return after, peaks, rises, ended


def _mean_of(samples: Array, before: Array) -> Array:
    """Mean over samples [samples, ranks] -> [ranks]; as it was for a rank that lacks one."""
    mean: Array = np.mean(samples, axis=0)
    return np.where(np.isfinite(mean), mean, before)


def suspicion(limits: Thresholds, charts: Charts) -> Array:
    """Return each rank's highest chart in the newest step, as a ratio to its threshold [ranks]."""
    heights = np.array([rule.h for rule in limits.rules])
    highest: Array = (charts.peaks / heights[:, None]).max(axis=0)
    return highest


def recovered(charts: Charts, ranks: Collection[int]) -> Charts:
    """Return the charts with the findings of these ranks counted as excursions that ended."""
    excursions, rises = charts.excursions, charts.rises.copy()
    for rank in ranks:
        i = charts.ranks.index(rank)
        excursions = with_finding(excursions, rank, rises[:, i])
        rises[:, i] = 0.0
    return replace(charts, excursions=excursions, rises=rises)


def rebased(charts: Charts, baseline: Array, doubt: Array) -> Charts:
    """Return the charts with a new baseline; recent residuals are converted to it."""
    shift = charts.baseline - baseline
    return replace(
        charts,
        baseline=baseline,
        baseline_doubt=doubt,
        recent=charts.recent + shift,
    )


def on_new_layout(charts: Charts) -> Charts:
    """Return the charts after a layout change, with the doubt of ranks of unknown pace."""
    doubt = np.maximum(charts.baseline_doubt, UNKNOWN_PACE)
    return replace(charts, baseline_doubt=doubt)


def with_ranks(charts: Charts, ranks: Collection[int]) -> Charts:
    """Return the charts with these ranks added at zero; the same object if none is new."""
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
        peaks=pick(charts.peaks, 0.0),
        rises=pick(charts.rises, 0.0),
        baseline=pick(charts.baseline, 0.0),
        baseline_doubt=pick(charts.baseline_doubt, UNKNOWN_PACE),
        doubt=pick(charts.doubt, 0.0),
        sample_doubt=pick(charts.sample_doubt, 0.0),
        recent=pick(charts.recent, np.nan),
        recent_doubt=pick(charts.recent_doubt, 0.0),
    )
