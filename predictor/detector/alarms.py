"""Opens, updates and closes the findings of ranks whose chart crossed its threshold. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import exp, inf, log, sqrt

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.core.text import format_s
from pacekeeper.predictor.cost.features import Array, StepSample
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.cusum import Charts
from pacekeeper.predictor.detector.excursions import wild_share
from pacekeeper.predictor.detector.intermittent import runs_beyond_chance, slow_steps
from pacekeeper.predictor.detector.microbatch_residuals import (
    LEAST_PARTS,
    MicrobatchResiduals,
    even_log_ratios,
)
from pacekeeper.predictor.detector.slowdown import (
    Slowdown,
    changed,
    is_over,
    measured,
    of_mean,
    required_steps_factor,
)
from pacekeeper.predictor.detector.state import (
    Evidence,
    among,
    lacks_reference,
    limits_of,
    median_of_steps,
    model_of,
    series_of,
    sigma_of,
    sigmas_of,
)
from pacekeeper.predictor.stats.peers import MIN_PEERS

AGREED_SIGMAS = 3.0  # that steps must show: the chart has decided already
UNEVEN = 0.25  # of a slowdown: what a slower device does to micro-batches differs by less
UNEVEN_SIGMAS = 3.0
MOST_PAUSES = 0.5  # of steps, however often ranks pause: a slowdown that lasts is found


def raise_alarms(
    config: DetectorConfig,
    evidence: Evidence,
    sample: StepSample,
    parts: MicrobatchResiduals | None,
    least: float = 1.0,
) -> tuple[Evidence, tuple[Finding, ...]]:
    """Open a finding for each rank whose chart crossed, unless most ranks crossed at once.

    Several steps must agree on the slowdown, or the micro-batches of the newest step. The last rank
    without a finding gets none while its expected time is not known (`lacks_reference`).

    Args:
        config: settings of the detector.
        evidence: detector state of the role, with the step in its charts.
        sample: the newest step.
        parts: residuals of its micro-batches, if reported.
        least: smallest slowdown (ratio) to report.
    """
    charts = evidence.charts
    crossed = cusum.suspicion(limits_of(evidence), charts) >= 1.0
    if crossed.sum() * 2 > len(charts.ranks) or lacks_reference(evidence, sample.ranks):
        return evidence, ()
    sigmas = sigmas_of(config, evidence)
    found = _now_and_then(evidence, sigmas, least)
    for i in np.flatnonzero(crossed & among(charts.ranks, sample.ranks)):
        sure, sigma = AGREED_SIGMAS, float(sigmas[i])
        at_most = sigma / limits_of(evidence).weight
        if required_steps_factor(config, at_most) > 1:  # the clock is noisy, or may well be
            sure, sigma = config.min_sigmas, at_most
        doubts = charts.recent_doubt[np.isfinite(charts.recent[:, i]), i]
        slowdown = measured(
            config,
            series_of(charts, int(i)),
            sigma=sigma,
            doubt=doubts,
            least=least,
            sure=sure,
        )
        if slowdown is None and parts is not None:
            slowdown = _within_step(config, charts, parts, int(i), sigma, least)
        if slowdown is not None and not _is_coincidence(evidence, slowdown):
            found[int(i)] = slowdown
    findings = tuple(_finding(config, evidence, sample, i, found[i], found) for i in sorted(found))
    slow = {charts.ranks[i]: found[i].value for i in found}
    return replace(evidence, slow={**evidence.slow, **slow}), findings


def _now_and_then(evidence: Evidence, sigmas: Array, least: float) -> dict[int, Slowdown]:
    """Return the slowdowns, by position, of ranks that are slow now and then."""
    charts, limits, found = evidence.charts, limits_of(evidence), dict[int, Slowdown]()
    of_one = sigmas / limits.weight
    runs = runs_beyond_chance(
        charts.recent,
        doubts=charts.recent_doubt,
        sigmas=of_one,
        is_healthy=~among(charts.ranks, evidence.slow),
        between=limits.between / charts.num_parts,
    )
    for i, run in runs.items():
        told = np.isfinite(charts.recent[:, i])
        recent, doubts = charts.recent[:, i], charts.recent_doubt[:, i]
        is_slow = slow_steps(recent, doubts=doubts, sigmas=of_one[i])[told]
        slowdown = of_mean(recent[told], is_slow, run, np.array(charts.recent_steps)[told])
        if slowdown.value >= least:
            found[i] = slowdown
    return found


def _is_coincidence(evidence: Evidence, slowdown: Slowdown) -> bool:
    """Return whether so many slow steps in a row come by chance, as often as healthy ranks of this
    job were slow for a moment: long before its thresholds know that. Micro-batches that agree are
    no moment.
    """
    charts = evidence.charts
    share = min(MOST_PAUSES, charts.num_parts * wild_share(charts.excursions))
    by_chance = share**slowdown.num_steps * limits_of(evidence).between > charts.num_parts
    return by_chance and not slowdown.num_parts


def _within_step(
    config: DetectorConfig,
    charts: Charts,
    parts: MicrobatchResiduals,
    i: int,
    sigma: float,
    least: float,
) -> Slowdown | None:
    """Estimate a slowdown from the micro-batches of the newest step alone.

    Returns None with a noisy clock, since noise of a shared host affects a step as a whole.
    """
    num_parts = len(parts.log_ratio)
    if num_parts < LEAST_PARTS or required_steps_factor(config, sigma) > 1:
        return None
    own, of_one = parts.log_ratio[:, i] - charts.baseline[i], sqrt(num_parts) * sigma
    # All of them, where the model knows the sum better than its parts; else those since an onset.
    whole, last = replace(config, min_steps=num_parts), replace(config, min_steps=LEAST_PARTS)
    found = measured(whole, own, sigma=of_one, doubt=float(charts.doubt[i]), least=least)
    if found is None:
        found = measured(last, own, sigma=of_one, doubt=parts.doubt[:, i], least=least)
    if found is None or _is_uneven(charts, parts, i, found.num_steps, of_one):
        return None
    return replace(found, num_steps=1, num_parts=found.num_steps)


def _is_uneven(
    charts: Charts, parts: MicrobatchResiduals, i: int, num_parts: int, sigma: float
) -> bool:
    """Return whether a rank's last micro-batches differ more than a uniform slowdown explains."""
    own, size = (
        (parts.log_ratio[:, i] - charts.baseline[i])[-num_parts:],
        parts.size[-num_parts:, i],
    )
    apart = own - even_log_ratios(own, size)
    allowed = max(UNEVEN * float(np.median(own)), UNEVEN_SIGMAS * sigma)
    allowed += float(parts.doubt[-num_parts:, i].mean())
    return float(np.sqrt(np.mean(apart**2))) > allowed


