"""Jobs for tests: fields of `JobState` and of its parts set by their names."""

from collections import defaultdict
from dataclasses import fields, replace
from typing import Any

from pacekeeper.controller.state.plan_phase import Forecast, InForce, Offered
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from pacekeeper.core.layout.layout import Layout

PARTS = ("layouts", "plan", "detection", "progress", "workload", "coverage", "notices")


def job_with(name: str, **values: Any) -> JobState:
    """Return a job with these fields, each of the job or of the first part that has it."""
    job = JobState(name=name)
    own = {field.name for field in fields(JobState)}
    changes: dict[str, Any] = {key: value for key, value in values.items() if key in own}
    of_parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for key in values.keys() - own:
        part = next(p for p in PARTS if key in {one.name for one in fields(getattr(job, p))})
        of_parts[part][key] = values[key]
    for part, changed in of_parts.items():
        changes[part] = replace(getattr(job, part), **changed)
    return replace(job, **changes)


def offered(plan: Layout, *, offered_s: float = 0.0) -> Offered:
    """Return the phase of a plan that is on offer."""
    decision = Decision(level=MitigationLevel.BATCH_SHARES, layout=plan, reason="")
    return Offered(
        decision=decision,
        plan=plan,
        base_generation=plan.generation - 1,
        slow_ranks=frozenset(),
        offered_s=offered_s,
    )


def forecast_of(job: JobState) -> Forecast | None:
    """Return the forecast that the plan in force is still to be compared with."""
    current = job.plan.current
    return current.forecast if isinstance(current, InForce) else None
