"""Verification of a plan in force: its measured steps are compared once with the forecast. Pure.

Where the plan gains nothing, the policy may roll back to the layout before; plans of its level then
wait, twice as long each time. Where another rank became slow, or a slow one slower, the forecast
does not apply and the plan is not judged. Called by `machine/reports.py` and `machine/steps.py`.
"""

from dataclasses import replace
from statistics import median, median_high

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.mitigation.backoff import wait_s
from pacekeeper.controller.state.events import Command, Log
from pacekeeper.controller.state.plan_phase import (
    Applying,
    Forecast,
    InForce,
    Judged,
    PlanEvent,
    Rollback,
    RolledBack,
    Verdict,
    transition,
)
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import Decision, FindingKind, MitigationLevel
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.text import format_s

MEASURED_STEPS = 5  # whose median is the measured step
JUDGED_STEPS = 10  # under the plan before it is judged: the first ones warm caches
SLOWER = 1.1  # a slow rank that is slower by this factor since is another case


def in_force(job: JobState, layout: Layout) -> InForce | None:
    """Return the phase of the plan on offer as `layout` comes into force.

    Returns:
        None where `layout` is not the plan on offer. The phase has a forecast where the plan was
        expected to gain time and the steps before it were measured.
    """
    offer = job.plan.offer
    if offer is None or offer.plan != layout:
        return None
    forecast = _forecast_of(job, offer.decision, layout)
    applying = job.plan.pending
    if not isinstance(applying, Applying):
        applying = transition(applying, PlanEvent.RANKS_APPLIED, Applying(offer=offer))
    return transition(applying, PlanEvent.ALL_APPLIED, InForce(plan=layout, forecast=forecast))


def _forecast_of(job: JobState, decision: Decision, layout: Layout) -> Forecast | None:
    base = job.layouts.current
    if base is None or decision.level in (MitigationLevel.RETURN_HOME, MitigationLevel.ROLL_BACK):
        return None
    gain_s = decision.current_step_s - decision.planned_step_s
    measured_s = measured_step_s(job)
    if gain_s <= 0.0 or measured_s is None:
        return None
    # A fault may begin in the middle of a step: the larger time is the fairer comparison.
    before_s = max(measured_s, decision.current_step_s)
    return Forecast(
        plan=layout,
        level=decision.level,
        base=base,
        before_s=before_s,
        planned_s=before_s - gain_s,
        slow=dict(job.detection.evidence.slow),
    )


def measured_step_s(job: JobState) -> float | None:
    """Return the median of the newest steps under the present layout; None where there is none yet.

    Steps before the newest fault are left out: they do not show the job with that fault.
    """
    slow_steps = steps_since_onset(job)
    count = MEASURED_STEPS if slow_steps is None else max(1, min(slow_steps, MEASURED_STEPS))
    return median_high(job.progress.recent_step_s[-count:]) if job.progress.recent_step_s else None


def timeout_s(job: JobState, least_s: float, num_steps: int) -> float:
    """Return how long to wait for ranks, which act between steps.

    Args:
        job: The job.
        least_s: The lower bound.
        num_steps: The number of steps to allow, each as long as the longest recent one.
    """
    return max(least_s, num_steps * max(job.progress.recent_step_s, default=0.0))


def steps_since_onset(job: JobState) -> int | None:
    """Return the number of steps since the newest open device finding began, including this one.

    None where no device finding is open.
    """
    onsets = [
        incident.finding.onset_step
        for incident in job.open_incidents
        if incident.finding.kind is FindingKind.DEVICE
        and incident.finding.rank in job.detection.evidence.slow
    ]
    return job.progress.step - max(onsets) + 1 if onsets else None


def judge(job: JobState) -> tuple[JobState, list[Command]]:
    """Compare the plan in force with its forecast, once enough steps ran under it."""
    current = job.plan.current
    forecast = current.forecast if isinstance(current, InForce) else None
    if forecast is None or job.layouts.current != forecast.plan:
        return job, []
    slow = job.detection.evidence.slow
    if slow.keys() - forecast.slow.keys() or any(
        slow[rank] > SLOWER * forecast.slow[rank] for rank in slow
    ):
        judged = Judged(forecast=forecast, verdict=Verdict.INCOMPARABLE, measured_s=None)
        after = transition(current, PlanEvent.STEPS_MEASURED, judged)
        return replace(job, plan=replace(job.plan, current=after)), []
    if len(job.progress.recent_step_s) < JUDGED_STEPS:
        return job, []
    took_s = median(job.progress.recent_step_s[-MEASURED_STEPS:])
    verdict = verdict_of(forecast, took_s)
    text = (
        f"generation {forecast.plan.generation} brings {verdict}: a step takes"
        f" {format_s(took_s)}, forecast were {format_s(forecast.planned_s)},"
        f" without it {format_s(forecast.before_s)}"
    )
    judged = Judged(forecast=forecast, verdict=verdict, measured_s=took_s)
    after = transition(current, PlanEvent.STEPS_MEASURED, judged)
    kept = {
        level: rollback
        for level, rollback in job.plan.rollbacks.items()
        if level is not forecast.level or verdict is Verdict.NOTHING
    }
    job = replace(job, plan=replace(job.plan, current=after, rollbacks=kept))
    job, said = incidents.note_action(job, text)
    return job, [Log(text=f"job={job.name} {text}"), *said]


def verdict_of(forecast: Forecast, took_s: float) -> Verdict:
    """Return the verdict on a measured step time, compared with the forecast."""
    promised_s, brought_s = forecast.before_s - forecast.planned_s, forecast.before_s - took_s
    if brought_s >= 0.5 * promised_s:
        return Verdict.AS_FORECAST
    return Verdict.LESS if brought_s > 0.0 else Verdict.NOTHING


def note_rollback(job: JobState, decision: Decision, now_s: float) -> JobState:
    """Record the rollback that `decision` offers, if it is one: plans of the same level wait."""
    judged = job.plan.failed
    if decision.level is not MitigationLevel.ROLL_BACK or judged is None:
        return job
    forecast = judged.forecast
    before = job.plan.rollbacks.get(forecast.level)
    count = 1 if before is None else before.count + 1
    rollback = Rollback(
        plan=forecast.plan,
        measured_s=judged.measured_s or 0.0,
        planned_s=forecast.planned_s,
        count=count,
        until_s=now_s + wait_s(count),
    )
    rolled_back = RolledBack(judged=judged, rollback=rollback)
    return replace(
        job,
        plan=replace(
            job.plan,
            current=transition(job.plan.current, PlanEvent.ROLLBACK_OFFERED, rolled_back),
            rollbacks={**job.plan.rollbacks, forecast.level: rollback},
        ),
    )
