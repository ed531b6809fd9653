"""Death notices and suspect lists: what a job's agents must know of its dead and doubtful ranks.

Called by the machine when ranks die and on ticks. Decides when a notice is due and returns the
commands; sends nothing itself.
"""

from collections.abc import Collection
from dataclasses import replace

from pacekeeper.controller.state.events import Command, Log, NotifyDeaths
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import FindingKind

PAUSE_S = 0.02  # between two notices, for each `PAUSE_RANKS` ranks of the job; none for fewer
PAUSE_RANKS = 1024


def announce_deaths(job: JobState, now_s: float) -> tuple[JobState, list[Command]]:
    """Send a death notice, or leave it to a later tick where the last one has just been sent."""
    pause_s = len(job.ranks) // PAUSE_RANKS * PAUSE_S
    if now_s - job.notices.deaths_sent_s < pause_s:
        return replace(job, notices=replace(job.notices, has_unsent_deaths=True)), []
    return send_death_notice(job, now_s)


def send_death_notice(job: JobState, now_s: float) -> tuple[JobState, list[Command]]:
    """Send all dead ranks to the nodes of all live ranks."""
    commands: list[Command] = [*unlogged_deaths(job)]
    job = replace(job, notices=replace(job.notices, deaths_sent_s=now_s, has_unsent_deaths=False))
    if job.living:
        notice = NotifyDeaths(job=job.name, nodes=job.nodes, ranks=job.dead, run_id=job.run_id)
        commands.append(notice)
    return job, commands


def unlogged_deaths(job: JobState) -> list[Log]:
    """Return log lines of a failure incident that has grown since it was last logged."""
    if not job.notices.has_unsent_deaths:
        return []
    grown = [one for one in job.incidents if one.finding.kind is FindingKind.DEATH][-1:]
    return [
        Log(text=f"job={job.name} incident={one.incident_id} by now {one.finding.reason}")
        for one in grown
    ]


# A slow rank often fails soon after. Slow input and uneven work are not faults of a rank.
ACCUSING = frozenset({FindingKind.DEVICE, FindingKind.LINK, FindingKind.HOST})


def suspect_ranks(job: JobState, lemons: Collection[str] = ()) -> tuple[int, ...]:
    """Return the live ranks on nodes of ranks with an open finding, or on `lemons`, ascending."""
    found = (incident.finding for incident in job.open_incidents)
    accused = {finding.rank for finding in found if finding.kind in ACCUSING}
    if not accused and not lemons:
        return ()
    nodes = {known.node for rank, known in job.ranks.items() if rank in accused}.union(lemons)
    return tuple(rank for rank in job.living if job.ranks[rank].node in nodes)
