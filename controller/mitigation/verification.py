"""Does a plan bring what was forecast? Judged once, by the steps measured under it. Pure.

Where it brings nothing, the policy may go back to the layout before; plans of its kind then wait,
twice as long each time. Where another rank is slow by now, or one is slower, the forecast was of
another job and nothing is judged.
"""

from dataclasses import replace
from statistics import median, median_high

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.mitigation.backoff import wait_s
from pacekeeper.controller.state.events import Command, Say
from pacekeeper.controller.state.job_parts import Promise, Refusal
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import Decision, FindingKind, MitigationLevel
from pacekeeper.core.layout.layout import Layout

MEASURED_STEPS = 5  # whose median is the measured step
JUDGED_STEPS = 10  # under the plan before it is judged: the first ones warm caches
SLOWER = 1.1  # a slow rank that is slower by this factor since is another case


def made(job: JobState, layout: Layout) -> Promise | None:
    """What was promised of `layout`, which comes into force; None where nothing was, in time."""
    decision, base = job.plan.last_decision, job.layouts.current
    if decision is None or base is None or job.plan.desired != layout:
        return None
    if decision.rung in (MitigationLevel.RETURN_HOME, MitigationLevel.ROLL_BACK):
        return None
    gain_s = decision.current_step_s - decision.planned_step_s
    measured_s = measured_step_s(job)
    if gain_s <= 0.0 or measured_s is None:
        return None
    # In doubt for the plan: a fault may begin in the middle of a step.
    before_s = max(measured_s, decision.current_step_s)
    return Promise(
        plan=layout,
        rung=decision.rung,
        base=base,
        before_s=before_s,
        planned_s=before_s - gain_s,
        slow=dict(job.detection.evidence.slow),
    )


def measured_step_s(job: JobState) -> float | None:
    """The median of the newest steps under the present layout, none of before the newest fault:
    those say nothing of a job with it. None where there is none yet.
    """
    slow_steps = steps_since_onset(job)
    count = MEASURED_STEPS if slow_steps is None else max(1, min(slow_steps, MEASURED_STEPS))
    return median_high(job.progress.recent_step_s[-count:]) if job.progress.recent_step_s else None


def patience_s(job: JobState, least_s: float, num_steps: int) -> float:
    """How long to wait for what ranks do between two steps: that many of the longest of late."""
    return max(least_s, num_steps * max(job.progress.recent_step_s, default=0.0))


def steps_since_onset(job: JobState) -> int | None:
    """Of the newest open finding of a device, the present step included; None where none is."""
    onsets = [
        incident.finding.onset_step
        for incident in job.open_incidents
        if incident.finding.kind is FindingKind.DEVICE
        and incident.finding.rank in job.detection.evidence.slow
    ]
    return job.progress.step - max(onsets) + 1 if onsets else None


def judge(job: JobState) -> tuple[JobState, list[Command]]:
    """After a step: say how the plan in force did, once there are enough steps under it."""
    promise, layout = job.plan.forecast, job.layouts.current
    if promise is None or layout != promise.plan or promise.measured_s is not None:
        return job, []
    slow = job.detection.evidence.slow
    if slow.keys() - promise.slow.keys() or any(
        slow[rank] > SLOWER * promise.slow[rank] for rank in slow
    ):
        return replace(job, plan=replace(job.plan, forecast=None)), []
    if len(job.progress.recent_step_s) < JUDGED_STEPS:
        return job, []
    took_s = median(job.progress.recent_step_s[-MEASURED_STEPS:])
    promised_s, brought_s = promise.before_s - promise.planned_s, promise.before_s - took_s
    if brought_s >= 0.5 * promised_s:
        verdict = "as forecast"
    elif brought_s > 0.0:
        verdict = "less than forecast"
    else:
        verdict = "nothing"
    text = (
        f"generation {promise.plan.generation} brings {verdict}: a step takes"
        f" {took_s * 1e3:.0f} ms, forecast were {promise.planned_s * 1e3:.0f},"
        f" without it {promise.before_s * 1e3:.0f}"
    )
    if brought_s <= 0.0:
        job = replace(job, plan=replace(job.plan, forecast=replace(promise, measured_s=took_s)))
    else:
        kept = {
            rung: undone for rung, undone in job.plan.rollbacks.items() if rung is not promise.rung
        }
        job = replace(job, plan=replace(job.plan, forecast=None, rollbacks=kept))
    job, said = incidents.note_action(job, text)
    return job, [Say(text=f"job={job.name} {text}"), *said]


def given_up(job: JobState, decision: Decision, now_s: float) -> JobState:
    """The way back from a plan is offered: others of that plan's kind wait."""
    promise = job.plan.forecast
    if decision.rung is not MitigationLevel.ROLL_BACK or promise is None:
        return job
    before = job.plan.rollbacks.get(promise.rung)
    count = 1 if before is None else before.count + 1
    refusal = Refusal(
        plan=promise.plan,
        rank=None,
        reason=f"took a step to {(promise.measured_s or 0.0) * 1e3:.0f} ms instead of"
        f" {promise.planned_s * 1e3:.0f}",
        count=count,
        until_s=now_s + wait_s(count),
    )
    return replace(
        job, plan=replace(job.plan, rollbacks={**job.plan.rollbacks, promise.rung: refusal})
    )
