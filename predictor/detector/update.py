"""Turns steps into findings: residuals relative to peers are added to CUSUM charts. Pure.

A finding is opened for a rank if one of its charts crosses the threshold, the last steps agree on
a slowdown, and its peers do not share it. The cost model does not learn from ranks under suspicion;
its uncertainty for work that it has not seen is subtracted from the evidence.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log, sqrt

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import CoverageState, Finding
from pacekeeper.predictor.cost.features import Array, Positions, StepSample
from pacekeeper.predictor.cost.model import CostModel, fit, log_ratios, witnesses
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.alarms import raise_alarms, update_alarms
from pacekeeper.predictor.detector.cusum import Charts
from pacekeeper.predictor.detector.global_slowdown import (
    NO_NEWS,
    GlobalSlowdownChange,
    healthy,
    on_new_layout,
    update_global_slowdown,
)
from pacekeeper.predictor.detector.microbatch_residuals import (
    MicrobatchResiduals,
    microbatch_residuals,
)
from pacekeeper.predictor.detector.model_training import learn, only, refitted
from pacekeeper.predictor.detector.state import (
    Evidence,
    Judgement,
    among,
    limits_of,
    median_of_steps,
    model_of,
    sigma_of,
    sigmas_of,
)
from pacekeeper.predictor.stats.peers import MIN_PEERS

EVERYBODY_LATE = 1.15
AHEAD, AHEAD_SIGMAS = 1.15, 3.0  # faster than its peers a rank is noted to be
DOUBTS = 3.0  # sigmas of the model's own doubt that count as explained
MOST_FIRST_STEP = 1.25  # times a usual step: first steps that compile or fill caches take more
FIRST_STEP_SIGMAS = 4.0  # that a rank's first step may differ by from its peers
WANDER = 0.004  # of healthy ranks beside each other: repeated runs of one GPU differ by as much


def update_evidence(
    config: DetectorConfig, evidence: Evidence, sample: StepSample, *, least: float = 1.0
) -> tuple[Evidence, Judgement]:
    """Process one complete step. O(ranks log ranks) array work, no loop over healthy ranks.

    Args:
        config: settings of the detector.
        evidence: detector state of the role.
        sample: the step.
        least: smallest slowdown (ratio) to report; 1.0: whatever is significant.
    """
    is_new_layout = evidence.generation not in (0, sample.generation)
    evidence = replace(
        evidence,
        num_seen=evidence.num_seen + 1,
        generation=sample.generation,
        layout_steps=0 if is_new_layout else evidence.layout_steps + 1,
    )
    if evidence.model is None:
        return _warm_up(config, evidence, sample, is_new_layout, least)
    evidence, sample = _without_newcomers(config, evidence, sample)
    evidence = replace(evidence, charts=cusum.with_ranks(evidence.charts, sample.ranks))
    if is_new_layout:
        common = evidence.common and on_new_layout(evidence.common)
        evidence = replace(evidence, common=common, charts=cusum.on_new_layout(evidence.charts))
        # The first step on a new layout is a mixture: shown, neither judged nor learnt from.
        return evidence, _judgement(config, evidence, sample, reason="first step on a new layout")
    evidence, parts = _charted(config, evidence, sample)
    evidence, recovered, remeasured = update_alarms(config, evidence)
    evidence, findings = raise_alarms(config, evidence, sample, parts, least)
    evidence, news = _paced(config, evidence, sample)
    evidence = learn(config, evidence, sample)
    judgement = _judgement(config, evidence, sample, reason="")
    return evidence, replace(
        judgement, findings=findings, recovered=recovered, changed=remeasured, common=news
    )


def _without_newcomers(
    config: DetectorConfig, evidence: Evidence, sample: StepSample
) -> tuple[Evidence, StepSample]:
    """Leave out ranks that joined a running job until they have run `skip_steps` steps."""
    strangers = set(sample.ranks).difference(evidence.charts.ranks)
    since = {rank: evidence.newcomers.get(rank, evidence.num_seen) for rank in strangers}
    young = {r for r, seen in since.items() if evidence.num_seen - seen < config.skip_steps}
    if young:
        sample = only(sample, ~among(sample.ranks, young))
    if strangers or evidence.newcomers:
        evidence = replace(evidence, newcomers=since)
    return evidence, sample


def _warm_up(
    config: DetectorConfig,
    evidence: Evidence,
    sample: StepSample,
    is_new_layout: bool,
    least: float,
) -> tuple[Evidence, Judgement]:
    """Collect the steps of the warm-up; after the last one, fit the model and chart all of them.

    The `skip_steps` first ones are never charted; the newest of them, fewer than the warm-up has,
    are learnt from if they took what later ones take. A rank that is slow from the start, or since
    the middle of the warm-up, is found right away.
    """
    if not is_new_layout:
        evidence = replace(evidence, warmup=(*evidence.warmup, sample))
    num_first = min(config.skip_steps, len(evidence.warmup))
    first, warmup = evidence.warmup[:num_first], evidence.warmup[num_first:]
    if len(warmup) < config.warmup_steps:
        return evidence, Judgement(
            step=sample.step,
            ranks=sample.ranks,
            observed_s=tuple(sample.observed_s.tolist()),
            reason=f"warm-up: {len(warmup)} of {config.warmup_steps} steps",
        )
    history = _trusted(evidence, warmup)
    newest = _trusted(evidence, first)[1 - config.warmup_steps :]
    history = (*_usual_steps(newest, history), *history)
    fitted = refitted(config, replace(evidence, warmup=(), history=history))
    evidence, findings = _judge_warm_up(config, fitted, warmup, least)
    slow = evidence.slow
    if findings and len(set(sample.ranks) - slow.keys()) >= MIN_PEERS:
        # The model has learnt from the slow ranks: once more without them.
        others = tuple(only(step, ~among(step.ranks, slow)) for step in fitted.history)
        fitted = refitted(config, replace(fitted, history=others))
        evidence, again = _judge_warm_up(config, fitted, warmup, least)
        found = {finding.rank for finding in again}
        findings = (*again, *(finding for finding in findings if finding.rank not in found))
        evidence = replace(evidence, slow={**slow, **evidence.slow})
    judgement = _judgement(config, evidence, sample, reason="cost model fitted")
    return evidence, replace(judgement, findings=findings)


def _judge_warm_up(
    config: DetectorConfig, evidence: Evidence, warmup: Sequence[StepSample], least: float
) -> tuple[Evidence, tuple[Finding, ...]]:
    """Chart all steps of the warm-up, and name whom the charts show slow after the last one."""
    for past in warmup:
        evidence = replace(evidence, charts=cusum.with_ranks(evidence.charts, past.ranks))
        evidence, parts = _charted(config, evidence, past)
    return raise_alarms(config, evidence, warmup[-1], parts, least)


def _trusted(evidence: Evidence, steps: Sequence[StepSample]) -> tuple[StepSample, ...]:
    """Return what the cost model may learn from these steps while findings are open."""
    trusted = tuple(only(sample, ~among(sample.ranks, evidence.slow)) for sample in steps)
    if evidence.common is None:
        return trusted
    return tuple(healthy(evidence.common, sample) for sample in trusted)


def _usual_steps(
    first: Sequence[StepSample], history: Sequence[StepSample]
) -> tuple[StepSample, ...]:
    """Return the first steps that took what the steps of the history took."""
    if not first:
        return ()
    model = fit(history)
    return tuple(step for step in first if _is_usual(model, step))


def _is_usual(model: CostModel, first: StepSample) -> bool:
    """Return whether all ranks of a first step took about their expected time, and each agrees with
    its peers within the noise.
    """
    ratio = np.log(np.maximum(first.observed_s, 1e-9) / model.expected_s(first.features))
    noise = np.hypot(
        FIRST_STEP_SIGMAS * max(model.sigma, WANDER), DOUBTS * model.doubt(first.features)
    )
    apart = np.abs(log_ratios(model, first))
    return bool(np.median(np.abs(ratio)) < log(MOST_FIRST_STEP) and (apart < noise).all())


def _charted(
    config: DetectorConfig, evidence: Evidence, sample: StepSample
) -> tuple[Evidence, MicrobatchResiduals | None]:
    """Add the step to the charts; also return the residuals of its micro-batches."""
    model, charts = model_of(evidence), evidence.charts
    sigmas = sigmas_of(config, evidence)
    ratio = log_ratios(model, sample, evidence.slow)
    own = np.searchsorted(charts.ranks, sample.ranks)
    known = np.hypot(WANDER, charts.baseline_doubt[own])
    unseen = DOUBTS * model.doubt(sample.features, witnesses(sample, evidence.slow))
    doubt = np.hypot(known, unseen)
    parts = microbatch_residuals(model, sample, evidence.slow)
    if parts is not None:
        parts = replace(parts, doubt=np.hypot(known, DOUBTS * parts.doubt))
    if charts.ranks != sample.ranks:
        ratio, doubt = _scattered(ratio, own, charts), _scattered(doubt, own, charts)
        parts = parts and parts.at(own, len(charts.ranks))
    clipped = parts and parts.clipped(sqrt(len(parts.log_ratio)) * sigmas)
    charts = cusum.advance(
        limits_of(evidence),
        charts,
        step=sample.step,
        log_ratio=ratio if clipped is None else clipped.of_step,
        doubt=doubt,
        sigma=sigmas,
        is_open=among(charts.ranks, evidence.slow),
        parts=clipped,
    )
    return replace(evidence, charts=charts), parts


def _paced(
    config: DetectorConfig, evidence: Evidence, sample: StepSample
) -> tuple[Evidence, GlobalSlowdownChange]:
    """Update the detection of slowdowns that all ranks share."""
    if evidence.common is None:
        return evidence, NO_NEWS
    model = model_of(evidence)
    common, news = update_global_slowdown(config, evidence.common, model, sample, evidence.slow)
    return replace(evidence, common=common), news


def _judgement(
    config: DetectorConfig, evidence: Evidence, sample: StepSample, *, reason: str
) -> Judgement:
    charts, model = evidence.charts, model_of(evidence)
    at = np.searchsorted(charts.ranks, sample.ranks)
    expected_s = model.expected_s(sample.features)
    suspicion = cusum.suspicion(limits_of(evidence), charts)[at]
    common = float(np.median(np.log(np.maximum(sample.observed_s, 1e-9) / expected_s)))
    late = median_of_steps(charts.recent[-config.measure_steps :])[at]
    together = 1.0 if evidence.common is None else evidence.common.slowdown
    if evidence.slow or together > 1.0:
        watch = CoverageState.DEGRADED
        if together > 1.0:
            reason = f"all ranks together are x{together:.2f} slow"
    elif common > log(EVERYBODY_LATE):
        watch = CoverageState.SUSPICIOUS
        reason = f"all ranks are x{exp(common):.2f} late: host, fabric or input, not a rank"
        if len(sample.ranks) == 1:
            reason = f"rank {sample.ranks[0]} is x{exp(common):.2f} late, and has no peer"
    elif float(suspicion.max(initial=0.0)) > cusum.QUIET_SUSPICION:
        watch = CoverageState.SUSPICIOUS
        worst = int(np.argmax(suspicion))
        reason = f"rank {sample.ranks[worst]} is under suspicion"
    else:
        watch, reason = CoverageState.HEALTHY, reason or model.note
        fastest = int(np.argmin(late))
        if not reason and -late[fastest] > max(
            log(AHEAD), AHEAD_SIGMAS * sigma_of(config, evidence)
        ):
            rank, ahead = sample.ranks[fastest], exp(-late[fastest])
            reason = f"rank {rank} is x{ahead:.2f} faster than its peers; were they ever healthy?"
    return Judgement(
        step=sample.step,
        ranks=sample.ranks,
        observed_s=tuple(sample.observed_s.tolist()),
        expected_s=tuple(expected_s.tolist()),
        slowdown=tuple(np.exp(late).tolist()),
        suspicion=tuple(suspicion.tolist()),
        watch=watch,
        reason=reason,
    )


def _scattered(values: Array, at: Positions, charts: Charts) -> Array:
    full = np.full(len(charts.ranks), np.nan)
    full[at] = values
    return full
