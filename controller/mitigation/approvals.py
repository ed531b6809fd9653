"""Proposals: plans that need an operator's approval before they are offered.

A proposal is valid for one layout, its live ranks and its slow ranks; any change makes it stale.
Once approved in time it is priced again, since loads and speeds changed, and offered if it still
pays. Called by the machine on decisions, answers and ticks. Pure.
"""

from dataclasses import replace

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.mitigation import backoff, rollout
from pacekeeper.controller.state.events import Command, Log, ProposalAnswered, SaveProposal
from pacekeeper.controller.state.plan_phase import (
    AwaitingApproval,
    PlanEvent,
    Proposed,
    Refused,
    WithdrawCause,
    Withdrawn,
    transition,
)
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import STATE_MOVING_LEVELS, Decision
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.text import format_s

KEPT_PROPOSALS = 16  # of one job, to be asked for; the store keeps all


def needs_approval(config: PolicyConfig, decision: Decision) -> bool:
    """Whether an operator must approve this plan before it is offered."""
    if config.mode != "approve":
        return False
    return (
        config.approve == "all" or decision.level in STATE_MOVING_LEVELS or decision.moved_bytes > 0
    )


def awaits_answer(job: JobState) -> bool:
    """Whether a proposal that is still valid waits for an operator; no other plan is made then."""
    proposal = job.plan.open_proposal
    if proposal is None or proposal.answer is not ProposalState.WAITING:
        return False
    return proposal.slow == job.detection.evidence.slow and _stale_reason(job, proposal) is None


def find_proposal(state: State, proposal_id: int) -> Proposal | None:
    """Return the proposal with this number, open or closed; None: no job keeps it."""
    known = (proposal for job in state.jobs.values() for proposal in job.plan.proposals)
    return next((one for one in known if one.proposal_id == proposal_id), None)


