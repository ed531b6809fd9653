"""Is a job's watch measuring, healthy or blind - and why? Silence is never taken for health. Pure.

What a judged step says comes first; the canary and the detector's own blindness may refute it, and
between steps the clock does: ranks that fall silent, records that make no step.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from zlib import crc32

import numpy as np

from pacekeeper.controller.detection.peer_groups import Peers, peers
from pacekeeper.controller.state.events import Command, Say
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import Blindness, CoverageState
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.predictor.assurance.canary import advance_canaries, canary_failure_reason
from pacekeeper.predictor.assurance.sensitivity import Blind, Sensitivity, blindness, sensitivity_of
from pacekeeper.predictor.cost.features import FeatureTable
from pacekeeper.predictor.job_level.online import LEAST_STEPS
from pacekeeper.predictor.online.state import Judgement

PATIENCE_STEPS = 3  # where one step takes longer than `blind_after_s`


def running(job: JobState) -> tuple[int, ...]:
    """Living ranks that the layout gives work, ascending."""
    if job.layouts.current is None:
        return job.living
    counted = set(job.layouts.current.working)
    return tuple(rank for rank in job.living if rank in counted)


def after_step(
    job: JobState,
    judgement: Judgement,
    work: FeatureTable,
    untimed: Sequence[int],
    config: ControllerConfig,
    now_s: float,
) -> tuple[JobState, list[Command]]:
    """The watch after a step that was judged by this work, and its canary.

    `untimed`: ranks that told their work, but no time for it. A job with open incidents stays
    degraded where no more could be seen; it says so.
    """
    ranks = running(job)
    groups = peers(job, ranks)
    blind = _untimed(untimed) or _blind_of(groups, config, judgement.step)
    sensitivities = [
        sensitivity_of(config.detector, group.evidence, group.ranks) for group in groups
    ]
    known = [sensitivity for sensitivity in sensitivities if sensitivity is not None]
    # What is promised of a job is promised of each of its roles.
    sensitivity = (
        max(known, key=lambda s: s.slowdown) if len(known) == len(groups) and known else None
    )
    job, commands = _with_canary(job, work, groups, sensitivity if blind is None else None, config)
    blind = blind or canary_failure_reason(config.detector, job.detection.canaries, judgement.step)
    watch, reason = judgement.watch, judgement.reason
    if blind is not None and watch is CoverageState.DEGRADED:
        reason = f"and blind for more: {blind.reason}"
    elif blind is not None and watch is CoverageState.MEASURING:
        reason = f"{reason}; {blind.reason}"
    elif blind is not None:
        watch, reason = CoverageState.BLIND, blind.reason
    elif sensitivity is not None:
        reason = f"{reason}; {sensitivity}" if reason else str(sensitivity)
    job = replace(
        job, coverage=replace(job.coverage, sensitivity=sensitivity, judged_s=now_s, silent=())
    )
    job, said = _entered(job, watch, reason, blind)
    return job, [*commands, *said]


def after_whole_step(
    job: JobState, untimed: Sequence[int], config: ControllerConfig, now_s: float
) -> tuple[JobState, list[Command]]:
    """The watch after a step for which no rank told any time: over the job as a whole.

    Where its work is not told either, it is blind for what lasts.
    """
    whole, blind = job.detection.whole, None
    why = f"ranks {format_ranks(untimed)} report" if untimed else "its ranks report"
    why += " no compute time for their work"
    if whole.knowledge is None:
        now, seen = CoverageState.MEASURING, f"{whole.num_steps} of {LEAST_STEPS} step times"
    elif whole.sensitivity is None:
        now, seen = CoverageState.JOB_LEVEL, "only a slowdown that went away again would be seen"
        blind = Blind(why=Blindness.NO_TIMES, reason=why)
    else:
        now, seen = CoverageState.JOB_LEVEL, str(whole.sensitivity)
        if whole.sensitivity.slowdown > config.detector.blind_slowdown:
            blind = Blind(why=Blindness.NOISE, reason=seen)
    if whole.is_open or job.detection.evidence.slow:
        now = CoverageState.DEGRADED
        seen = f"x{whole.slowdown:.2f} slow; {seen}" if whole.is_open else seen
    reason = f"{why}: the job is watched as a whole; {seen}"
    reason += f"; {whole.note}" if whole.note else ""
    job = replace(
        job,
        coverage=replace(job.coverage, sensitivity=whole.sensitivity, judged_s=now_s, silent=()),
    )
    return _entered(job, now, reason, blind)


def _blind_of(groups: Sequence[Peers], config: ControllerConfig, step: int) -> Blind | None:
    """Why a slowdown of some rank would not be named, by the evidence of its role."""
    alone = [group.ranks[0] for group in groups if len(group.ranks) == 1]
    if alone and len(groups) > 1:
        reason = f"ranks {format_ranks(alone)} have a role of their own: no peer to be told from"
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
    """One step more for the canary; one that was missed is an alert. Roles take turns."""
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
        # With each role's turn it is the turn of its next rank.
        seed=crc32(job.name.encode()) - before.turn + before.turn // len(groups),
    )
    job = replace(job, detection=replace(job.detection, canaries=canaries))
    last = canaries.last
    if last is None or last is before.last or last.is_found:
        return job, []
    text = (
        f"job={job.name} alert=canary_missed rank={last.rank} slowdown={last.slowdown:.2f} "
        f"steps={last.num_steps} step={last.step}: slow ranks may go unseen"
    )
    return job, [Say(text=text)]


def after_silence(
    job: JobState, config: ControllerConfig, now_s: float
) -> tuple[JobState, list[Command]]:
    """The watch at this moment, if only time went by since the newest step."""
    median_s = (
        sorted(job.progress.recent_step_s)[len(job.progress.recent_step_s) // 2]
        if job.progress.recent_step_s
        else 0.0
    )
    limit_s = max(config.blind_after_s, PATIENCE_STEPS * median_s)
    ranks = running(job)
    silent: tuple[int, ...] = ()
    # Nearly always all were heard of just now: that is seen at a glance, rank by rank it costs.
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
    return _entered(job, CoverageState.BLIND, blind.reason, blind)


def _blind_between_steps(
    job: JobState, ranks: Sequence[int], now_s: float, limit_s: float
) -> Blind | None:
    if job.coverage.silent:
        reason = f"no record of ranks {format_ranks(job.coverage.silent)} for {limit_s:.0f} s"
        return Blind(why=Blindness.NO_RECORDS, reason=reason)
    if not ranks:
        reason = "; ".join(filter(None, ("no rank is known to run", _apart(job))))
        return Blind(why=Blindness.NO_RECORDS, reason=reason)
    attached_s = max((job.ranks[rank].attached_s for rank in ranks), default=now_s)
    since_s = (
        attached_s if job.coverage.judged_s is None else max(job.coverage.judged_s, attached_s)
    )
    if now_s - since_s <= limit_s:
        return None
    reason = f"records arrive, but no step could be judged for {limit_s:.0f} s"
    if job.progress.pending:
        step = min(job.progress.pending)
        missing = [rank for rank in ranks if not job.progress.pending[step].is_whole(rank)]
        reason += f": of step {step} ranks {format_ranks(missing)} are missing" if missing else ""
    apart = _apart(job)
    reason += f"; {apart}" if apart else ""
    return Blind(why=Blindness.NO_STEPS, reason=reason)


def _apart(job: JobState) -> str:
    """Who should be there and never came."""
    missing = job.unattached
    return f"ranks {format_ranks(missing)} have not attached" if missing else ""


def _entered(
    job: JobState, watch: CoverageState, reason: str, blind: Blind | None
) -> tuple[JobState, list[Command]]:
    """Going blind and coming back is told; what else changes is shown."""
    was = job.coverage.state
    why = None if blind is None else blind.why
    job = replace(job, coverage=replace(job.coverage, state=watch, reason=reason, blind=why))
    is_news = watch is not was and CoverageState.BLIND in (watch, was)
    said = Say(text=f"job={job.name} watch={watch} was={was} ({reason})")
    return job, [said] if is_news else []
