"""From steps to findings: log ratios folded into charts, judged beside the peers. Pure.

A rank is named only if a chart crosses its threshold, the last steps agree on a slowdown worth
naming, and its peers do not share it. Nothing is learnt from a rank under suspicion, and what the
model can not know of work it has never seen accuses nobody.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import exp, log

import numpy as np

from pacekeeper.core.config import DetectorConfig
from pacekeeper.core.findings import Finding, FindingKind, Tier, Watch
from pacekeeper.predictor import charts as cusum
from pacekeeper.predictor.charts import Charts
from pacekeeper.predictor.cost_model import CostModel, fit, log_ratios
from pacekeeper.predictor.peers import MIN_PEERS
from pacekeeper.predictor.slowdown import Slowdown, changed, is_over, measured, patience
from pacekeeper.predictor.thresholds import Thresholds, thresholds
from pacekeeper.predictor.workload import Array, Flags, Positions, StepSample

REFIT_PERIOD_STEPS = 32
NEW_LAYOUT_REFITS = (4, 8, 16)  # steps after a new layout: it teaches what the old one could not
TRUSTED_WARMUPS = 2  # a history as long as so many warm-ups may correct an unlucky sigma downwards
MAX_HISTORY_ROWS = 1 << 17  # steps x ranks kept for a refit
COUNTED_STEPS = 4  # steps that would all have to lack a micro-batch to be counted wrong
QUIET_SUSPICION = 0.5  # of a threshold: above it nothing is learnt from a rank
EVERYBODY_LATE = 1.15
DOUBTS = 3.0  # sigmas of the model's own doubt that count as explained


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """All the detector remembers of one role of one job. `slow`: open findings by rank.

    `generation` 0: none seen yet. `layout_steps`: steps since its generation began.
    """

    num_seen: int = 0
    generation: int = 0
    layout_steps: int = 0
    warmup: tuple[StepSample, ...] = ()
    history: tuple[StepSample, ...] = ()
    model: CostModel | None = None
    charts: Charts = field(default_factory=cusum.no_charts)
    limits: Thresholds | None = None  # of the charts, as of the present model
    slow: Mapping[int, float] = field(default_factory=dict)
    steps_since_fit: int = 0
    fitted_steps: int = 0  # steps the present model was fitted to


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one step says. Columns follow `ranks`; expected, slowdown, suspicion empty in warm-up.

    `slowdown` is the running median of observed / expected over `measure_steps`, beside the peers.
    `findings` are new ones; `recovered`: ranks whose open finding ended; `changed`: open findings
    whose slowdown moved enough to tell.
    """

    step: int
    ranks: tuple[int, ...]
    observed_s: tuple[float, ...]
    expected_s: tuple[float, ...] = ()
    slowdown: tuple[float, ...] = ()
    suspicion: tuple[float, ...] = ()
    findings: tuple[Finding, ...] = ()
    recovered: tuple[int, ...] = ()
    changed: Mapping[int, float] = field(default_factory=dict)
    watch: Watch = Watch.MEASURING
    reason: str = ""


def begin() -> Evidence:
    """Nothing known yet."""
    return Evidence()


def microbatches_per_step(evidence: Evidence) -> int:
    """How many each rank runs, as counted in the newest steps that were learnt from; 1 at first."""
    newest = evidence.history[-COUNTED_STEPS:]
    return max((sample.num_microbatches for sample in newest), default=1)


def restore(slow: Mapping[int, float]) -> Evidence:
    """After a restart: open findings are remembered, all else is measured anew.

    The ranks of open findings teach the new model nothing.
    """
    return Evidence(slow=dict(slow))


def forget(evidence: Evidence, ranks: Collection[int]) -> Evidence:
    """These ranks are gone; their findings with them."""
    slow = {rank: value for rank, value in evidence.slow.items() if rank not in ranks}
    return replace(evidence, slow=slow, charts=cusum.without_ranks(evidence.charts, ranks))


