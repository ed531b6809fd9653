"""A job whose ranks tell no compute times: its steps are judged as the job's, and accuse no rank.

A step is complete when all ranks have ended it. That they will tell nothing of its work is known
only from what they do later: device clocks tell a micro-batch some steps late. Pure.
"""

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper.controller.detection import coverage, lasting, pacing
from pacekeeper.controller.state_machine.events import Command, StepSummary
from pacekeeper.controller.state_machine.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.predictor.job_level.online import JobPace, JobStep, fold_job
from pacekeeper.predictor.online.state import restore

LATE_STEPS = 8  # that a trainer may tell its work late


def is_untold(job: JobState, step: int) -> bool:
    """Will nobody tell any work of this pending step?"""
    if job.tells_work:
        return False
    return bool(job.whole.num_steps) or max(job.pending) - step >= LATE_STEPS


def handed_over(job: JobState) -> JobState:
    """Ranks tell their times: they are judged by them from now on.

    An open finding of the whole job becomes one of all its ranks together.
    """
    if job.whole.is_open:
        evidence = restore(job.evidence.slow, everybody=job.whole.slowdown)
        job = replace(job, evidence=evidence)
    return replace(job, whole=JobPace())


def judge_step(
    state: State,
    job: JobState,
    told: JobStep,
    untimed: Sequence[int],
    config: ControllerConfig,
    now_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Take in one step. `untimed`: ranks that told their work, and no time for it."""
    whole, news = fold_job(job.whole, told)
    job = replace(job, whole=whole)
    unix_s = now_s + state.unix_offset_s
    state, job, commands = pacing.follow_pace(state, job, news, config, unix_s)
    job, said = lasting.note_persistent(job, config.policy.horizon_steps)
    commands += said
    job, said = coverage.after_whole_step(job, untimed, config, now_s)
    commands += said
    summary = StepSummary(
        job=job.name,
        step=told.step,
        generation=told.generation,
        tokens=told.tokens,
        duration_s=told.duration_s,
        loss=job.loss,
        ranks=(),
        observed_s=(),
        expected_s=(),
        slowdown=(),
        watch=job.watch,
    )
    return state, job, [*commands, summary]
