"""Incidents: opened by a finding, re-measured, annotated with actions, closed. Pure.

Called by the other modules of detection, by mitigation and by the machine. Incidents of failed
ranks are opened and closed in `controller/machine/rank_failures.py`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from pacekeeper.controller.state import device_history
from pacekeeper.controller.state.events import Command, Log, SaveIncident, SaveStrike
from pacekeeper.controller.state.state import JobState, State, newest_incidents
from pacekeeper.core.incidents import rank_failures
from pacekeeper.core.incidents.findings import (
    Finding,
    FindingKind,
    Incident,
    Tier,
    slowdown_text,
)
from pacekeeper.core.incidents.link_places import LinkPlace
from pacekeeper.core.incidents.rank_ranges import iter_ranks
from pacekeeper.predictor.causes.evidence import Cause
from pacekeeper.predictor.causes.explain import examined_signals, in_words
from pacekeeper.predictor.detector.state import Judgement

FAULTS = (FindingKind.DEVICE, FindingKind.LINK, FindingKind.HOST, FindingKind.INPUT)


def duration_text(job: JobState, rank: int | None, kind: FindingKind, horizon_steps: int) -> str:
    """Return text such as "after 12 steps: transient" of a rank's open incident; empty: none."""
    for incident in job.open_incidents:
        if (incident.finding.kind, incident.finding.rank) == (kind, rank):
            steps = _steps(job, incident)
            return f"after {steps} steps: {'persistent' if steps > horizon_steps else 'transient'}"
    return ""


def note_persistent(job: JobState, horizon_steps: int) -> tuple[JobState, list[Command]]:
    """Mark each open fault that has outlasted the horizon as persistent, once, and log it."""
    if not any(map(_is_fault, job.incidents)):
        return job, []
    commands: list[Command] = []
    incidents = []
    for incident in job.incidents:
        if _is_fault(incident) and _is_due(job, incident, horizon_steps):
            text = f"persistent: it has lasted more than {horizon_steps} steps"
            incident = replace(incident, is_persistent=True, actions=(*incident.actions, text))
            said = f"job={job.name} incident={incident.incident_id} {text}"
            commands += [SaveIncident(incident=incident), Log(text=said)]
        incidents.append(incident)
    return (replace(job, incidents=tuple(incidents)) if commands else job), commands


def _is_due(job: JobState, incident: Incident, horizon_steps: int) -> bool:
    return not incident.is_persistent and _steps(job, incident) > horizon_steps


def _is_fault(incident: Incident) -> bool:
    return incident.is_open and incident.finding.kind in FAULTS


def _steps(job: JobState, incident: Incident) -> int:
    """Return the number of steps since the incident's onset, the present step included."""
    return job.progress.step - incident.finding.onset_step + 1


NOT_MITIGABLE = (
    FindingKind.LINK,
    FindingKind.HOST,
    FindingKind.INPUT,
    FindingKind.HANG,
    FindingKind.SEQUENCE_IMBALANCE,
    FindingKind.STAGE_IMBALANCE,
)