def fold(
    config: DetectorConfig, evidence: Evidence, sample: StepSample
) -> tuple[Evidence, Judgement]:
    """Take in one complete step. O(ranks log ranks) array work, no loop over healthy ranks."""
    is_new_layout = evidence.generation not in (0, sample.generation)
    evidence = replace(
        evidence,
        num_seen=evidence.num_seen + 1,
        generation=sample.generation,
        layout_steps=0 if is_new_layout else evidence.layout_steps + 1,
    )
    if evidence.model is None:
        return _warm_up(config, evidence, sample, is_new_layout)
    evidence = replace(evidence, charts=cusum.with_ranks(evidence.charts, sample.ranks))
    if is_new_layout:
        # The first step on a new layout is a mixture: shown, neither judged nor learnt from.
        return evidence, _judgement(config, evidence, sample, reason="first step on a new layout")
    evidence = _charted(config, evidence, sample)
    evidence, recovered, remeasured = _review(config, evidence)
    evidence, findings = _find(config, evidence, sample)
    evidence = _learn(config, evidence, sample)
    judgement = _judgement(config, evidence, sample, reason="")
    return evidence, replace(judgement, findings=findings, recovered=recovered, changed=remeasured)


def _warm_up(
    config: DetectorConfig, evidence: Evidence, sample: StepSample, is_new_layout: bool
) -> tuple[Evidence, Judgement]:
    """Collect steps; after the last one fit, and play them through the charts.

    So a rank that is slow from the start, or since the middle of the warm-up, is named right away.
    """
    if evidence.num_seen > config.skip_steps and not is_new_layout:
        evidence = replace(evidence, warmup=(*evidence.warmup, sample))
    warmup = evidence.warmup
    if len(warmup) < config.warmup_steps:
        return evidence, Judgement(
            step=sample.step,
            ranks=sample.ranks,
            observed_s=tuple(sample.observed_s.tolist()),
            reason=f"warm-up: {len(warmup)} of {config.warmup_steps} steps",
        )
    trusted = tuple(_only(s, ~_among(s.ranks, evidence.slow)) for s in warmup)
    evidence = replace(evidence, warmup=(), history=trusted)
    evidence = _refitted(config, evidence, may_shrink=True)
    for past in warmup:
        evidence = replace(evidence, charts=cusum.with_ranks(evidence.charts, past.ranks))
        evidence = _charted(config, evidence, past)
    evidence, findings = _find(config, evidence, sample)
    judgement = _judgement(config, evidence, sample, reason="cost model fitted")
    return evidence, replace(judgement, findings=findings)


def _charted(config: DetectorConfig, evidence: Evidence, sample: StepSample) -> Evidence:
    model, charts = _model(evidence), evidence.charts
    ratio = log_ratios(model, sample, evidence.slow)
    doubt = DOUBTS * model.doubt(sample.features)
    if charts.ranks != sample.ranks:
        at = np.searchsorted(charts.ranks, sample.ranks)
        ratio, doubt = _scattered(ratio, at, charts), _scattered(doubt, at, charts)
    charts = cusum.advance(
        _limits(evidence),
        charts,
        step=sample.step,
        log_ratio=ratio,
        doubt=doubt,
        sigma=_sigma(config, evidence),
        is_open=_among(charts.ranks, evidence.slow),
    )
    return replace(evidence, charts=charts)


def _find(
    config: DetectorConfig, evidence: Evidence, sample: StepSample
) -> tuple[Evidence, tuple[Finding, ...]]:
    """Name the ranks whose chart crossed, if it is worth it and not everybody's."""
    charts = evidence.charts
    crossed = cusum.suspicion(_limits(evidence), charts) >= 1.0
    if not crossed.any() or crossed.sum() * 2 > len(charts.ranks):
        return evidence, ()
    sigma = _sigma(config, evidence)
    found: dict[int, Slowdown] = {}
    for i in np.flatnonzero(crossed & _among(charts.ranks, sample.ranks)):
        doubts = charts.recent_doubt[np.isfinite(charts.recent[:, i]), i]
        slowdown = measured(config, _series(charts, int(i)), sigma=sigma, doubt=doubts)
        if slowdown is not None:
            found[int(i)] = slowdown
    findings = tuple(_finding(config, evidence, sample, i, found[i], found) for i in found)
    slow = {finding.rank: finding.slowdown for finding in findings}
    return replace(evidence, slow={**evidence.slow, **slow}), findings


