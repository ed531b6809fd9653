"""Detects ranks of a running job that wait for input and delay all others. Pure.

The detector of compute times is applied to the time that a step would take if all ranks waited for
input as long as this rank, over the step's time without its input. If all ranks wait, the finding
is of the whole job (a slow storage), not of one rank's loader.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind
from pacekeeper.core.text import format_s
from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample
from pacekeeper.predictor.detector.global_slowdown import GlobalSlowdownChange
from pacekeeper.predictor.detector.state import Evidence, Judgement, begin, restore
from pacekeeper.predictor.detector.update import update_evidence

REST_STEPS = 64  # newest steps that say what steps take beside their input
MIN_STEPS = 4  # that must agree: loaders stall now and then
MIN_SLOWDOWN = 1.10  # of a step by its input: waits wander more than computing
WARMUP_STEPS = 12  # that show how waits vary
SIGMA_FLOOR = 0.015


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """`rests_s`: of the newest healthy steps, without the wait for input, newest last."""

    evidence: Evidence = field(default_factory=begin)
    rests_s: tuple[float, ...] = ()


def restored_inputs(slow: dict[int, float], *, everybody: float) -> Inputs:
    """After a restart: the open findings by rank, and that of all together (1.0: none)."""
    return Inputs(evidence=restore(slow, everybody=everybody))


def update_inputs(
    config: DetectorConfig,
    inputs: Inputs,
    *,
    step: int,
    generation: int,
    ranks: Sequence[int],
    duration_s: Array,
    input_s: Array,
) -> tuple[Inputs, Judgement | None]:
    """Process one step; findings are of kind INPUT.

    Args:
        config: settings of the detector.
        inputs: detector state of input waits.
        step, generation: of the step.
        ranks: ranks that ended the step, ascending.
        duration_s: step time in seconds [ranks].
        input_s: the wait for input in it, in seconds [ranks]; NaN: not reported.

    Returns:
        The new state, and the judgement; None unless all ranks reported their wait, and one of them
        did more than wait.
    """
    if not len(ranks) or not (np.isfinite(input_s).all() and (input_s >= 0.0).all()):
        return inputs, None
    # Who is waited for waits for nobody: its step has the least beside the input.
    rest_s = float(np.maximum(duration_s - input_s, 0.0).min())
    usual_s = float(np.median((*inputs.rests_s, rest_s)))
    if usual_s <= 0.0:
        return inputs, None  # nothing but waiting: there is no step to compare it with
    features = np.zeros((len(ranks), len(FEATURES)))
    features[:, FEATURES.index("one")] = 1.0
    sample = StepSample(
        step=step,
        generation=generation,
        ranks=tuple(ranks),
        features=features,
        observed_s=1.0 + input_s / usual_s,
    )
    config = replace(
        config,
        warmup_steps=max(WARMUP_STEPS, config.warmup_steps),
        sigma_floor=max(SIGMA_FLOOR, config.sigma_floor),
        min_steps=max(MIN_STEPS, config.min_steps),
    )
    evidence, judgement = update_evidence(config, inputs.evidence, sample, least=MIN_SLOWDOWN)
    waited_s = dict(zip(ranks, input_s.tolist(), strict=True))
    findings = tuple(
        _of_rank(finding, waited_s[finding.rank], float(np.median(input_s)))
        for finding in judgement.findings
        if finding.rank is not None
    )
    common = _of_everybody(judgement.common, float(np.median(input_s)))
    common_is_slow = evidence.common is not None and evidence.common.is_open
    rests_s = inputs.rests_s
    if not evidence.slow and not common_is_slow:
        rests_s = (*rests_s, rest_s)[-REST_STEPS:]
    judgement = replace(judgement, findings=findings, common=common)
    return Inputs(evidence=evidence, rests_s=rests_s), judgement


def _of_rank(finding: Finding, own_s: float, typical_s: float) -> Finding:
    reason = (
        f"rank {finding.rank} waits {format_s(own_s)} for its input, its peers "
        f"{format_s(typical_s)}: steps take x{finding.slowdown:.2f} by it since step "
        f"{finding.onset_step}; its loader, storage or host, not its device"
    )
    return replace(finding, kind=FindingKind.INPUT, reason=reason)


def _of_everybody(news: GlobalSlowdownChange, typical_s: float) -> GlobalSlowdownChange:
    found = news.found
    if found is None:
        return news
    reason = (
        f"all ranks wait for their input, {format_s(typical_s)} in step {found.step}: steps "
        f"take x{found.slowdown:.2f} by it since step {found.onset_step}; shared "
        "storage, the network to it, or loaders that can not keep up; no rank's device"
    )
    return replace(news, found=replace(found, kind=FindingKind.INPUT, reason=reason))
