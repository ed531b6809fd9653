"""From steps to findings: log residuals, standardised and clipped, folded into CUSUM charts. Pure.

Two one-sided charts per rank (Page 1954): a fast one for large slowdowns, a slow one for small
ones. A rank is named only if a chart crosses its threshold, the slowdown is worth naming, and its
peers do not share it. While anyone is under suspicion nothing is learnt from him.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper.core.config import DetectorConfig
from pacekeeper.core.findings import Finding, FindingKind, Tier, Watch
from pacekeeper.predictor.cost_model import CostModel, fit, log_ratios
from pacekeeper.predictor.workload import Array, StepSample

REFIT_PERIOD_STEPS = 32
QUIET_SUSPICION = 0.5  # of a threshold: above it nothing is learnt
EVERYBODY_LATE = 1.15
CHART_CEILING = 2.0  # of the threshold
CHANGE_WORTH_TELLING = 1.10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Charts:
    """Per rank, in the order of `ranks`: both charts, where they left zero, and recent log ratios.

    recent [steps, ranks], newest last, NaN where a rank had no record.
    """

    ranks: tuple[int, ...]
    small: Array
    large: Array
    onset: Array
    baseline: Array
    recent: Array
    calm_steps: Array  # steps in a row below the recovery slowdown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """All the detector remembers of one role of one job. `slow`: open findings by rank."""

    num_seen: int = 0
    generation: int = 0
    warmup: tuple[StepSample, ...] = ()
    history: tuple[StepSample, ...] = ()
    model: CostModel | None = None
    charts: Charts | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    late_steps: int = 0
    fitted_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one step says. Columns follow `ranks`; expected, slowdown empty while measuring.

    `slowdown` is the running median of observed / expected. `changed`: open findings whose
    slowdown moved enough to tell.
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


def restore(slow: Mapping[int, float]) -> Evidence:
    """After a restart: open findings are remembered, all else is measured anew."""
    return Evidence(slow=dict(slow))


def forget(evidence: Evidence, ranks: Collection[int]) -> Evidence:
    """These ranks are gone; their findings with them."""
    slow = {rank: value for rank, value in evidence.slow.items() if rank not in ranks}
    charts = evidence.charts
    if charts is not None:
        left = tuple(rank for rank in charts.ranks if rank not in ranks)
        charts = _aligned(charts, left)
    return replace(evidence, slow=slow, charts=charts)


def fold(
    config: DetectorConfig, evidence: Evidence, sample: StepSample
) -> tuple[Evidence, Judgement]:
    """Take in one complete step. O(ranks)."""
    is_new_layout = evidence.generation not in (0, sample.generation)
    evidence = replace(evidence, num_seen=evidence.num_seen + 1, generation=sample.generation)
    if evidence.model is None:
        return _warm_up(config, evidence, sample)
    charts = _aligned(evidence.charts, sample.ranks, config.measure_steps)
    ratio = log_ratios(evidence.model, sample)
    if is_new_layout:
        # The first step on a new layout is a mixture: shown, neither judged nor learnt from.
        kept = replace(evidence, charts=charts)
        return kept, _judgement(config, kept, sample, reason="first step on a new layout")
    charts = _charted(config, evidence, charts, ratio, sample.step)
    evidence = replace(evidence, charts=charts)
    evidence, recovered = _recover(config, evidence)
    evidence, findings = _find(config, evidence, sample)
    evidence, changed = _remeasure(config, evidence)
    evidence = _learn(config, evidence, sample)
    judgement = _judgement(config, evidence, sample, reason="")
    return evidence, replace(judgement, findings=findings, recovered=recovered, changed=changed)


def _warm_up(
    config: DetectorConfig, evidence: Evidence, sample: StepSample
) -> tuple[Evidence, Judgement]:
    """Collect quiet steps; after the last one fit, and name who was slow from the start."""
    measuring = Judgement(
        step=sample.step,
        ranks=sample.ranks,
        observed_s=tuple(sample.observed_s.tolist()),
        reason=f"warm-up: {len(evidence.warmup)} of {config.warmup_steps} steps",
    )
    if evidence.num_seen <= config.skip_steps:
        return evidence, measuring
    warmup = (*evidence.warmup, sample)
    if len(warmup) < config.warmup_steps:
        return replace(evidence, warmup=warmup), measuring
    trusted = tuple(_without(s, evidence.slow) for s in warmup)
    model = fit(trusted)
    recent = np.array([_spread(s, sample.ranks, log_ratios(model, s)) for s in warmup])
    offset = np.nan_to_num(np.nanmedian(recent, axis=0))
    limit = np.log(config.min_slowdown)
    slow_from_start = (offset > limit) & ~np.isin(sample.ranks, list(evidence.slow))
    zeros = np.zeros(len(sample.ranks))
    charts = Charts(
        ranks=sample.ranks,
        # Over its threshold at once: a rank slow from the start has no history, only peers.
        small=np.where(slow_from_start, config.h_small, zeros),
        large=zeros,
        onset=np.where(slow_from_start, warmup[0].step, sample.step).astype(float),
        # A rank's own small offset is health, a large one is not.
        baseline=np.where(np.abs(offset) < limit, offset, 0.0),
        recent=recent[-config.measure_steps :],
        calm_steps=zeros,
    )
    evidence = replace(
        evidence, warmup=(), history=trusted, model=model, charts=charts, fitted_step=sample.step
    )
    evidence, findings = _find(config, evidence, sample)
    judgement = _judgement(config, evidence, sample, reason="cost model fitted")
    return evidence, replace(judgement, findings=findings)


def _charted(
    config: DetectorConfig, evidence: Evidence, charts: Charts, ratio: Array, step: int
) -> Charts:
    """Fold one step's log ratios into both charts."""
    assert evidence.model is not None, "charts begin after the warm-up"
    z = (ratio - charts.baseline) / _sigma(config, evidence.model)
    z = np.clip(z, -config.z_clip, config.z_clip)
    is_open = np.isin(charts.ranks, list(evidence.slow))
    # Bounded above, too: evidence of long ago must drain within a few steps.
    small = np.clip(charts.small + z - config.k_small, 0.0, CHART_CEILING * config.h_small)
    large = np.clip(charts.large + z - config.k_large, 0.0, CHART_CEILING * config.h_large)
    small, large = np.where(is_open, 0.0, small), np.where(is_open, 0.0, large)
    was_zero = (charts.small <= 0.0) & (charts.large <= 0.0)
    started = was_zero & ((small > 0.0) | (large > 0.0))
    is_calm = ratio - charts.baseline < np.log(config.recover_slowdown)
    return replace(
        charts,
        small=small,
        large=large,
        onset=np.where(started, step, charts.onset),
        recent=np.concatenate([charts.recent, ratio[None]])[-config.measure_steps :],
        calm_steps=np.where(is_calm, charts.calm_steps + 1, 0.0),
    )


