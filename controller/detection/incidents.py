"""The life of an incident: opened by a finding, re-measured, acted on, closed. Pure.

Those of death are opened and closed in `controller/machine/rank_failures.py`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from pacekeeper.controller.state import device_history
from pacekeeper.controller.state.events import Command, SaveIncident, SaveStrike, Say
from pacekeeper.controller.state.state import JobState, State, newest
from pacekeeper.core.incidents import rank_failures
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.incidents.rank_ranges import iter_ranks
from pacekeeper.predictor.causes.evidence import Cause
from pacekeeper.predictor.causes.explain import examined_signals, in_words
from pacekeeper.predictor.online.state import Judgement

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
            text = f"persistent: it has lasted more than {horizon_steps} steps"
            incident = replace(incident, is_persistent=True, actions=(*incident.actions, text))
            said = f"job={job.name} incident={incident.incident_id} {text}"
            commands += [SaveIncident(incident=incident), Say(text=said)]
        incidents.append(incident)
    return (replace(job, incidents=tuple(incidents)) if commands else job), commands


def _is_due(job: JobState, incident: Incident, horizon_steps: int) -> bool:
    return not incident.is_persistent and _steps(job, incident) > horizon_steps


def _is_fault(incident: Incident) -> bool:
    return incident.is_open and incident.finding.kind in FAULTS


def _steps(job: JobState, incident: Incident) -> int:
    """Since its onset, the present step included."""
    return job.progress.step - incident.finding.onset_step + 1


UNPLANNED = (
    FindingKind.LINK,
    FindingKind.HOST,
    FindingKind.INPUT,
    FindingKind.SEQUENCE_IMBALANCE,
    FindingKind.STAGE_IMBALANCE,
)


def open_incident(
    state: State, job: JobState, finding: Finding, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    """A finding becomes an incident with the next number, and leaves a strike on its device."""
    state, finding, struck = _struck(state, job, finding, unix_s)
    incident = Incident(
        incident_id=state.next_incident_id, job=job.name, finding=finding, opened_unix_s=unix_s
    )
    state, job, commands = start_incident(state, job, incident)
    return state, job, [*commands, *struck]


def start_incident(
    state: State, job: JobState, incident: Incident
) -> tuple[State, JobState, list[Command]]:
    """An incident that has the next number is stored, told and remembered."""
    assert incident.incident_id == state.next_incident_id, "numbers are given in turn"
    state = replace(state, next_incident_id=state.next_incident_id + 1)
    commands: list[Command] = [
        SaveIncident(incident=incident),
        Say(text=f"job={job.name} incident={incident.incident_id} {incident.finding.reason}"),
    ]
    if incident.finding.cause:
        commands.append(_cause_line(incident))
    return state, replace(job, incidents=newest((*job.incidents, incident))), commands


def _struck(
    state: State, job: JobState, finding: Finding, unix_s: float
) -> tuple[State, Finding, list[Command]]:
    """The finding with what other jobs found of its device, and its own strike remembered."""
    known = None if finding.rank is None else job.ranks.get(finding.rank)
    if known is None or finding.kind not in device_history.ACCUSING:
        return state, finding, []
    uuid = known.attachment.device_uuid
    if told := device_history.hint(state.strikes, known.node, uuid, job.name, unix_s):
        finding = replace(finding, reason=f"{finding.reason}; {told}")
    strike = device_history.Strike(
        incident_id=state.next_incident_id,
        node=known.node,
        device_uuid=uuid,
        job=job.name,
        kind=finding.kind,
        slowdown=finding.slowdown,
        unix_s=unix_s,
    )
    strikes = device_history.remember(state.strikes, strike)
    if strikes is state.strikes:
        return state, finding, []
    return replace(state, strikes=strikes), finding, [SaveStrike(strike=strike)]


def close(
    job: JobState, ranks: Collection[int | None], kind: FindingKind, unix_s: float, action: str
) -> tuple[JobState, list[Command]]:
    """Close the open incidents of this kind on these ranks. Not of deaths:
    `rank_failures.continue_without_ranks`."""
    assert kind is not FindingKind.DEATH, "one of death may have ranks that are waited for on"

    def is_due(incident: Incident) -> bool:
        return incident.finding.kind is kind and incident.finding.rank in ranks

    return _close(job, is_due, unix_s, action)


def close_all(
    job: JobState, unix_s: float, action: str, *, but: Collection[FindingKind] = ()
) -> tuple[JobState, list[Command]]:
    """Close all that are open, of all ranks; not those of these kinds."""
    return _close(job, lambda incident: incident.finding.kind not in but, unix_s, action)


def _close(
    job: JobState, is_due: Callable[[Incident], bool], unix_s: float, action: str
) -> tuple[JobState, list[Command]]:
    due = [i for i, incident in enumerate(job.incidents) if incident.is_open and is_due(incident)]
    if not due:
        return job, []  # as nearly always
    commands: list[Command] = []
    incidents = list(job.incidents)
    for i in due:
        incidents[i], said = closed(job, incidents[i], unix_s, action)
        commands += said
    return replace(job, incidents=tuple(incidents)), commands


def closed(
    job: JobState, incident: Incident, unix_s: float, action: str
) -> tuple[Incident, list[Command]]:
    """This one is over, for all the ranks it is about."""
    everybody = {rank for one in incident.rank_failures for rank in iter_ranks(one.ranks)}
    incident = replace(
        incident,
        closed_unix_s=unix_s,
        closed_step=job.progress.step,
        actions=(*incident.actions, action),
        rank_failures=rank_failures.close_failures(
            incident.rank_failures, everybody, unix_s, max(0, job.progress.step)
        ),
    )
    said = f"job={job.name} incident={incident.incident_id} closed: {action}"
    return incident, [SaveIncident(incident=incident), Say(text=said)]


def followed(job: JobState) -> list[Incident]:
    """The open incidents that a layout follows."""
    return [one for one in job.open_incidents if one.finding.kind not in UNPLANNED]


def note_action(job: JobState, action: str) -> tuple[JobState, list[Command]]:
    """What was done, on every open incident that a layout follows."""
    noted, commands = [], list[Command]()
    for incident in job.incidents:
        is_planned = incident.finding.kind not in UNPLANNED
        if incident.is_open and is_planned:
            incident = replace(incident, actions=(*incident.actions, action))
            commands.append(SaveIncident(incident=incident))
        noted.append(incident)
    return replace(job, incidents=tuple(noted)), commands


def remeasure(
    job: JobState, rank: int | None, kind: FindingKind, slowdown: float
) -> tuple[JobState, list[Command]]:
    """The open finding of this kind is now clearly larger or smaller (not: nearly over)."""
    commands: list[Command] = []
    incidents = []
    for incident in job.incidents:
        finding = incident.finding
        if incident.is_open and finding.kind is kind and finding.rank == rank:
            incident = replace(incident, finding=replace(finding, slowdown=slowdown))
            of = kind if rank is None else f"rank={rank}"
            commands += [
                SaveIncident(incident=incident),
                Say(
                    text=f"job={job.name} incident={incident.incident_id} {of} is now "
                    f"x{slowdown:.2f} slow"
                ),
            ]
        incidents.append(incident)
    return replace(job, incidents=tuple(incidents)), commands


def update_incidents(
    state: State,
    job: JobState,
    judgement: Judgement,
    kind: FindingKind,
    *,
    over: Callable[[int], str],
    horizon_steps: int,
    unix_s: float,
) -> tuple[State, JobState, list[Command]]:
    """What a step says of findings that no plan follows: opened, closed, re-measured.

    `over(rank)`: what is well again. `horizon_steps`: what lasts longer is persistent.
    """
    commands: list[Command] = []
    for finding in judgement.findings:
        state, job, said = open_incident(state, job, finding, unix_s)
        commands += said
    for rank in judgement.recovered:
        why = f"{over(rank)} {lasted(job, rank, kind, horizon_steps)}".strip()
        job, said = close(job, {rank}, kind, unix_s, why)
        commands += said
    for rank, slowdown in judgement.changed.items():
        job, said = remeasure(job, rank, kind, slowdown)
        commands += said
    return state, job, commands


def name_cause(job: JobState, rank: int, causes: Sequence[Cause]) -> tuple[JobState, list[Command]]:
    """Replace the cause of a rank's open finding by one that was determined later.

    Args:
        job: The job of the rank.
        rank: The slow rank.
        causes: The causes, the surest first.
    """
    commands: list[Command] = []
    known = []
    for incident in job.incidents:
        finding = incident.finding
        if incident.is_open and finding.kind is FindingKind.DEVICE and finding.rank == rank:
            incident = replace(incident, finding=with_cause(finding, causes))
            commands += [SaveIncident(incident=incident), _cause_line(incident)]
        known.append(incident)
    return replace(job, incidents=tuple(known)), commands


def note_probe(job: JobState, rank: int, tier: Tier, text: str) -> tuple[JobState, list[Command]]:
    """What the probe said of this rank's open finding, and how sure it is since."""
    commands: list[Command] = []
    known = []
    for incident in job.incidents:
        finding = incident.finding
        if incident.is_open and finding.kind is FindingKind.DEVICE and finding.rank == rank:
            incident = replace(incident, finding=replace(finding, tier=tier, probe=text))
            said = f"job={job.name} incident={incident.incident_id} {tier} {text}"
            commands += [SaveIncident(incident=incident), Say(text=said)]
        known.append(incident)
    return replace(job, incidents=tuple(known)), commands


def with_cause(finding: Finding, causes: Sequence[Cause]) -> Finding:
    """Return the finding with these causes; `causes` is not empty, the surest comes first."""
    normal, missing = examined_signals(causes)
    return replace(finding, cause=in_words(causes), normal_signals=normal, missing_signals=missing)


def _cause_line(incident: Incident) -> Say:
    cause = incident.finding.cause_text
    return Say(text=f"job={incident.job} incident={incident.incident_id} cause: {cause}")
