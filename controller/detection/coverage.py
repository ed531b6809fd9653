"""Detection coverage of a job: measuring, healthy, degraded or blind, with the reason. Pure.

Set from each judged step, corrected by the canary and by the smallest slowdown that the detector
can see; between steps, ticks set it to blind where ranks fall silent or no step completes. Missing
data never counts as healthy. Called by `machine/steps.py`, `job_level.py` and `machine.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from zlib import crc32

import numpy as np

from pacekeeper.controller.detection.peer_groups import Peers, peers
from pacekeeper.controller.state.events import Command, Log
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import Blindness, CoverageState, slowdown_text
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.text import format_s
from pacekeeper.predictor.assurance.canary import advance_canaries, canary_failure_reason
from pacekeeper.predictor.assurance.sensitivity import Blind, Sensitivity, blindness, sensitivity_of
from pacekeeper.predictor.cost.features import FeatureTable
from pacekeeper.predictor.detector.state import Judgement
from pacekeeper.predictor.job_level.online import LEAST_STEPS

SILENT_STEPS = 3  # where one step takes longer than `blind_after_s`


def working_ranks(job: JobState) -> tuple[int, ...]:
    """Living ranks that the layout gives work, ascending."""
    if job.layouts.current is None:
        return job.living
    counted = set(job.layouts.current.working)
    return tuple(rank for rank in job.living if rank in counted)


def update_after_step(
    job: JobState,
    judgement: Judgement,
    work: FeatureTable,
    untimed: Sequence[int],
    config: ControllerConfig,
    now_s: float,
) -> tuple[JobState, list[Command]]:
    """Update the coverage after a judged step, and advance the canary by this step.

    A job with open incidents stays DEGRADED even if further slowdowns would be missed; its reason
    then names why.

    Args:
        job: The job, with the detector state after the step.
        judgement: The detector's result for the step.
        work: The step's micro-batches, which the canary replays on a copy.
        untimed: Ranks that reported their work without compute times.
        config: The controller's settings.
        now_s: The machine's clock.
    """
    ranks = working_ranks(job)
    groups = peers(job, ranks)
    blind = _untimed(untimed) or _blind_of(groups, config, judgement.step)
    sensitivities = [
        sensitivity_of(config.detector, group.evidence, group.ranks) for group in groups
    ]
    known = [sensitivity for sensitivity in sensitivities if sensitivity is not None]
    # A job's sensitivity is that of its least sensitive role.
    sensitivity = (
        max(known, key=lambda s: s.slowdown) if len(known) == len(groups) and known else None
    )
    job, commands = _with_canary(job, work, groups, sensitivity if blind is None else None, config)
    blind = blind or canary_failure_reason(config.detector, job.detection.canaries, judgement.step)
    watch, reason = judgement.watch, judgement.reason
    if blind is not None and watch is CoverageState.DEGRADED:
        reason = f"further slow ranks would not be detected: {blind.reason}"
    elif blind is not None and watch is CoverageState.MEASURING:
        reason = f"{reason}; {blind.reason}"
    elif blind is not None:
        watch, reason = CoverageState.BLIND, blind.reason
    elif sensitivity is not None:
        reason = f"{reason}; {sensitivity}" if reason else str(sensitivity)
        if sensitivity.slowdown > config.detector.blind_slowdown:  # else it would be blind
            watch = CoverageState.MEASURING if watch is not CoverageState.DEGRADED else watch
    job = replace(
        job, coverage=replace(job.coverage, sensitivity=sensitivity, judged_s=now_s, silent=())
    )
    job, said = _set_coverage(job, watch, reason, blind)
    return job, [*commands, *said]


def update_after_untimed_step(
    job: JobState, untimed: Sequence[int], config: ControllerConfig, now_s: float
) -> tuple[JobState, list[Command]]:
    """Update the coverage after a step without compute times, which is judged as a whole.

    Where the ranks do not report their work either, lasting slowdowns are not detected: the job is
    blind for them.
    """
    whole, blind = job.detection.whole, None
    why = f"ranks {format_ranks(untimed)} report" if untimed else "its ranks report"
    why += " no compute time for their work"
    if whole.knowledge is None:
        now, seen = CoverageState.MEASURING, f"{whole.num_steps} of {LEAST_STEPS} step times"
    elif whole.sensitivity is None:
        now, seen = CoverageState.JOB_LEVEL, "only slowdowns that end again would be detected"
        blind = Blind(why=Blindness.NO_TIMES, reason=why)
    else:
        now, seen = CoverageState.JOB_LEVEL, str(whole.sensitivity)
        if whole.sensitivity.slowdown > config.detector.blind_slowdown:
            blind = Blind(why=Blindness.NOISE, reason=seen)
    if whole.is_open or job.detection.evidence.slow:
        now = CoverageState.DEGRADED
        seen = f"it takes {slowdown_text(whole.slowdown)}; {seen}" if whole.is_open else seen
    reason = f"{why}: detection by step times of the whole job; {seen}"
    reason += f"; {whole.note}" if whole.note else ""
    job = replace(
        job,
        coverage=replace(job.coverage, sensitivity=whole.sensitivity, judged_s=now_s, silent=()),
    )
    return _set_coverage(job, now, reason, blind)


def _blind_of(groups: Sequence[Peers], config: ControllerConfig, step: int) -> Blind | None:
    """Return why a slowdown of some rank would not be attributed to it; None: it would be."""
    alone = [group.ranks[0] for group in groups if len(group.ranks) == 1]
    if alone and len(groups) > 1:
        reason = f"ranks {format_ranks(alone)} have no peer of their role to be compared with"
        return Blind(why=Blindness.NO_PEERS, reason=reason)
    found = (blindness(config.detector, g.evidence, g.ranks, step=step) for g in groups)
    return next((blind for blind in found if blind is not None), None)


def _untimed(ranks: Sequence[int]) -> Blind | None:
    if not ranks:
        return None
    reason = f"ranks {format_ranks(ranks)} report no compute time for their work"
    return Blind(why=Blindness.NO_TIMES, reason=reason)


def _with_canary(
    job: JobState,
    work: FeatureTable,
    groups: Sequence[Peers],
    sensitivity: Sensitivity | None,
    config: ControllerConfig,
) -> tuple[JobState, list[Command]]:
    """Advance the canary by one step, role by role in turn; log an alert if it was missed."""
    before = job.detection.canaries
    group = groups[before.turn % len(groups)]
    if before.running is not None:
        rank = before.running.rank
        group = next((g for g in groups if rank in g.ranks), group)
    if len(groups) > 1:
        work = work.only(np.isin(work["rank"], group.ranks))
        if not len(work):
            return job, []
    canaries = advance_canaries(
        config.detector,
        before,
        group.evidence,
        work,
        sensitivity=sensitivity,
        ranks=group.ranks,
        # The roles take turns; each turn of a role selects its next rank.
        seed=crc32(job.name.encode()) - before.turn + before.turn // len(groups),
    )
    job = replace(job, detection=replace(job.detection, canaries=canaries))
    last = canaries.last
    if last is None or last is before.last or last.is_found:
        return job, []
    text = (
        f"job={job.name} alert=canary_missed rank={last.rank} slowdown={last.slowdown:.2f} "
        f"steps={last.num_steps} step={last.step}: slow ranks may not be detected"
    )
    return job, [Log(text=text)]


def update_on_tick(
    job: JobState, config: ControllerConfig, now_s: float
) -> tuple[JobState, list[Command]]:
    """On a tick: set the coverage to blind where ranks are silent or no step was judged lately."""
    median_s = (
        sorted(job.progress.recent_step_s)[len(job.progress.recent_step_s) // 2]
        if job.progress.recent_step_s
        else 0.0
    )
    limit_s = max(config.blind_after_s, SILENT_STEPS * median_s)
    ranks = working_ranks(job)
    silent: tuple[int, ...] = ()
    # Nearly always every rank has sent records lately: one `min` is cheaper than a loop over ranks.
    heard_s = job.heard_s.values() if len(job.heard_s) == len(job.ranks) else ()
    if min(heard_s, default=-inf) < now_s - limit_s:
        silent = tuple(rank for rank in ranks if now_s - job.last_heard_s(rank) > limit_s)
    job = (
        job
        if silent == job.coverage.silent
        else replace(job, coverage=replace(job.coverage, silent=silent))
    )
    blind = _blind_between_steps(job, ranks, now_s, limit_s)
    if blind is None:
        return job, []
    return _set_coverage(job, CoverageState.BLIND, blind.reason, blind)


def _blind_between_steps(
    job: JobState, ranks: Sequence[int], now_s: float, limit_s: float
) -> Blind | None:
    if job.coverage.silent:
        reason = f"no record of ranks {format_ranks(job.coverage.silent)} for {format_s(limit_s)}"
        return Blind(why=Blindness.NO_RECORDS, reason=reason)
    if not ranks:
        reason = "; ".join(filter(None, ("no rank is known to run", _unattached_text(job))))
        return Blind(why=Blindness.NO_RECORDS, reason=reason)
    attached_s = max((job.ranks[rank].attached_s for rank in ranks), default=now_s)
    since_s = (
        attached_s if job.coverage.judged_s is None else max(job.coverage.judged_s, attached_s)
    )
    if now_s - since_s <= limit_s:
        return None
    reason = f"records arrive, but no step could be judged for {format_s(limit_s)}"
    if job.progress.pending:
        step = min(job.progress.pending)
        missing = [rank for rank in ranks if not job.progress.pending[step].is_whole(rank)]
        reason += f": of step {step} ranks {format_ranks(missing)} are missing" if missing else ""
    apart = _unattached_text(job)
    reason += f"; {apart}" if apart else ""
    return Blind(why=Blindness.NO_STEPS, reason=reason)


def _unattached_text(job: JobState) -> str:
    """Return the ranks that should run and have not attached, as text; empty: none."""
    missing = job.unattached
    return f"ranks {format_ranks(missing)} have not attached" if missing else ""


def _set_coverage(
    job: JobState, watch: CoverageState, reason: str, blind: Blind | None
) -> tuple[JobState, list[Command]]:
    """Set the coverage; log it only where the job becomes blind or stops being blind."""
    was = job.coverage.state
    why = None if blind is None else blind.why
    job = replace(job, coverage=replace(job.coverage, state=watch, reason=reason, blind=why))
    is_news = watch is not was and CoverageState.BLIND in (watch, was)
    said = Log(text=f"job={job.name} watch={watch} was={was} ({reason})")
    return job, [said] if is_news else []