def _find(
    config: DetectorConfig, evidence: Evidence, sample: StepSample
) -> tuple[Evidence, tuple[Finding, ...]]:
    """Name the ranks whose chart crossed, if it is worth it and not everybody's."""
    charts = evidence.charts
    assert charts is not None and evidence.model is not None, "after the warm-up"
    crossed = _suspicion(config, charts) >= 1.0
    if not crossed.any() or crossed.sum() * 2 > len(charts.ranks):
        return evidence, ()
    findings, slow = [], dict(evidence.slow)
    expected_s = evidence.model.expected_s(sample.features)
    for i in np.flatnonzero(crossed):
        rank = charts.ranks[i]
        slowdown = _measured(config, evidence.model, charts, int(i))
        if slowdown is None or rank in slow:
            continue
        onset = int(charts.onset[i])
        num_steps = sample.step - onset + 1
        slow[rank] = slowdown
        others = np.delete(np.nanmedian(charts.recent, axis=0), i)
        findings.append(
            Finding(
                kind=FindingKind.DEVICE,
                tier=Tier.PROBABLE,
                rank=rank,
                slowdown=slowdown,
                onset_step=onset,
                step=sample.step,
                reason=(
                    f"rank {rank} computed {sample.observed_s[i] * 1e3:.0f} ms where its work "
                    f"should take {expected_s[i] * 1e3:.0f} ms (x{slowdown:.2f}), "
                    f"for {num_steps} steps since step {onset}; "
                    + (
                        f"its {len(others)} peers stayed within x{np.exp(others.max()):.2f}"
                        if len(others)
                        else "it has no peers"
                    )
                ),
            )
        )
    return replace(evidence, slow=slow), tuple(findings)


