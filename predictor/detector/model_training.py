"""Selects the steps and ranks that the cost model learns from, and refits it. Pure."""

from dataclasses import replace
from math import log

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import Array, Flags, StepSample
from pacekeeper.predictor.cost.model import fit, residual_table
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.global_slowdown import healthy, settled
from pacekeeper.predictor.detector.state import Evidence, among, limits_of
from pacekeeper.predictor.detector.thresholds import measured_noise, mixed, thresholds
from pacekeeper.predictor.stats.cusum_design import REFERENCES
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR, column_medians

REFIT_PERIOD_STEPS = 32
NEW_LAYOUT_REFITS = (4, 8, 16)  # steps after a new layout: it teaches what the old one could not
MAX_OWN_PACE = log(1.10)  # further from its peers a rank is not healthy, whatever its past
LAYOUT_SPREAD = 0.01  # one sigma of what a rank's pace beside its peers changes by on new work
MAX_HISTORY_ROWS = 1 << 17  # steps x ranks kept for a refit


def learn(config: DetectorConfig, evidence: Evidence, sample: StepSample) -> Evidence:
    """Add the step of the unsuspected ranks to the history, and refit if due.

    The step is left out while half of those without a finding or more are under suspicion, or the
    chart of all ranks together is rising.
    """
    charts = evidence.charts
    is_quiet = cusum.suspicion(limits_of(evidence), charts) <= cusum.QUIET_SUSPICION
    is_quiet &= ~among(charts.ranks, evidence.slow)
    quiet = among(sample.ranks, np.array(charts.ranks)[is_quiet])
    evidence, common = (
        replace(evidence, steps_since_fit=evidence.steps_since_fit + 1),
        evidence.common,
    )
    unnamed = ~among(sample.ranks, evidence.slow)
    if quiet.sum() * 2 <= unnamed.sum() or (common is not None and common.is_held):
        return evidence
    limit = max(
        config.warmup_steps, min(config.history_steps, MAX_HISTORY_ROWS // len(sample.ranks))
    )
    taught = only(sample, quiet)
    taught = taught if common is None else healthy(common, taught)
    history = (*evidence.history, taught)[-limit:]
    evidence = replace(evidence, history=history)
    due = evidence.steps_since_fit >= min(REFIT_PERIOD_STEPS, evidence.fitted_steps)
    is_new = evidence.layout_steps in NEW_LAYOUT_REFITS and evidence.generation > 1
    if not due and not is_new:
        return evidence
    return refitted(config, evidence)


def refitted(config: DetectorConfig, evidence: Evidence) -> Evidence:
    """Fit the cost model, the ranks' healthy paces and the thresholds to the history."""
    history = evidence.history
    model = fit(history, config.cost_model)
    residuals, ranks = residual_table([model.expected_s(s.features) for s in history], history)
    noise = measured_noise(model.sigma, residuals)
    known = mixed(noise, evidence.others)
    sigma = max(config.sigma_floor, known.sigma)
    is_present = np.array([sample.generation == evidence.generation for sample in history])
    charts = cusum.with_ranks(evidence.charts, ranks)
    at = np.searchsorted(charts.ranks, ranks)
    baseline, doubt = charts.baseline.copy(), charts.baseline_doubt.copy()
    baseline[at], doubt[at] = _own_pace(residuals, is_present, sigma)
    charts = cusum.rebased(charts, baseline, doubt)
    limits = thresholds(
        config.false_alarms_per_job_day,
        history,
        noise=known,
        excursions=charts.excursions,
        parts_per_step=charts.num_parts,
    )
    common = evidence.common and settled(
        config, evidence.common, model, evidence.history, limits, evidence.generation
    )
    return replace(
        evidence,
        model=model,
        limits=limits,
        noise=noise,
        common=common,
        charts=charts,
        steps_since_fit=0,
        fitted_steps=len(evidence.history),
    )


def _own_pace(residuals: Array, is_present: Flags, sigma: float) -> tuple[Array, Array]:
    """Estimate each rank's healthy log pace relative to its peers, and the doubt of it [ranks].

    The estimate is the median on the present layout, shrunk to that on all layouts while there are
    few steps. The doubt is three standard errors, less what the charts allow for in any case.

    Args:
        residuals: log ratios [steps, ranks].
        is_present: which steps ran on the present layout [steps].
        sigma: one sigma of a step.
    """
    on_all = np.nan_to_num(column_medians(residuals))
    own = residuals[is_present]
    count = np.isfinite(own).sum(axis=0)
    here = np.nan_to_num(column_medians(own)) if len(own) else on_all
    is_first = is_present.all()
    spread = cusum.PACE_SPREAD if is_first else LAYOUT_SPREAD
    prior = np.zeros_like(on_all) if is_first else on_all
    error = MEDIAN_ERROR * sigma / np.sqrt(np.maximum(count, 1))
    part = np.where(count > 0, spread**2 / (spread**2 + error**2), 0.0)
    pace = part * here + (1.0 - part) * prior
    unknown = np.where(count > 0, error * np.sqrt(part), cusum.PACE_SPREAD)
    doubt = np.maximum(
        0.0, cusum.UNKNOWN_PACE / cusum.PACE_SPREAD * unknown - REFERENCES[0] * sigma
    )
    return np.where(np.abs(here) < MAX_OWN_PACE, pace, 0.0), doubt


def only(sample: StepSample, kept: Flags) -> StepSample:
    """Return the step of the kept ranks without micro-batches; of all ranks if none is kept."""
    if kept.all() or not kept.any():
        return replace(sample, parts=None)
    return replace(
        sample,
        parts=None,
        ranks=tuple(rank for rank, is_kept in zip(sample.ranks, kept, strict=True) if is_kept),
        features=sample.features[kept],
        observed_s=sample.observed_s[kept],
    )