def _finding(
    config: DetectorConfig,
    evidence: Evidence,
    sample: StepSample,
    i: int,
    slowdown: Slowdown,
    accused: Collection[int],
) -> Finding:
    """Confirmed where two healthy peers contradict it for a step more than had to be."""
    charts, rank = evidence.charts, evidence.charts.ranks[i]
    at = sample.ranks.index(rank)
    observed_ms = float(sample.observed_s[at]) * 1e3
    expected_ms = float(_model(evidence).expected_s(sample.features[at : at + 1])[0]) * 1e3
    peers = _nanmedian(charts.recent[-slowdown.num_steps :])
    is_peer = ~_among(charts.ranks, evidence.slow)
    is_peer[list(accused)] = False
    witnesses = int((is_peer & (peers < 0.5 * log(slowdown.value))).sum())
    needed = config.min_steps * patience(config, _sigma(config, evidence))
    is_confirmed = slowdown.num_steps > needed and witnesses >= MIN_PEERS
    own_steps = np.array(charts.recent_steps)[np.isfinite(charts.recent[:, i])]
    onset = int(own_steps[-slowdown.num_steps])
    if witnesses:
        worst = exp(float(peers[is_peer].max()))
        beside = f"its {witnesses} healthy peers stayed within x{max(1.0, worst):.2f}"
    else:
        beside = "it has no healthy peer to compare with"
    return Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.CONFIRMED if is_confirmed else Tier.PROBABLE,
        rank=rank,
        slowdown=slowdown.value,
        onset_step=onset,
        step=sample.step,
        reason=(
            f"rank {rank} computed {observed_ms:.0f} ms where its work should take "
            f"{expected_ms:.0f} ms; x{slowdown.value:.2f} in the median of {slowdown.num_steps} "
            f"steps since step {onset}; {beside}"
        ),
    )


def _review(
    config: DetectorConfig, evidence: Evidence
) -> tuple[Evidence, tuple[int, ...], Mapping[int, float]]:
    """Look again at every open finding: is it over, is it another one now?"""
    charts, sigma = evidence.charts, _sigma(config, evidence)
    recovered, moved = [], {}
    for rank in sorted(evidence.slow):
        if rank not in charts.ranks:
            continue
        i = charts.ranks.index(rank)
        series, doubt, told = _series(charts, i), float(charts.doubt[i]), evidence.slow[rank]
        if is_over(config, series, slowdown=told, sigma=sigma, doubt=doubt):
            recovered.append(rank)
            continue
        now = changed(config, series, slowdown=told, sigma=sigma, doubt=doubt)
        if now is not None:
            moved[rank] = now
    slow = {r: moved.get(r, told) for r, told in evidence.slow.items() if r not in recovered}
    return replace(evidence, slow=slow), tuple(recovered), moved


