"""Rollout of a plan to the ranks: the offer, its repetition each second, its withdrawal.

Called by the machine on decisions and ticks. Pure.
"""

from collections.abc import Collection
from dataclasses import replace
from math import inf

from pacekeeper.controller.mitigation import notices, verification
from pacekeeper.controller.mitigation.notices import suspect_ranks
from pacekeeper.controller.state.events import (
    Command,
    Log,
    NotifySuspects,
    OfferPlan,
    SaveDecision,
    SaveJob,
)
from pacekeeper.controller.state.plan_phase import (
    AwaitingApproval,
    Offered,
    PlanEvent,
    Proposed,
    WithdrawCause,
    Withdrawn,
    transition,
)
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import Decision
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.text import format_s

REPEAT_S = 1.0  # between two repetitions of an offer or a death notice
HOST_BYTES = 24.0  # of one expert replica in an encoded offer
OFFERED_BYTES_PER_S = 64e6  # to all nodes together: a large job's offer is repeated less often
NODES_PER_S = 200.0  # of one job to which suspects are repeated; changes are sent at once to all
OFFER_LIFE_S, OFFER_LIFE_STEPS = 60.0, 8  # an offer that is not applied by then is withdrawn


def offer(
    job: JobState, before: Proposed | AwaitingApproval, decision: Decision, now_s: float
) -> tuple[JobState, list[Command]]:
    """Offer the plan of a decision to the ranks, which run the layout it was made on.

    Args:
        job: The job, with no plan pending but `before`.
        before: The phase the plan is in.
        decision: The plan, as priced last.
        now_s: The machine's clock.
    """
    assert decision.layout is not None, "a level other than nothing has a layout"
    base = job.layouts.current
    assert base is not None, "an actionable job has a layout"
    plan = decision.layout
    offered = Offered(
        decision=decision,
        plan=plan,
        base_generation=base.generation,
        slow_ranks=frozenset(job.detection.evidence.slow),
        offered_s=now_s,
    )
    job = verification.note_rollback(job, decision, now_s)
    job = replace(
        job,
        plan=replace(
            job.plan,
            pending=transition(before, PlanEvent.OFFERED, offered),
        ),
        layouts=replace(
            job.layouts,
            known={**job.layouts.known, plan.generation: plan},
            offer_reasons={**job.layouts.offer_reasons, plan.generation: decision.reason},
            newest_generation=plan.generation,
        ),
        notices=replace(job.notices, repeated_s=now_s),
    )
    return job, [
        SaveDecision(job=job.name, step=job.progress.step, decision=decision),
        SaveJob(job=job.name),
        decision_log_line(job.name, decision),
        _offer_command(job, offered),
    ]


def with_new_exposure(decision: Decision, before: Decision | None) -> Decision:
    """Add the remaining exposure to the reason, unless the decision before had the same one.

    Args:
        decision: The new decision; one that did not compute its exposure takes over the known one.
        before: The job's decision before; None: there was none.
    """
    if decision.exposure is None:
        return replace(decision, exposure=None if before is None else before.exposure)
    if not has_new_exposure(decision, before):
        return decision
    return replace(decision, reason=decision.text, is_exposure_in_reason=True)


def has_new_exposure(decision: Decision, before: Decision | None) -> bool:
    """Whether the decision has an exposure that the decision before did not report."""
    known = None if before is None else before.exposure
    return decision.exposure is not None and decision.exposure.is_any and decision.exposure != known


def decision_log_line(name: str, decision: Decision) -> Log:
    """Return the log line of a decision."""
    return Log(text=f"job={name} decision={decision.level} {decision.reason}")


