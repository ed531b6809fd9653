"""A job whose ranks tell no compute times: its steps are judged as the job's, and accuse no rank.

A step is complete when all ranks have ended it. That they will tell nothing of its work is known
only from what they do later: device clocks tell a micro-batch some steps late. Pure.
"""

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper.controller.detection import coverage, incidents
from pacekeeper.controller.state.events import Command, StepSummary
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.predictor.job_level.online import JobLevelState, JobStep, update_job_level
from pacekeeper.predictor.online.global_slowdown import GlobalSlowdownChange
from pacekeeper.predictor.online.state import restore


def follow_pace(
    state: State,
    job: JobState,
    news: GlobalSlowdownChange,
    config: ControllerConfig,
    unix_s: float,
    *,
    kind: FindingKind = FindingKind.HOST,
    over: str = "all ranks are back at their expected time",
) -> tuple[State, JobState, list[Command]]:
    """Open, close or re-measure the incident of all ranks together.

    `kind`: of the news; `over`: why it is closed, where the news do not say.
    """
    commands = list[Command]()
    if news.found is not None:
        state, job, said = incidents.open_incident(state, job, news.found, unix_s)
        commands += said
    if news.is_over:
        long = incidents.lasted(job, None, kind, config.policy.horizon_steps)
        why = news.why or f"{over} {long}".strip()
        job, said = incidents.close(job, {None}, kind, unix_s, why)
        commands += said
    if news.changed is not None:
        job, said = incidents.remeasure(job, None, kind, news.changed)
        commands += said
    return state, job, commands


LATE_STEPS = 8  # that a trainer may tell its work late


def is_untold(job: JobState, step: int) -> bool:
    """Will nobody tell any work of this pending step?"""
    if job.detection.tells_work:
        return False
    return bool(job.detection.whole.num_steps) or max(job.progress.pending) - step >= LATE_STEPS


def handed_over(job: JobState) -> JobState:
    """Ranks tell their times: they are judged by them from now on.

    An open finding of the whole job becomes one of all its ranks together.
    """
    if job.detection.whole.is_open:
        evidence = restore(job.detection.evidence.slow, everybody=job.detection.whole.slowdown)
        job = replace(job, detection=replace(job.detection, evidence=evidence))
    return replace(job, detection=replace(job.detection, whole=JobLevelState()))


def judge_step(
    state: State,
    job: JobState,
    told: JobStep,
    untimed: Sequence[int],
    config: ControllerConfig,
    now_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Take in one step. `untimed`: ranks that told their work, and no time for it."""
    whole, news = update_job_level(job.detection.whole, told)
    job = replace(job, detection=replace(job.detection, whole=whole))
    unix_s = now_s + state.unix_offset_s
    state, job, commands = follow_pace(state, job, news, config, unix_s)
    job, said = incidents.note_persistent(job, config.policy.horizon_steps)
    commands += said
    job, said = coverage.after_whole_step(job, untimed, config, now_s)
    commands += said
    summary = StepSummary(
        job=job.name,
        step=told.step,
        generation=told.generation,
        tokens=told.tokens,
        duration_s=told.duration_s,
        loss=job.progress.loss,
        ranks=(),
        observed_s=(),
        expected_s=(),
        slowdown=(),
        watch=job.coverage.state,
    )
    return state, job, [*commands, summary]
