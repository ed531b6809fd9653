"""What a step teaches the cost model: quiet ranks only, refitted now and then. Pure."""

from dataclasses import replace
from math import log

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import Flags, StepSample
from pacekeeper.predictor.cost.model import fit
from pacekeeper.predictor.online import cusum
from pacekeeper.predictor.online.global_slowdown import healthy, settled
from pacekeeper.predictor.online.state import Evidence, among, limits_of
from pacekeeper.predictor.online.thresholds import thresholds

REFIT_PERIOD_STEPS = 32
NEW_LAYOUT_REFITS = (4, 8, 16)  # steps after a new layout: it teaches what the old one could not
TRUSTED_WARMUPS = 2  # a history as long as so many warm-ups may correct an unlucky sigma downwards
MAX_HISTORY_ROWS = 1 << 17  # steps x ranks kept for a refit


def learn(config: DetectorConfig, evidence: Evidence, sample: StepSample) -> Evidence:
    """Keep the step of all unsuspected ranks - most of them, or nothing; refit now and then.

    Nothing while all of them may be about to be found slow together.
    """
    charts = evidence.charts
    is_quiet = cusum.suspicion(limits_of(evidence), charts) <= cusum.QUIET_SUSPICION
    is_quiet &= ~among(charts.ranks, evidence.slow)
    quiet = among(sample.ranks, np.array(charts.ranks)[is_quiet])
    evidence, common = (
        replace(evidence, steps_since_fit=evidence.steps_since_fit + 1),
        evidence.common,
    )
    if quiet.sum() * 2 <= len(quiet) or (common is not None and common.is_held):
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
    return refitted(
        config, evidence, may_shrink=len(history) >= TRUSTED_WARMUPS * config.warmup_steps
    )


def refitted(config: DetectorConfig, evidence: Evidence, *, may_shrink: bool) -> Evidence:
    """Fit to the history. A small own pace of a rank is its health, a large one is not."""
    model = fit(evidence.history, config.cost_model)
    if not may_shrink and evidence.model is not None:
        model = replace(model, sigma=max(model.sigma, evidence.model.sigma))
    limit = log(config.min_slowdown)
    charts = cusum.with_ranks(evidence.charts, tuple(model.multipliers))
    own = [log(model.multipliers.get(rank, 1.0)) for rank in charts.ranks]
    is_known = among(charts.ranks, model.multipliers)
    baseline = np.where(is_known, np.where(np.abs(own) < limit, own, 0.0), charts.baseline)
    charts = cusum.rebased(charts, baseline)
    is_trusted = ~among(charts.ranks, evidence.slow)
    limits = thresholds(
        config.false_alarms_per_job_day,
        evidence.history,
        sigma=max(config.sigma_floor, model.sigma),
        residuals=charts.recent[:, is_trusted],
        parts=charts.recent_parts[:, is_trusted] if charts.num_parts > 1 else None,
        parts_per_step=charts.num_parts,
    )
    common = evidence.common and settled(
        config, evidence.common, model, evidence.history, limits, evidence.generation
    )
    return replace(
        evidence,
        model=model,
        limits=limits,
        common=common,
        charts=charts,
        steps_since_fit=0,
        fitted_steps=len(evidence.history),
    )


def only(sample: StepSample, kept: Flags) -> StepSample:
    """The step of the kept ranks - all of them where nobody would be left - without its parts."""
    if kept.all() or not kept.any():
        return replace(sample, parts=None)
    return replace(
        sample,
        parts=None,
        ranks=tuple(rank for rank, is_kept in zip(sample.ranks, kept, strict=True) if is_kept),
        features=sample.features[kept],
        observed_s=sample.observed_s[kept],
    )
