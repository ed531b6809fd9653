"""Backoff after a plan was rejected by a rank or denied by an operator. Pure.

The plan is withdrawn at once, and no plan of its level is offered for a while, twice as long each
time. The whole level waits, because shares follow the loads: the next plan of the level would
differ in detail and be rejected for the same reason. Backoff is not stored: a restarted controller
tries once more. Called by `machine/reports.py` and `approvals.py`.
"""

from dataclasses import replace

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.state.events import Command, Log, SaveDecision, SaveJob
from pacekeeper.controller.state.plan_phase import (
    OperatorDenial,
    PlanEvent,
    RankRejection,
    Refused,
    transition,
)
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import Decision, MitigationLevel, NoPlanCode
from pacekeeper.core.incidents.proposals import Proposal
from pacekeeper.core.layout.codec import layout_crc
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.records import PlanRefusedRecord
from pacekeeper.core.text import format_s

FIRST_WAIT_S = 60.0  # at least the lifetime of an offer, `rollout.OFFER_LIFE_S`
LONGEST_WAIT_S = 3600.0


def reject_plan(
    job: JobState, record: PlanRefusedRecord, now_s: float
) -> tuple[JobState, list[Command]]:
    """Withdraw the offered plan that a rank rejected: one rank is enough.

    A record of another plan, also one with the same generation, has no effect.

    Returns:
        The job, in which plans of the same level wait, and the commands that record the rejection.
    """
    offer = job.plan.offer
    if offer is None or offer.plan.generation != record.plan_generation:
        return job, []
    plan = offer.plan
    if record.rank not in job.ranks or layout_crc(plan) != record.layout_crc:
        return job, []
    level = offer.decision.level
    before = job.plan.refusals.get(level)
    count = 1 if before is None else before.count + 1
    waits_s = wait_s(count)
    refusal = RankRejection(
        plan=plan, rank=record.rank, reason=record.reason, count=count, until_s=now_s + waits_s
    )
    refused = Refused(level=level, refusal=refusal)
    text = f"given up: {refusal.text}; no {level} plan for {format_s(waits_s)}"
    decision = Decision(
        level=MitigationLevel.NOTHING,
        layout=None,
        reason=f"plan {plan.generation} {text}",
        no_plan=NoPlanCode.REJECTED,
    )
    job = replace(
        job,
        plan=replace(
            job.plan,
            pending=None,
            last_outcome=transition(job.plan.pending, PlanEvent.REJECTED, refused),
            last_decision=decision,
            refusals={**job.plan.refusals, level: refusal},
        ),
    )
    job, said = incidents.note_action(job, decision.reason)
    return job, [
        SaveDecision(job=job.name, step=job.progress.step, decision=decision),
        SaveJob(job=job.name),
        Log(text=f"job={job.name} plan={plan.generation} {text}"),
        *said,
    ]


def denial(
    job: JobState, proposal: Proposal, operator: str, reason: str, now_s: float
) -> OperatorDenial:
    """Return the denial of a proposal, with the time until which plans of its level wait.

    They wait at first as long as an unanswered proposal stands, and no shorter than plans that a
    rank refused.
    """
    before = job.plan.refusals.get(proposal.decision.level)
    count = 1 if before is None else before.count + 1
    stands_s = proposal.expires_unix_s - proposal.made_unix_s
    return OperatorDenial(
        plan=proposal.plan,
        operator=operator,
        reason=reason,
        count=count,
        until_s=now_s + wait_s(count, first_s=max(FIRST_WAIT_S, stands_s)),
    )


def wait_s(count: int, *, first_s: float = FIRST_WAIT_S) -> float:
    """Return how long plans of a level wait after `count` failures in a row."""
    return min(max(LONGEST_WAIT_S, first_s), first_s * 2.0 ** min(count - 1, 16))


def clear_refusals(job: JobState, layout: Layout) -> JobState:
    """Drop refusals as `layout` comes into force.

    A plan that the ranks applied clears the refusal of its level. A layout that survivors of a
    failure agreed on clears all: other ranks are asked from now on.
    """
    if layout.generation not in job.layouts.offer_reasons:
        return replace(job, plan=replace(job.plan, refusals={}, rollbacks={}))
    offer = job.plan.offer
    if offer is None or offer.plan != layout:
        return job
    level = offer.decision.level
    return replace(
        job,
        plan=replace(
            job.plan, refusals={r: kept for r, kept in job.plan.refusals.items() if r is not level}
        ),
    )