def open_incident(
    state: State, job: JobState, finding: Finding, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    """Open an incident for a finding, and add a strike to the history of its device."""
    state, finding, struck = _add_strike(state, job, finding, unix_s)
    incident = Incident(
        incident_id=state.next_incident_id, job=job.name, finding=finding, opened_unix_s=unix_s
    )
    state, job, commands = start_incident(state, job, incident)
    return state, job, [*commands, *struck]


def start_incident(
    state: State, job: JobState, incident: Incident
) -> tuple[State, JobState, list[Command]]:
    """Add an incident that has the next number to the job; store and log it."""
    assert incident.incident_id == state.next_incident_id, "numbers are given in turn"
    state = replace(state, next_incident_id=state.next_incident_id + 1)
    commands: list[Command] = [
        SaveIncident(incident=incident),
        Log(text=f"job={job.name} incident={incident.incident_id} {incident.finding.reason}"),
    ]
    if incident.finding.cause:
        commands.append(_cause_line(incident))
    return state, replace(job, incidents=newest_incidents((*job.incidents, incident))), commands


def _add_strike(
    state: State, job: JobState, finding: Finding, unix_s: float
) -> tuple[State, Finding, list[Command]]:
    """Add the device's history in other jobs to the finding's reason, and record a strike."""
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
    strikes = device_history.add_strike(state.strikes, strike)
    if strikes is state.strikes:
        return state, finding, []
    return replace(state, strikes=strikes), finding, [SaveStrike(strike=strike)]


def close(
    job: JobState, ranks: Collection[int | None], kind: FindingKind, unix_s: float, action: str
) -> tuple[JobState, list[Command]]:
    """Close the open incidents of this kind on these ranks.

    Failures of ranks are closed by `rank_failures.continue_without_ranks` instead.
    """
    assert kind is not FindingKind.DEATH, "it may have failed ranks that are not resolved yet"

    def is_due(incident: Incident) -> bool:
        return incident.finding.kind is kind and incident.finding.rank in ranks

    return _close(job, is_due, unix_s, action)


def close_all(
    job: JobState, unix_s: float, action: str, *, but: Collection[FindingKind] = ()
) -> tuple[JobState, list[Command]]:
    """Close all open incidents of the job except those of the kinds in `but`."""
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
        incidents[i], said = close_one(job, incidents[i], unix_s, action)
        commands += said
    return replace(job, incidents=tuple(incidents)), commands


def close_one(
    job: JobState, incident: Incident, unix_s: float, action: str
) -> tuple[Incident, list[Command]]:
    """Return the incident closed, with all its ranks, and the commands that store and log it."""
    all_ranks = {rank for one in incident.rank_failures for rank in iter_ranks(one.ranks)}
    incident = replace(
        incident,
        closed_unix_s=unix_s,
        closed_step=job.progress.step,
        actions=(*incident.actions, action),
        rank_failures=rank_failures.close_failures(
            incident.rank_failures, all_ranks, unix_s, max(0, job.progress.step)
        ),
    )
    said = f"job={job.name} incident={incident.incident_id} closed: {action}"
    return incident, [SaveIncident(incident=incident), Log(text=said)]


def mitigable(job: JobState) -> list[Incident]:
    """Return the open incidents whose kind can be mitigated by a layout."""
    return [one for one in job.open_incidents if one.finding.kind not in NOT_MITIGABLE]


def open_hangs(job: JobState) -> list[Incident]:
    """Return the open incidents of ranks that stand still."""
    return [one for one in job.open_incidents if one.finding.kind is FindingKind.HANG]


def add_action(job: JobState, incident_id: int, action: str) -> tuple[JobState, list[Command]]:
    """Append an action to one incident, unless it has it."""
    commands: list[Command] = []
    noted = []
    for incident in job.incidents:
        if incident.incident_id == incident_id and action not in incident.actions:
            incident = replace(incident, actions=(*incident.actions, action))
            said = f"job={job.name} incident={incident_id} {action}"
            commands += [SaveIncident(incident=incident), Log(text=said)]
        noted.append(incident)
    return replace(job, incidents=tuple(noted)), commands


def note_action(job: JobState, action: str) -> tuple[JobState, list[Command]]:
    """Append an action to every open incident whose kind can be mitigated by a layout."""
    noted, commands = [], list[Command]()
    for incident in job.incidents:
        is_planned = incident.finding.kind not in NOT_MITIGABLE
        if incident.is_open and is_planned:
            incident = replace(incident, actions=(*incident.actions, action))
            commands.append(SaveIncident(incident=incident))
        noted.append(incident)
    return replace(job, incidents=tuple(noted)), commands


def remeasure(
    job: JobState, rank: int | None, kind: FindingKind, slowdown: float
) -> tuple[JobState, list[Command]]:
    """Set the slowdown of the open incident of this kind and rank; store and log it."""
    commands: list[Command] = []
    incidents = []
    for incident in job.incidents:
        finding = incident.finding
        if incident.is_open and finding.kind is kind and finding.rank == rank:
            incident = replace(incident, finding=replace(finding, slowdown=slowdown))
            subject = "the job" if rank is None else f"rank {rank}"
            text = f"{subject} now takes {slowdown_text(slowdown)} ({kind})"
            commands += [
                SaveIncident(incident=incident),
                Log(text=f"job={job.name} incident={incident.incident_id} {text}"),
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
    """Open, close and re-measure incidents of one kind, by a step's judgement.

    Args:
        state: The controller's state.
        job: The job.
        judgement: The detector's result for the step.
        kind: The kind of the incidents.
        over: Returns the reason for closing the incident of a rank.
        horizon_steps: A fault that lasts longer is persistent.
        unix_s: The time now.
    """
    commands: list[Command] = []
    for finding in judgement.findings:
        state, job, said = open_incident(state, job, finding, unix_s)
        commands += said
    for rank in judgement.recovered:
        why = f"{over(rank)} {duration_text(job, rank, kind, horizon_steps)}".strip()
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
    """Record a probe's result on the open finding of a rank, with the finding's new tier."""
    commands: list[Command] = []
    known = []
    for incident in job.incidents:
        finding = incident.finding
        if incident.is_open and finding.kind is FindingKind.DEVICE and finding.rank == rank:
            incident = replace(incident, finding=replace(finding, tier=tier, probe=text))
            said = f"job={job.name} incident={incident.incident_id} {tier} {text}"
            commands += [SaveIncident(incident=incident), Log(text=said)]
        known.append(incident)
    return replace(job, incidents=tuple(known)), commands


def note_link_probe(
    job: JobState,
    tier: Tier | None,
    text: str,
    places: tuple[LinkPlace, ...] = (),
    *,
    keeps_earlier: bool = False,
) -> tuple[JobState, list[Command]]:
    """Record the result of a probe of pairs in the open link incidents.

    Args:
        job: The job.
        tier: The tier of the findings from now on; None: unchanged.
        text: What the probe showed.
        places: Where the slow link is; several cannot be told apart; empty: not located.
        keeps_earlier: Leave incidents that have a result as they are.
    """
    commands: list[Command] = []
    known = []
    for incident in job.incidents:
        finding = incident.finding
        is_kept = keeps_earlier and finding.probe
        if incident.is_open and finding.kind is FindingKind.LINK and not is_kept:
            finding = replace(finding, tier=tier or finding.tier, probe=text, places=places)
            incident = replace(incident, finding=finding)
            said = f"job={job.name} incident={incident.incident_id} {finding.tier} {text}"
            commands += [SaveIncident(incident=incident), Log(text=said)]
        known.append(incident)
    return replace(job, incidents=tuple(known)), commands


def with_cause(finding: Finding, causes: Sequence[Cause]) -> Finding:
    """Return the finding with these causes; `causes` is not empty, the surest comes first."""
    normal, missing = examined_signals(causes)
    return replace(finding, cause=in_words(causes), normal_signals=normal, missing_signals=missing)


def _cause_line(incident: Incident) -> Log:
    cause = incident.finding.cause_text
    return Log(text=f"job={incident.job} incident={incident.incident_id} cause: {cause}")
