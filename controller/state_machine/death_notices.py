"""Who of a job is dead, told to all its nodes and to the log at once;
`controller/mitigation/rollout.py` says it again.

A large job that is killed ends node by node: as many notices to as many nodes would keep the
controller from all other jobs for minutes. So the next notice pauses a little, and names all who
died meanwhile. Pure.
"""

from dataclasses import replace

from pacekeeper.controller.state_machine.events import Command, NotifyDeaths, Say
from pacekeeper.controller.state_machine.state import JobState
from pacekeeper.core.incidents.findings import FindingKind

PAUSE_S = 0.02  # between two notices, for each so many ranks of the job; none for fewer
PAUSE_RANKS = 1024


def tell(job: JobState, now_s: float) -> tuple[JobState, list[Command]]:
    """Ranks died: say so now or, where the last notice has just gone out, with a later tick."""
    pause_s = len(job.ranks) // PAUSE_RANKS * PAUSE_S
    if now_s - job.deaths_said_s < pause_s:
        return replace(job, has_untold_deaths=True), []
    return say(job, now_s)


def say(job: JobState, now_s: float) -> tuple[JobState, list[Command]]:
    """All who are dead, to all who live."""
    commands: list[Command] = [*untold(job)]
    job = replace(job, deaths_said_s=now_s, has_untold_deaths=False)
    if job.living:
        notice = NotifyDeaths(job=job.name, nodes=job.nodes, ranks=job.dead, life=job.life)
        commands.append(notice)
    return job, commands


def untold(job: JobState) -> list[Say]:
    """What the log has not heard of an incident that has grown."""
    if not job.has_untold_deaths:
        return []
    grown = [one for one in job.incidents if one.finding.kind is FindingKind.DEATH][-1:]
    return [
        Say(text=f"job={job.name} incident={one.incident_id} by now {one.finding.reason}")
        for one in grown
    ]