def _recover(config: DetectorConfig, evidence: Evidence) -> tuple[Evidence, tuple[int, ...]]:
    """Close findings whose rank has been calm for `recover_steps` steps in a row."""
    charts = evidence.charts
    assert charts is not None and evidence.model is not None, "after the warm-up"
    needed = config.recover_steps * _patience(config, evidence.model)
    calm = dict(zip(charts.ranks, charts.calm_steps.tolist(), strict=True))
    recovered = tuple(rank for rank in sorted(evidence.slow) if calm.get(rank, 0.0) >= needed)
    slow = {rank: value for rank, value in evidence.slow.items() if rank not in recovered}
    return replace(evidence, slow=slow), recovered


def _remeasure(config: DetectorConfig, evidence: Evidence) -> tuple[Evidence, Mapping[int, float]]:
    """Open findings whose slowdown is now clearly another one."""
    charts = evidence.charts
    assert charts is not None, "after the warm-up"
    changed = {}
    for rank, told in evidence.slow.items():
        if rank not in charts.ranks:
            continue
        i = charts.ranks.index(rank)
        if np.isnan(charts.recent[:, i]).any() or len(charts.recent) < config.measure_steps:
            continue
        # All recent steps on the new level: a median alone would follow a single jump half-way.
        now = np.exp(charts.recent[:, i] - charts.baseline[i])
        low, high = float(now.min()), float(now.max())
        if low > told * CHANGE_WORTH_TELLING or high < told / CHANGE_WORTH_TELLING:
            value = float(np.median(now))
            if value >= config.recover_slowdown:
                changed[rank] = value
    return replace(evidence, slow={**evidence.slow, **changed}), changed


def _learn(config: DetectorConfig, evidence: Evidence, sample: StepSample) -> Evidence:
    """Keep quiet steps of unsuspected ranks; refit now and then."""
    charts = evidence.charts
    assert charts is not None, "after the warm-up"
    if float(_suspicion(config, charts).max(initial=0.0)) > QUIET_SUSPICION:
        return evidence
    trusted = _without(sample, evidence.slow)
    if len(trusted.ranks) < 2:
        return evidence
    history = (*evidence.history, trusted)[-config.history_steps :]
    evidence = replace(evidence, history=history)
    if sample.step - evidence.fitted_step < REFIT_PERIOD_STEPS:
        return evidence
    model = fit(history)
    assert evidence.model is not None, "after the warm-up"
    # Sigma is kept from the warm-up at the least: quiet steps were selected to be quiet.
    model = replace(model, sigma=max(model.sigma, evidence.model.sigma))
    return replace(evidence, model=model, fitted_step=sample.step)


def _judgement(
    config: DetectorConfig, evidence: Evidence, sample: StepSample, *, reason: str
) -> Judgement:
    charts, model = evidence.charts, evidence.model
    assert charts is not None and model is not None, "after the warm-up"
    expected_s = model.expected_s(sample.features)
    suspicion = _suspicion(config, charts)
    common = float(np.median(np.log(np.maximum(sample.observed_s, 1e-9) / expected_s)))
    if evidence.slow:
        watch = Watch.DEGRADED
    elif float(suspicion.max(initial=0.0)) > QUIET_SUSPICION:
        watch = Watch.SUSPICIOUS
    elif common > np.log(EVERYBODY_LATE):
        watch = Watch.SUSPICIOUS
        reason = f"all ranks are x{np.exp(common):.2f} late: host, fabric or input, not a rank"
    else:
        watch = Watch.HEALTHY
    recent = charts.recent if len(charts.recent) else np.zeros((1, len(charts.ranks)))
    slowdown = np.exp(np.nan_to_num(_nanmedian(recent)))
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


