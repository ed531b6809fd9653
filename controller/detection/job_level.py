"""Detection by step times of the whole job, where ranks report no compute times. Pure.

A step is complete when all ranks have ended it. Whether their work will still be reported is known
only later: device clocks report a micro-batch some steps late. No rank is named. Called by
`machine/steps.py`; `data_loading.py` uses `update_common_incident`.
"""

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper.controller.detection import coverage, incidents
from pacekeeper.controller.state.events import Command, StepSummary
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.predictor.detector.global_slowdown import GlobalSlowdownChange
from pacekeeper.predictor.detector.state import restore
from pacekeeper.predictor.job_level.online import JobLevelState, JobStep, update_job_level


def update_common_incident(
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

    Args:
        state: The controller's state.
        job: The job.
        news: The change of the slowdown that all ranks have in common.
        config: The controller's settings.
        unix_s: The time now.
        kind: The kind of the incident.
        over: The reason for closing it, where `news` has none.
    """
    commands = list[Command]()
    if news.found is not None:
        state, job, said = incidents.open_incident(state, job, news.found, unix_s)
        commands += said
    if news.is_over:
        long = incidents.duration_text(job, None, kind, config.policy.horizon_steps)
        why = news.why or f"{over} {long}".strip()
        job, said = incidents.close(job, {None}, kind, unix_s, why)
        commands += said
    if news.changed is not None:
        job, said = incidents.remeasure(job, None, kind, news.changed)
        commands += said
    return state, job, commands


LATE_STEPS = 8  # by which a trainer may report the work of a step late


def is_work_missing(job: JobState, step: int) -> bool:
    """Whether no rank will report the work of this pending step any more."""
    if job.detection.tells_work:
        return False
    return bool(job.detection.whole.num_steps) or max(job.progress.pending) - step >= LATE_STEPS


def switch_to_ranks(job: JobState) -> JobState:
    """Switch the job from detection by step times to detection by rank, once ranks report times.

    An open finding of the whole job becomes a finding of all its ranks together.
    """
    if job.detection.whole.is_open:
        evidence = restore(job.detection.evidence.slow, everybody=job.detection.whole.slowdown)
        job = replace(job, detection=replace(job.detection, evidence=evidence))
    return replace(job, detection=replace(job.detection, whole=JobLevelState()))


def judge_step(
    state: State,
    job: JobState,
    measured: JobStep,
    untimed: Sequence[int],
    config: ControllerConfig,
    now_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Judge a step by its duration only, for a job whose ranks report no compute times.

    Args:
        state: The controller's state.
        job: The job.
        measured: The step, with its duration.
        untimed: Ranks that reported their work without compute times.
        config: The controller's settings.
        now_s: The machine's clock.
    """
    whole, news = update_job_level(job.detection.whole, measured, config.detector)
    job = replace(job, detection=replace(job.detection, whole=whole))
    unix_s = now_s + state.unix_offset_s
    state, job, commands = update_common_incident(state, job, news, config, unix_s)
    job, said = incidents.note_persistent(job, config.policy.horizon_steps)
    commands += said
    job, said = coverage.update_after_untimed_step(job, untimed, config, now_s)
    commands += said
    summary = StepSummary(
        job=job.name,
        step=measured.step,
        generation=measured.generation,
        tokens=measured.tokens,
        duration_s=measured.duration_s,
        loss=job.progress.loss,
        ranks=(),
        observed_s=(),
        expected_s=(),
        slowdown=(),
        watch=job.coverage.state,
    )
    return state, job, [*commands, summary]
