"""A plan that a rank refused or a person denied is given up at once, and no other of its kind is
offered for a while, longer each time. Pure.

The kind is the rung, not the content alone: shares follow the loads, so that the next plan would be
another one to the letter and refused all the same. A restarted controller tries once more.
"""

from dataclasses import replace

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.state.events import Command, SaveDecision, SaveJob, Say
from pacekeeper.controller.state.job_parts import Refusal
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from pacekeeper.core.incidents.proposals import Proposal
from pacekeeper.core.layout.codec import layout_crc
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.records import PlanRefusedRecord

FIRST_WAIT_S = 60.0  # no sooner than an offer that nobody answers is made anew
LONGEST_WAIT_S = 3600.0


def take(job: JobState, record: PlanRefusedRecord, now_s: float) -> tuple[JobState, list[Command]]:
    """One rank that can not follow is enough: nobody moves without it. What speaks of another plan
    than the one that is offered, if only of the same number, changes nothing.
    """
    plan = job.plan.desired
    if plan is None or plan.generation != record.plan_generation or record.rank not in job.ranks:
        return job, []
    if layout_crc(plan) != record.layout_crc:
        return job, []
    assert job.plan.last_decision is not None, "a plan is offered by a decision"
    rung = job.plan.last_decision.rung
    before = job.plan.refusals.get(rung)
    count = 1 if before is None else before.count + 1
    waits_s = wait_s(count)
    refusal = Refusal(
        plan=plan, rank=record.rank, reason=record.reason, count=count, until_s=now_s + waits_s
    )
    text = f"given up: {refusal.text}; no {rung} plan for {waits_s:.0f} s"
    decision = Decision(
        rung=MitigationLevel.NOTHING, layout=None, reason=f"plan {plan.generation} {text}"
    )
    job = replace(
        job,
        plan=replace(
            job.plan,
            desired=None,
            last_decision=decision,
            refusals={**job.plan.refusals, rung: refusal},
        ),
    )
    job, said = incidents.note_action(job, decision.reason)
    return job, [
        SaveDecision(job=job.name, step=job.progress.step, decision=decision),
        SaveJob(job=job.name),
        Say(text=f"job={job.name} plan={plan.generation} {text}"),
        *said,
    ]


def denied(job: JobState, proposal: Proposal, said_by: str, reason: str, now_s: float) -> JobState:
    """A person does not want this plan: its kind waits, at first as long as a proposal that nobody
    answers stands, and no sooner than one that a rank refused.
    """
    rung = proposal.decision.rung
    before = job.plan.refusals.get(rung)
    count = 1 if before is None else before.count + 1
    stands_s = proposal.expires_unix_s - proposal.made_unix_s
    refusal = Refusal(
        plan=proposal.plan,
        rank=None,
        reason=reason,
        count=count,
        until_s=now_s + wait_s(count, first_s=max(FIRST_WAIT_S, stands_s)),
        denied_by=said_by,
    )
    return replace(job, plan=replace(job.plan, refusals={**job.plan.refusals, rung: refusal}))


def wait_s(count: int, *, first_s: float = FIRST_WAIT_S) -> float:
    """How long a kind of plan waits that has failed so often in a row."""
    return min(max(LONGEST_WAIT_S, first_s), first_s * 2.0 ** min(count - 1, 16))


def after(job: JobState, layout: Layout) -> JobState:
    """`layout` comes into force. A plan that is taken proves its kind; what survivors agreed on
    changes who is asked, so that all that was refused may be tried again.
    """
    if layout.generation not in job.layouts.offer_reasons:
        return replace(job, plan=replace(job.plan, refusals={}, rollbacks={}))
    if job.plan.desired != layout or job.plan.last_decision is None:
        return job
    rung = job.plan.last_decision.rung
    return replace(
        job,
        plan=replace(
            job.plan, refusals={r: kept for r, kept in job.plan.refusals.items() if r is not rung}
        ),
    )
