"""Who of a job is dead, told to all its nodes at once; `offers.py` says it again. Pure.

A large job that is killed ends node by node: as many notices to as many nodes would keep the
controller from all other jobs for minutes. So the next notice pauses a little, and names all who
died meanwhile.
"""

from dataclasses import replace

from pacekeeper.controller.events import Command, NotifyDeaths
from pacekeeper.controller.state import JobState

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
    job = replace(job, deaths_said_s=now_s, has_untold_deaths=False)
    if not job.living:
        return job, []
    return job, [NotifyDeaths(job=job.name, nodes=job.nodes, ranks=job.dead, life=job.life)]