def _finding(
    config: DetectorConfig,
    evidence: Evidence,
    sample: StepSample,
    i: int,
    slowdown: Slowdown,
    accused: Collection[int],
) -> Finding:
    """Build the finding; CONFIRMED if MIN_PEERS healthy peers and one extra step support it."""
    charts, rank = evidence.charts, evidence.charts.ranks[i]
    at = sample.ranks.index(rank)
    observed_s = float(sample.observed_s[at])
    expected_s = float(model_of(evidence).expected_s(sample.features[at : at + 1])[0])
    peers = median_of_steps(charts.recent[-slowdown.num_steps :])
    is_peer = ~among(charts.ranks, evidence.slow)
    is_peer[list(accused)] = False
    witnesses = int((is_peer & (peers < 0.5 * log(slowdown.value))).sum())
    needed = config.min_steps * required_steps_factor(config, sigma_of(config, evidence))
    is_confirmed = slowdown.num_steps > needed and witnesses >= MIN_PEERS and not slowdown.num_slow
    own_steps = np.array(charts.recent_steps)[np.isfinite(charts.recent[:, i])]
    onset = int(own_steps[-slowdown.num_steps])
    low, high = slowdown.interval
    of, evident = f"median of {slowdown.num_steps} steps since step {onset}", _crossed(evidence, i)
    if slowdown.num_parts:
        of = f"median of {slowdown.num_parts} micro-batches of step {onset}"
    elif slowdown.num_slow:
        of = (
            f"mean of {slowdown.num_steps} steps since step {onset}, {slowdown.num_slow} of them "
            f"slow by x{slowdown.when_slow:.2f}"
        )
        evident = slowdown.pattern
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
            f"rank {rank} computed {format_s(observed_s)} where its work should take "
            f"{format_s(expected_s)}; x{slowdown.value:.2f} (95 %: {low:.3f} to {high:.3f}) in the "
            f"{of}; {beside}; {evident}"
        ),
    )


def _crossed(evidence: Evidence, i: int) -> str:
    """Describe the chart of a rank that is highest relative to its threshold."""
    rules, peaks = limits_of(evidence).rules, evidence.charts.peaks[:, i]
    rule, peak = max(zip(rules, peaks.tolist(), strict=True), key=lambda one: one[1] / one[0].h)
    return f"its chart of {2.0 * rule.k:g} sigma reached {peak:.1f}, threshold {rule.h:.1f}"


def _lateness_of_reference(config: DetectorConfig, evidence: Evidence) -> float:
    """Return how late (log) the last rank without a finding is, with which all others are compared;
    infinite if it is under suspicion, zero if there are several.
    """
    charts = evidence.charts
    witnesses = np.flatnonzero(~among(charts.ranks, evidence.slow))
    if len(witnesses) != 1:
        return 0.0
    if cusum.suspicion(limits_of(evidence), charts)[witnesses[0]] > cusum.QUIET_SUSPICION:
        return inf
    return float(median_of_steps(charts.recent[-config.recover_steps :])[witnesses[0]])


def update_alarms(
    config: DetectorConfig, evidence: Evidence
) -> tuple[Evidence, tuple[int, ...], Mapping[int, float]]:
    """Close or update each open finding, unless the last rank that it is compared with is late by
    more than half as much.

    Returns:
        The new state, the ranks that recovered, and the new slowdown (ratio) of those that changed.
    """
    charts, sigma = evidence.charts, sigma_of(config, evidence)
    late, recovered, moved = _lateness_of_reference(config, evidence), [], {}
    for rank, told in sorted(evidence.slow.items()):
        if rank not in charts.ranks or late > 0.5 * log(told):
            continue
        i = charts.ranks.index(rank)
        series = series_of(charts, i)
        # As of the model that judged each step: a newer one knows better, the log ratios do not.
        doubt = float(charts.recent_doubt[-config.measure_steps :, i].max())
        if is_over(config, series, slowdown=told, sigma=sigma, doubt=doubt):
            recovered.append(rank)
            continue
        now = changed(config, series, slowdown=told, sigma=sigma, doubt=doubt)
        if now is not None:
            moved[rank] = now
    slow = {r: moved.get(r, told) for r, told in evidence.slow.items() if r not in recovered}
    charts = cusum.recovered(charts, recovered)
    return replace(evidence, slow=slow, charts=charts), tuple(recovered), moved