def _learn(config: DetectorConfig, evidence: Evidence, sample: StepSample) -> Evidence:
    """Keep the step of all unsuspected ranks - most of them, or nothing; refit now and then."""
    charts = evidence.charts
    is_quiet = cusum.suspicion(_limits(evidence), charts) <= QUIET_SUSPICION
    is_quiet &= ~_among(charts.ranks, evidence.slow)
    quiet = _among(sample.ranks, np.array(charts.ranks)[is_quiet])
    evidence = replace(evidence, steps_since_fit=evidence.steps_since_fit + 1)
    if quiet.sum() * 2 <= len(quiet):
        return evidence
    limit = max(
        config.warmup_steps, min(config.history_steps, MAX_HISTORY_ROWS // len(sample.ranks))
    )
    history = (*evidence.history, _only(sample, quiet))[-limit:]
    evidence = replace(evidence, history=history)
    due = evidence.steps_since_fit >= min(REFIT_PERIOD_STEPS, evidence.fitted_steps)
    is_new = evidence.layout_steps in NEW_LAYOUT_REFITS and evidence.generation > 1
    if not due and not is_new:
        return evidence
    return _refitted(
        config, evidence, may_shrink=len(history) >= TRUSTED_WARMUPS * config.warmup_steps
    )


def _refitted(config: DetectorConfig, evidence: Evidence, *, may_shrink: bool) -> Evidence:
    """Fit to the history. A small own pace of a rank is its health, a large one is not."""
    model = fit(evidence.history)
    if not may_shrink and evidence.model is not None:
        model = replace(model, sigma=max(model.sigma, evidence.model.sigma))
    limit = log(config.min_slowdown)
    charts = cusum.with_ranks(evidence.charts, tuple(model.multipliers))
    own = [log(model.multipliers.get(rank, 1.0)) for rank in charts.ranks]
    is_known = _among(charts.ranks, model.multipliers)
    baseline = np.where(is_known, np.where(np.abs(own) < limit, own, 0.0), charts.baseline)
    charts = cusum.rebased(charts, baseline)
    limits = thresholds(
        config.false_alarms_per_job_day,
        evidence.history,
        sigma=max(config.sigma_floor, model.sigma),
        residuals=charts.recent[:, ~_among(charts.ranks, evidence.slow)],
    )
    return replace(
        evidence,
        model=model,
        limits=limits,
        charts=charts,
        steps_since_fit=0,
        fitted_steps=len(evidence.history),
    )


def _judgement(
    config: DetectorConfig, evidence: Evidence, sample: StepSample, *, reason: str
) -> Judgement:
    charts, model = evidence.charts, _model(evidence)
    at = np.searchsorted(charts.ranks, sample.ranks)
    expected_s = model.expected_s(sample.features)
    suspicion = cusum.suspicion(_limits(evidence), charts)[at]
    common = float(np.median(np.log(np.maximum(sample.observed_s, 1e-9) / expected_s)))
    if evidence.slow:
        watch = Watch.DEGRADED
    elif common > log(EVERYBODY_LATE):
        watch = Watch.SUSPICIOUS
        reason = f"all ranks are x{exp(common):.2f} late: host, fabric or input, not a rank"
    elif float(suspicion.max(initial=0.0)) > QUIET_SUSPICION:
        watch = Watch.SUSPICIOUS
        worst = int(np.argmax(suspicion))
        reason = f"rank {sample.ranks[worst]} is under suspicion"
    else:
        watch = Watch.HEALTHY
    slowdown = np.exp(_nanmedian(charts.recent[-config.measure_steps :])[at])
    return Judgement(
        step=sample.step,
        ranks=sample.ranks,
        observed_s=tuple(sample.observed_s.tolist()),
        expected_s=tuple(expected_s.tolist()),
        slowdown=tuple(slowdown.tolist()),
        suspicion=tuple(suspicion.tolist()),
        watch=watch,
        reason=reason,
    )


def _model(evidence: Evidence) -> CostModel:
    assert evidence.model is not None, "only after the warm-up"
    return evidence.model


def _limits(evidence: Evidence) -> Thresholds:
    assert evidence.limits is not None, "made with the model"
    return evidence.limits


def _sigma(config: DetectorConfig, evidence: Evidence) -> float:
    return max(config.sigma_floor, _model(evidence).sigma)


def _series(charts: Charts, i: int) -> Array:
    """A rank's recent log ratios without the steps it lacks, newest last."""
    series: Array = charts.recent[:, i]
    return series[np.isfinite(series)]


def _among(ranks: Collection[int], chosen: Collection[int]) -> Flags:
    if len(chosen) == 0:
        return np.zeros(len(ranks), dtype=np.bool_)
    return np.isin(list(ranks), list(chosen))


def _only(sample: StepSample, kept: Flags) -> StepSample:
    """The sample of the kept ranks - all of them where nobody would be left."""
    if kept.all() or not kept.any():
        return sample
    return replace(
        sample,
        ranks=tuple(rank for rank, is_kept in zip(sample.ranks, kept, strict=True) if is_kept),
        features=sample.features[kept],
        observed_s=sample.observed_s[kept],
    )


def _scattered(values: Array, at: Positions, charts: Charts) -> Array:
    full = np.full(len(charts.ranks), np.nan)
    full[at] = values
    return full


def _nanmedian(values: Array) -> Array:
    """Median over steps [steps, ranks] -> [ranks]; 0 where a rank has no value (and no warning)."""
    if len(values) == 0:
        return np.zeros(values.shape[1])
    filled = np.where(np.isnan(values).all(axis=0), 0.0, values)
    median: Array = np.nanmedian(filled, axis=0)
    return median