def repeat_notices(
    job: JobState, now_s: float, lemons: Collection[str] = ()
) -> tuple[JobState, list[Command]]:
    """On a tick: repeat the offer, death notices and suspects; withdraw an offer that is stale."""
    offer = job.plan.offer
    if offer is not None and (over := _withdraw_reason(job, offer, now_s)):
        given_up = Log(text=f"job={job.name} plan={offer.plan.generation} given up: {over}")
        return withdraw_offer(job, WithdrawCause.STALE), [SaveJob(job=job.name), given_up]
    commands: list[Command] = []
    if job.notices.has_unsent_deaths:
        job, commands = notices.announce_deaths(job, now_s)
    if now_s - job.notices.repeated_s < REPEAT_S:
        return job, commands
    if offer is not None and _is_due(job, offer, now_s):
        commands.append(_offer_command(job, offer))
    runs = set(job.ranks) if job.layouts.current is None else set(job.layouts.current.ranks)
    if now_s - job.notices.deaths_sent_s >= REPEAT_S and runs.intersection(job.dead):
        job, said = notices.send_death_notice(job, now_s)
        commands += said
    suspect, nodes = suspect_ranks(job, lemons), job.nodes
    # Once suspects were sent, an empty list is repeated too.
    since_s = now_s - job.notices.suspects_sent_s
    if suspect != job.notices.suspects or max(REPEAT_S, len(nodes) / NODES_PER_S) <= since_s < inf:
        commands.append(NotifySuspects(job=job.name, nodes=nodes, ranks=suspect, run_id=job.run_id))
        job = replace(job, notices=replace(job.notices, suspects=suspect, suspects_sent_s=now_s))
    return (
        replace(job, notices=replace(job.notices, repeated_s=now_s)) if commands else job
    ), commands


def stale_reason(job: JobState, plan: Layout, base: int, slow: Collection[int]) -> str | None:
    """Return why a plan can no longer be applied; None: it can.

    Args:
        job: The job.
        plan: The layout of the plan.
        base: The generation that the plan was made for.
        slow: The slow ranks that it was made for.
    """
    present = 0 if job.layouts.current is None else job.layouts.current.generation
    if set(plan.ranks) & set(job.dead):
        return "ranks of the plan died"
    if present != base:
        return f"the job runs generation {present} by now"
    if over := sorted(set(slow) - job.detection.evidence.slow.keys()):
        return f"ranks {format_ranks(over)}, for which it was made, are no longer slow"
    if job.detection.evidence.slow and not slow:  # a return to the baseline, or better shares
        return (
            f"it was made without slow ranks; {format_ranks(job.detection.evidence.slow)} are slow"
        )
    return None


def withdraw_offer(job: JobState, cause: WithdrawCause) -> JobState:
    """Return the job without the plan on offer. Raises PlanPhaseError where nothing is offered."""
    ended = transition(job.plan.pending, PlanEvent.WITHDRAWN, Withdrawn(cause=cause))
    return replace(job, plan=replace(job.plan, pending=None, last_outcome=ended))


def _withdraw_reason(job: JobState, offer: Offered, now_s: float) -> str | None:
    """Return why the plan on offer can no longer be applied; None: it can."""
    why = stale_reason(job, offer.plan, offer.base_generation, offer.slow_ranks)
    life_s = verification.timeout_s(job, OFFER_LIFE_S, OFFER_LIFE_STEPS)
    if why is None and now_s - offer.offered_s > life_s:
        return f"not applied for {format_s(life_s)}"
    return why


def _is_due(job: JobState, offer: Offered, now_s: float) -> bool:
    """Whether the offer is to be repeated now.

    Streams lose nothing: repetition serves agents that reconnected. Offers are repeated as often as
    notices, or less often where they are megabytes for each of a thousand nodes.
    """
    num_hosts = sum(len(hosts) for layer in offer.plan.experts for hosts in layer)
    period_s = max(REPEAT_S, num_hosts * HOST_BYTES * len(job.nodes) / OFFERED_BYTES_PER_S)
    repeated_s = job.notices.repeated_s
    return (now_s - offer.offered_s) // period_s > (repeated_s - offer.offered_s) // period_s


def _offer_command(job: JobState, offer: Offered) -> OfferPlan:
    return OfferPlan(
        job=job.name,
        nodes=job.nodes,
        layout=offer.plan,
        base_generation=offer.base_generation,
        run_id=job.run_id,
    )


def on_all_recovered(job: JobState) -> JobState:
    """The last finding closed: without a baseline, the layout made for it is provisional."""
    baseline, layout = job.layouts.baseline, job.layouts.current
    if baseline is None:
        return replace(job, layouts=replace(job.layouts, is_provisional=True))
    is_there = layout is not None and is_same_work(baseline, layout)
    return replace(job, layouts=replace(job.layouts, baseline=None if is_there else baseline))


def is_same_work(one: Layout, other: Layout) -> bool:
    """Whether both layouts give every rank the same blocks and shares."""
    return (one.pipelines, one.experts) == (other.pipelines, other.experts)


def leaves_ranks_out(baseline: Layout | None, layout: Layout) -> bool:
    """Whether the baseline lacks ranks that joined since."""
    return baseline is not None and baseline.ranks != layout.ranks