def _sigma(config: DetectorConfig, model: CostModel) -> float:
    return max(config.sigma_floor, model.sigma)


def _patience(config: DetectorConfig, model: CostModel) -> int:
    """A noisy clock must be believed half as fast."""
    return 2 if _sigma(config, model) > config.noisy_sigma else 1


def _suspicion(config: DetectorConfig, charts: Charts) -> Array:
    """The larger of the two charts, in units of its threshold."""
    suspicion: Array = np.maximum(charts.small / config.h_small, charts.large / config.h_large)
    return suspicion


def _measured(config: DetectorConfig, model: CostModel, charts: Charts, i: int) -> float | None:
    """The slowdown, if the last steps agree on one worth naming; None where they do not.

    All of them, so that neither an outlier nor the mixed step in which a fault begins counts; a
    noisy clock needs twice as many steps, and a slowdown well above its noise.
    """
    needed = config.min_steps * _patience(config, model)
    ratios = charts.recent[-needed:, i] - charts.baseline[i]
    if len(ratios) < needed or np.isnan(ratios).any():
        return None
    typical = float(np.median(ratios))
    if typical < max(np.log(config.min_slowdown), config.min_sigmas * _sigma(config, model)):
        return None
    return float(np.exp(typical)) if ratios.min() >= 0.5 * typical else None


def _without(sample: StepSample, slow: Mapping[int, float]) -> StepSample:
    """The sample without the ranks under a finding - unless nobody would be left."""
    kept = [i for i, rank in enumerate(sample.ranks) if rank not in slow]
    if len(kept) in (0, len(sample.ranks)):
        return sample
    return replace(
        sample,
        ranks=tuple(sample.ranks[i] for i in kept),
        features=sample.features[kept],
        observed_s=sample.observed_s[kept],
    )


def _spread(sample: StepSample, ranks: tuple[int, ...], values: Array) -> Array:
    """Values of a sample's ranks in the order of `ranks`; NaN where it lacks one."""
    by_rank = dict(zip(sample.ranks, values.tolist(), strict=True))
    return np.array([by_rank.get(rank, np.nan) for rank in ranks])


def _aligned(charts: Charts | None, ranks: tuple[int, ...], measure_steps: int = 1) -> Charts:
    """The charts for exactly `ranks`: known ranks keep theirs, new ones start at zero."""
    if charts is not None and charts.ranks == ranks:
        return charts
    known = {} if charts is None else {rank: i for i, rank in enumerate(charts.ranks)}
    at = [known.get(rank, -1) for rank in ranks]

    def pick(values: Array, missing: float) -> Array:
        return np.array([values[i] if i >= 0 else missing for i in at])

    if charts is None:
        empty = np.zeros(0)
        charts = Charts(
            ranks=(), small=empty, large=empty, onset=empty, baseline=empty,
            recent=np.zeros((measure_steps, 0)), calm_steps=empty,
        )  # fmt: skip
    recent = np.full((len(charts.recent), len(ranks)), np.nan)
    for column, i in enumerate(at):
        if i >= 0:
            recent[:, column] = charts.recent[:, i]
    return Charts(
        ranks=ranks,
        small=pick(charts.small, 0.0),
        large=pick(charts.large, 0.0),
        onset=pick(charts.onset, 0.0),
        baseline=pick(charts.baseline, 0.0),
        recent=recent,
        calm_steps=pick(charts.calm_steps, 0.0),
    )


def _nanmedian(values: Array) -> Array:
    """Median over steps; 0 where a rank has no value at all (and no warning)."""
    filled = np.where(np.isnan(values).all(axis=0), 0.0, values)
    median: Array = np.nanmedian(filled, axis=0)
    return median
