"""Rank failures as incidents: failures of many ranks of a job at once are one incident.

A failure joins the open incident of the job's last failures while none of those is resolved and
the incident is young: a job that is killed ends node by node. What is known of each rank is kept by
`core/incidents/rank_failures.py`. Called by `reports.py`. Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.mitigation.notices import announce_deaths
from pacekeeper.controller.state.events import (
    Command,
    Log,
    SaveIncident,
    SaveJob,
)
from pacekeeper.controller.state.state import JobState, RankStatus, State
from pacekeeper.core.incidents import rank_failures
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.incidents.rank_ranges import iter_ranks, to_ranges
from pacekeeper.predictor.detector.state import forget

GATHER_S = 60.0  # from an incident's first failure on; Slurm kills 30 s after its first signal


def mark_ranks_dead(
    state: State, job: JobState, dead: Mapping[int, str], now_s: float
) -> tuple[State, JobState, list[Command]]:
    """Mark ranks as dead: record the incident, drop their evidence, notify the other ranks.

    Args:
        state: The controller's state.
        job: The job of the ranks.
        dead: The reason of each rank's death.
        now_s: The machine's clock.
    """
    unix_s = now_s + state.unix_offset_s
    state, job, commands = _record_failures(state, job, dead, unix_s)
    ranks, remembered = dict(job.ranks), dict(job.remembered)
    for rank in dead:
        if rank in ranks:
            ranks[rank] = replace(ranks[rank], status=RankStatus.DEAD)
        else:  # lost while the controller was down: it will never attach
            remembered[rank] = replace(remembered[rank], status=RankStatus.DEAD)
    job = replace(
        job,
        ranks=ranks,
        remembered=remembered,
        detection=replace(
            job.detection,
            evidence=forget(job.detection.evidence, dead),
            by_role={role: forget(kept, dead) for role, kept in job.detection.by_role.items()},
            links=forget(job.detection.links, dead),
            link_probes=replace(
                job.detection.link_probes,
                history=job.detection.link_probes.history.without(dead),
            ),
            inputs=replace(
                job.detection.inputs,
                evidence=forget(job.detection.inputs.evidence, dead),
            ),
        ),
        layouts=replace(job.layouts, baseline=None),  # it needs the dead ranks
    )
    for kind in (FindingKind.DEVICE, FindingKind.LINK, FindingKind.INPUT, FindingKind.HANG):
        job, said = incidents.close(job, dead, kind, unix_s, "the rank died")
        commands += said
    job, said = announce_deaths(job, now_s)
    return state, job, [*commands, SaveJob(job=job.name), *said]


def _record_failures(
    state: State, job: JobState, dead: Mapping[int, str], unix_s: float
) -> tuple[State, JobState, list[Command]]:
    """Add the failures to the incident of the ranks that just failed, or open a new one."""
    step, nodes = max(0, job.progress.step), _nodes(job, dead)
    at = _joinable(job, unix_s)
    if at is None:
        died = rank_failures.add_failures((), dead, step, unix_s)
        finding = Finding(
            kind=FindingKind.DEATH,
            tier=Tier.CONFIRMED,
            rank=next(iter(dead)),
            slowdown=float("inf"),
            onset_step=step,
            step=step,
            reason=rank_failures.describe_failures(died),
        )
        incident = Incident(
            incident_id=state.next_incident_id,
            job=job.name,
            finding=finding,
            opened_unix_s=unix_s,
            rank_failures=died,
            nodes=nodes,
        )
        return incidents.start_incident(state, job, incident)
    known = job.incidents[at]
    died = rank_failures.add_failures(known.all_rank_failures, dead, step, unix_s)
    incident = replace(
        known,
        finding=replace(known.finding, reason=rank_failures.describe_failures(died)),
        rank_failures=died,
        nodes=tuple(sorted({*known.nodes, *nodes})),
    )
    grown = (*job.incidents[:at], incident, *job.incidents[at + 1 :])
    job = replace(job, incidents=grown, notices=replace(job.notices, has_unsent_deaths=True))
    return state, job, [SaveIncident(incident=incident)]


def _joinable(job: JobState, unix_s: float) -> int | None:
    """Return the index of the incident that a failure of now joins; None: it opens a new one."""
    for at in reversed(range(len(job.incidents))):
        incident = job.incidents[at]
        if incident.finding.kind is not FindingKind.DEATH:
            continue
        is_whole = incident.is_open and all(one.is_open for one in incident.rank_failures)
        return at if is_whole and abs(unix_s - incident.opened_unix_s) < GATHER_S else None
    return None


def _nodes(job: JobState, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(sorted({job.ranks[rank].node for rank in ranks if rank in job.ranks}))


def continue_without_ranks(
    job: JobState, ranks: Collection[int], unix_s: float, action: str
) -> tuple[JobState, list[Command]]:
    """Resolve the failures of these ranks; an incident stays open for its other failed ranks."""
    commands: list[Command] = []
    after = list(job.incidents)
    for i, incident in enumerate(job.incidents):
        before = incident.unresolved_ranks
        concerned = [rank for rank in iter_ranks(before) if rank in ranks]
        if not concerned:
            continue
        died = rank_failures.close_failures(
            incident.all_rank_failures, concerned, unix_s, max(0, job.progress.step)
        )
        incident = replace(incident, rank_failures=died)
        if not (left := incident.unresolved_ranks):
            after[i], said = incidents.close_one(job, incident, unix_s, action)
            commands += said
            continue
        gone, still = (
            rank_failures.ranks_label(to_ranges(concerned)),
            rank_failures.ranks_label(left),
        )
        note = f"{action}, without {gone}; not yet without {still}"
        after[i] = incident = replace(incident, actions=(*incident.actions, note))
        told = Log(text=f"job={job.name} incident={incident.incident_id} {note}")
        commands += [SaveIncident(incident=incident), told]
    return (replace(job, incidents=tuple(after)) if commands else job), commands