def propose(
    state: State, job: JobState, proposed: Proposed, config: PolicyConfig, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    """Ask operators to approve a plan; where it waits already, only its prices are updated."""
    base, decision = job.layouts.current, proposed.decision
    assert base is not None and decision.layout is not None, "a plan is for a layout"
    known = job.plan.open_proposal
    if known is not None and known.plan == decision.layout:
        known = replace(known, decision=decision, slow=dict(job.detection.evidence.slow))
        job, said = _update(job, known)
        return state, job, said
    job, commands = withdraw(job, "another plan is better by now")
    proposal = Proposal(
        proposal_id=state.next_proposal_id,
        job=job.name,
        decision=decision,
        base=base,
        slow=dict(job.detection.evidence.slow),
        incident_ids=tuple(one.incident_id for one in incidents.mitigable(job)),
        made_unix_s=unix_s,
        expires_unix_s=unix_s + config.approve_within_s,
    )
    state = replace(state, next_proposal_id=state.next_proposal_id + 1)
    waiting = AwaitingApproval(proposal=proposal)
    job = replace(
        job,
        plan=replace(
            job.plan,
            pending=transition(proposed, PlanEvent.APPROVAL_ASKED, waiting),
            closed_proposals=job.plan.closed_proposals[-(KEPT_PROPOSALS - 1) :],
        ),
    )
    job, said = incidents.note_action(
        job,
        f"proposal {proposal.proposal_id}, to be approved within "
        f"{format_s(config.approve_within_s)}: {decision.reason}",
    )
    text = f"job={job.name} proposal={proposal.proposal_id} {decision.level} {decision.reason}"
    return state, job, [*commands, SaveProposal(proposal=proposal), Log(text=text), *said]


def answer(
    job: JobState, said: ProposalAnswered, config: PolicyConfig, now_s: float, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Apply an operator's answer to a proposal. Only the first answer in time counts."""
    job, commands = close_if_stale(job, config, unix_s)
    proposal = job.plan.open_proposal
    if proposal is None or proposal.proposal_id != said.proposal_id:
        return job, commands
    if proposal.answer is not ProposalState.WAITING:
        return job, commands
    if said.is_approved:
        # A decision that is being computed now is not for the approved plan.
        job = replace(job, plan=replace(job.plan, asked=0, decided_on=None))
        approved = replace(proposal, answer=ProposalState.APPROVED, operator=said.operator)
        job, more = _update(job, approved)
        job, noted = _note(job, proposal, f"approved by {said.operator}")
        return job, [*commands, *more, *noted]
    denial = backoff.denial(job, proposal, said.operator, said.reason, now_s)
    level = proposal.decision.level
    job = replace(job, plan=replace(job.plan, refusals={**job.plan.refusals, level: denial}))
    denied = replace(
        proposal, answer=ProposalState.DENIED, note=said.reason, operator=said.operator
    )
    outcome = Refused(level=level, refusal=denial)
    outcome = transition(job.plan.pending, PlanEvent.DENIED, outcome)
    job, more = _close(job, denied, outcome)
    text = f"{denied.answer} by {said.operator}" + (f": {said.reason}" if said.reason else "")
    job, noted = _note(job, proposal, text)
    more = [*more, *noted]
    return job, [*commands, *more]


def close_if_stale(
    job: JobState, config: PolicyConfig, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Close the open proposal if it is expired or stale. Called on ticks and before each use."""
    proposal = job.plan.open_proposal
    if proposal is None:
        return job, []
    if unix_s >= proposal.expires_unix_s:
        within_s = proposal.expires_unix_s - proposal.made_unix_s
        return _close_unanswered(
            job, proposal, ProposalState.EXPIRED, f"not approved within {format_s(within_s)}"
        )
    if config.mode != "approve":
        return _close_unanswered(
            job, proposal, ProposalState.STALE, f"plans are not proposed in mode {config.mode}"
        )
    why = _stale_reason(job, proposal)
    return (job, []) if why is None else _close_unanswered(job, proposal, ProposalState.STALE, why)


def shift_dates(job: JobState, by_s: float) -> tuple[JobState, list[Command]]:
    """Move the dates of the open proposal after the wall clock was set by `by_s`."""
    proposal = job.plan.open_proposal
    if proposal is None:
        return job, []
    made_s, expires_s = proposal.made_unix_s + by_s, proposal.expires_unix_s + by_s
    return _update(job, replace(proposal, made_unix_s=made_s, expires_unix_s=expires_s))


def offer_approved(
    job: JobState, decision: Decision | None, config: PolicyConfig, now_s: float, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Offer the approved plan at its present price; close the proposal where it no longer pays.

    Args:
        job: The job.
        decision: The new price of the plan; None: it could not be priced.
        config: The policy's settings.
        now_s: The machine's clock.
        unix_s: The same as Unix time.
    """
    job, commands = close_if_stale(job, config, unix_s)
    proposal = job.plan.approved
    if proposal is None:
        return job, commands
    if decision is None or decision.layout is None:
        why = "it could not be priced again" if decision is None else decision.reason
        job, said = _close_unanswered(job, proposal, ProposalState.STALE, why)
        return job, [*commands, *said]
    assert decision.layout == proposal.plan, "no other plan was approved"
    waiting = job.plan.pending
    assert isinstance(waiting, AwaitingApproval), "it has an approved proposal"
    accepted = replace(proposal, answer=ProposalState.OFFERED, decision=decision)
    kept = (*job.plan.closed_proposals, accepted)
    job = replace(job, plan=replace(job.plan, pending=None, closed_proposals=kept))
    job, offered = rollout.offer(job, waiting, decision, now_s)
    return job, [*commands, SaveProposal(proposal=accepted), *offered]


def withdraw(job: JobState, why: str) -> tuple[JobState, list[Command]]:
    """Close the open proposal as stale, with this reason; no effect without one."""
    proposal = job.plan.open_proposal
    return (
        (job, [])
        if proposal is None
        else _close_unanswered(job, proposal, ProposalState.STALE, why)
    )


def _stale_reason(job: JobState, proposal: Proposal) -> str | None:
    """Return what changed since the proposal was made, which makes it stale; None: nothing."""
    base, plan = proposal.base, proposal.plan
    why = rollout.stale_reason(job, plan, base.generation, proposal.slow)
    if why is not None:
        return why
    if job.layouts.current != base:
        return f"generation {base.generation} denotes another layout by now"
    if job.layouts.newest_generation >= plan.generation:
        return f"generation {job.layouts.newest_generation} came first"
    if more := sorted(job.detection.evidence.slow.keys() - proposal.slow.keys()):
        return f"ranks {format_ranks(more)} became slow, too"
    return None


def _close_unanswered(
    job: JobState, proposal: Proposal, how: ProposalState, note: str
) -> tuple[JobState, list[Command]]:
    """Close the open proposal without an answer; its situation is decided on again."""
    cause = WithdrawCause.EXPIRED if how is ProposalState.EXPIRED else WithdrawCause.STALE
    outcome = transition(job.plan.pending, PlanEvent.WITHDRAWN, Withdrawn(cause=cause))
    job, commands = _close(job, replace(proposal, answer=how, note=note), outcome)
    job, noted = _note(job, proposal, f"{how}: {note}" if note else how.value)
    return job, [*commands, *noted]


def _close(
    job: JobState, proposal: Proposal, outcome: Refused | Withdrawn
) -> tuple[JobState, list[Command]]:
    """Move the proposal, as it ended, to the closed ones."""
    plan = replace(
        job.plan,
        pending=None,
        last_outcome=outcome,
        closed_proposals=(*job.plan.closed_proposals, proposal),
        asked=0,
        decided_on=None,
    )
    return replace(job, plan=plan), [SaveProposal(proposal=proposal)]


def _update(job: JobState, proposal: Proposal) -> tuple[JobState, list[Command]]:
    waiting = AwaitingApproval(proposal=proposal)
    pending = transition(job.plan.pending, PlanEvent.PROPOSAL_UPDATED, waiting)
    job = replace(job, plan=replace(job.plan, pending=pending))
    return job, [SaveProposal(proposal=proposal)]


def _note(job: JobState, proposal: Proposal, text: str) -> tuple[JobState, list[Command]]:
    """Log a change of a proposal, and append it to the actions of the open incidents."""
    say = Log(text=f"job={job.name} proposal={proposal.proposal_id} {text}")
    job, noted = incidents.note_action(job, f"proposal {proposal.proposal_id} {text}")
    return job, [say, *noted]
