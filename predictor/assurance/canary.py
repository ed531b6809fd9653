"""Canaries: slowdowns applied to copies of records, which the detector must find. Pure.

The copy goes the whole real road - records, sample, ratios, charts, finding - beside the evidence
of the job, which never sees it: a canary opens no incident, teaches no model and moves no work.
Silence of the detector is health only while its canaries are found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Blindness
from pacekeeper.predictor.assurance.sensitivity import Blind, Sensitivity
from pacekeeper.predictor.cost.features import FeatureTable, sample_of_work
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.state import Evidence, among, limits_of
from pacekeeper.predictor.detector.update import update_evidence

OVERDUE_PERIODS = 3  # without a canary that came to its end: then nothing is proved any more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Canary:
    """One that is under way: since the step after `began_step` the copy's `rank` is slower."""

    rank: int
    sensitivity: Sensitivity  # what is put in, and within how many steps it must be found
    began_step: int
    evidence: Evidence
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """How a canary ended at `step`: found after `num_steps` steps, or not found within them."""

    rank: int
    slowdown: float
    is_found: bool
    num_steps: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Canaries:
    """Those of one job. `turn` counts them all, also those that were cut short.

    `due_step`: when the next one may begin; `since_step`: when the last one ended, or the first
    one could have begun; None: none could yet.
    """

    running: Canary | None = None
    turn: int = 0
    due_step: int = 0
    since_step: int | None = None
    last: CanaryResult | None = None


def advance_canaries(
    config: DetectorConfig,
    canaries: Canaries,
    evidence: Evidence,
    work: FeatureTable,
    *,
    sensitivity: Sensitivity | None,
    ranks: Sequence[int],
    seed: int,
) -> Canaries:
    """Advance the running canary by one judged step, or begin the next one when it is due.

    Args:
        config: settings of the detector.
        canaries: those of the job.
        evidence: detector state of the job after the step.
        work: the step as reported.
        sensitivity: the smallest detectable slowdown; None: unknown, and no canary begins.
        ranks: ranks that may be chosen, in turns; those under suspicion are passed over.
        seed: where the turns begin.
    """
    if not config.canary_period_steps:
        return canaries
    step, running = work.step, canaries.running
    if running is not None:
        if sensitivity is None or not _is_undisturbed(running, evidence):
            # A new layout, or a fault of its own: this one says nothing.
            return replace(canaries, running=None, due_step=step + running.sensitivity.steps)
        return _seen(config, canaries, running, work)
    if sensitivity is None:
        return canaries
    if canaries.since_step is None:
        canaries = replace(canaries, since_step=step)
    if step < canaries.due_step:
        return canaries
    rank = _chosen(evidence, ranks, seed + canaries.turn)
    if rank is None:
        return canaries
    begun = Canary(rank=rank, sensitivity=sensitivity, began_step=step, evidence=evidence)
    return replace(canaries, running=begun, turn=canaries.turn + 1)


def canary_failure_reason(config: DetectorConfig, canaries: Canaries, step: int) -> Blind | None:
    """Return why the detector is blind according to its canaries; None: it is not."""
    last, since = canaries.last, canaries.since_step
    if last is not None and not last.is_found:
        reason = (
            f"the canary was missed: x{last.slowdown:.2f} put into a copy of rank {last.rank}'s "
            f"records was not found within {last.num_steps} steps (step {last.step})"
        )
        return Blind(why=Blindness.CANARY, reason=reason)
    limit = OVERDUE_PERIODS * config.canary_period_steps
    if limit and since is not None and step - since > limit:
        reason = f"no canary has come to its end since step {since}"
        return Blind(why=Blindness.CANARY, reason=reason)
    return None


def _seen(
    config: DetectorConfig, canaries: Canaries, canary: Canary, work: FeatureTable
) -> Canaries:
    sample = sample_of_work(work.slowed(canary.rank, canary.sensitivity.slowdown))
    evidence, judgement = update_evidence(config, canary.evidence, sample)
    canary = replace(canary, evidence=evidence, num_steps=canary.num_steps + 1)
    is_found = any(finding.rank == canary.rank for finding in judgement.findings)
    if not is_found and canary.num_steps < canary.sensitivity.steps:
        return replace(canaries, running=canary)
    step = judgement.step
    outcome = CanaryResult(
        rank=canary.rank,
        slowdown=canary.sensitivity.slowdown,
        is_found=is_found,
        num_steps=canary.num_steps,
        step=step,
    )
    # Missed: the next one at once, so that bad luck is told from a detector that sees nothing.
    due_step = step + config.canary_period_steps if is_found else step
    return replace(canaries, running=None, last=outcome, since_step=step, due_step=due_step)


def _is_undisturbed(canary: Canary, evidence: Evidence) -> bool:
    """Is the real rank still well, on the layout on which the canary began?"""
    is_same_layout = evidence.generation == canary.evidence.generation
    is_there = canary.rank in evidence.charts.ranks
    return is_same_layout and is_there and canary.rank in _quiet(evidence)


def _chosen(evidence: Evidence, ranks: Sequence[int], turn: int) -> int | None:
    """The rank whose turn it is; where it is not quiet, the next one that is."""
    quiet = _quiet(evidence)
    for i in range(len(ranks)):
        rank = ranks[(turn + i) % len(ranks)]
        if rank in quiet:
            return rank
    return None


def _quiet(evidence: Evidence) -> set[int]:
    """Ranks with records and without a finding or suspicion."""
    charts = evidence.charts
    is_quiet = cusum.suspicion(limits_of(evidence), charts) <= cusum.QUIET_SUSPICION
    is_quiet &= ~among(charts.ranks, evidence.slow)
    return {charts.ranks[i] for i in np.flatnonzero(is_quiet)}
