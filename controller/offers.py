"""What is wanted and not yet observed is said again, each second; what nobody can take is given up.
Pure.
"""

from dataclasses import replace

from pacekeeper.controller.events import Command, NotifyDeaths, OfferPlan, SaveJob, Say
from pacekeeper.controller.state import JobState

REPEAT_S = 1.0  # between two times the same offer or death notice is said
OFFER_LIFE_S = 60.0  # an offer that nobody takes is given up


def say_again(job: JobState, now_s: float) -> tuple[JobState, list[Command]]:
    """On a tick: offers and deaths until they are observed; an offer that is over is given up."""
    over = _why_over(job, now_s)
    if job.desired is not None and over:
        given_up = Say(text=f"job={job.name} plan={job.desired.generation} given up: {over}")
        return replace(job, desired=None), [SaveJob(job=job.name), given_up]
    if now_s - job.said_s < REPEAT_S:
        return job, []
    commands: list[Command] = []
    if job.desired is not None:
        commands.append(
            OfferPlan(
                job=job.name,
                nodes=job.nodes,
                layout=job.desired,
                base_generation=job.desired_base,
                life=job.life,
            )
        )
    runs = set(job.ranks) if job.layout is None else set(job.layout.ranks)
    if set(job.dead) & runs and job.living:
        notice = NotifyDeaths(job=job.name, nodes=job.nodes, ranks=job.dead, life=job.life)
        commands.append(notice)
    return (replace(job, said_s=now_s) if commands else job), commands


def _why_over(job: JobState, now_s: float) -> str:
    """Why the plan on offer can not be taken any more; empty where it can, or there is none."""
    plan = job.desired
    if plan is None:
        return ""
    present = 0 if job.layout is None else job.layout.generation
    if set(plan.ranks) & set(job.dead):
        return "ranks died meanwhile"
    if present != job.desired_base:
        return f"generation {present} came first"
    over = job.desired_for - job.evidence.slow.keys()
    if over:
        return f"ranks {sorted(over)}, for which it was made, are slow no more"
    if job.evidence.slow and not job.desired_for:  # as the way home, or better shares for all
        return f"made for no one slow, and ranks {sorted(job.evidence.slow)} are"
    if now_s - job.offered_s > OFFER_LIFE_S:
        return f"not taken for {OFFER_LIFE_S:.0f} s"
    return ""
