"""Does a fault pass by itself, or stay? Said on its incident: transient or persistent. Pure.

Persistent is what lasts longer than the policy's horizon: the steps in which a plan must pay.
"""

from dataclasses import replace

from pacekeeper.controller.state_machine.events import Command, SaveIncident, Say
from pacekeeper.controller.state_machine.state import JobState
from pacekeeper.core.incidents.findings import FindingKind, Incident

PERSISTENT = "persistent: it has lasted more than"
FAULTS = (FindingKind.DEVICE, FindingKind.LINK, FindingKind.HOST, FindingKind.INPUT)


def lasted(job: JobState, rank: int | None, kind: FindingKind, horizon_steps: int) -> str:
    """Like "after 12 steps: transient", of the open incident of this rank; empty without one."""
    for incident in job.open_incidents:
        if (incident.finding.kind, incident.finding.rank) == (kind, rank):
            steps = _steps(job, incident)
            return f"after {steps} steps: {'persistent' if steps > horizon_steps else 'transient'}"
    return ""


def note_persistent(job: JobState, horizon_steps: int) -> tuple[JobState, list[Command]]:
    """Say once of each open fault that it has outlasted the horizon."""
    if not any(map(_is_fault, job.incidents)):
        return job, []
    commands: list[Command] = []
    incidents = []
    for incident in job.incidents:
        if _is_fault(incident) and _is_due(job, incident, horizon_steps):
            text = f"{PERSISTENT} {horizon_steps} steps"
            incident = replace(incident, actions=(*incident.actions, text))
            said = f"job={job.name} incident={incident.incident_id} {text}"
            commands += [SaveIncident(incident=incident), Say(text=said)]
        incidents.append(incident)
    return (replace(job, incidents=tuple(incidents)) if commands else job), commands


def _is_due(job: JobState, incident: Incident, horizon_steps: int) -> bool:
    is_told = any(action.startswith(PERSISTENT) for action in incident.actions)
    return not is_told and _steps(job, incident) > horizon_steps


def _is_fault(incident: Incident) -> bool:
    return incident.is_open and incident.finding.kind in FAULTS


def _steps(job: JobState, incident: Incident) -> int:
    """Since its onset, the present step included."""
    return job.step - incident.finding.onset_step + 1
