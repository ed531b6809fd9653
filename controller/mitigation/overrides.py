"""Orders of people: given, taken back, and what they come to for each job. Pure.

A pause or a dry run also takes back what is on its way: an offer that no rank has taken yet, and a
proposal. A cordon is honoured by the policy (`controller/policy/cordons.py`).
"""

from dataclasses import replace

from pacekeeper.controller.mitigation import approvals, rollout
from pacekeeper.controller.state.events import (
    Command,
    DropOrder,
    OrderGiven,
    SaveJob,
    SaveOrder,
    Say,
)
from pacekeeper.controller.state.plan_phase import WithdrawCause
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.incidents.operator_orders import (
    OperatorOrder,
    OrderKind,
    parse_rank_subject,
    rank_subject,
)

MOST_ORDERS = 10_000


def find_order(state: State, kind: OrderKind, subject: str) -> OperatorOrder | None:
    """The order that stands; None where none does."""
    return next((o for o in state.orders if (o.kind, o.subject) == (kind, subject)), None)


def why_unknown(state: State, kind: OrderKind, subject: str) -> str:
    """Why an order of this subject can not be given; empty: it can."""
    match kind:
        case OrderKind.CORDON_NODE:
            known = sorted({*state.nodes, *(n for job in state.jobs.values() for n in job.nodes)})
            return "" if subject in known else f"no node {subject!r}; there are: {_some(known)}"
        case OrderKind.CORDON_RANK:
            named = parse_rank_subject(subject)
            job = None if named is None else state.jobs.get(named[0])
            if named is None or job is None:
                return f"no rank {subject!r}: expected JOB/RANK, jobs are: {_some(state.jobs)}"
            is_known = named[1] in job.ranks or named[1] in job.remembered
            return "" if is_known else f"job {job.name} has no rank {named[1]}"
        case OrderKind.PAUSE:
            known = sorted(state.jobs)
            return "" if subject in known else f"no job {subject!r}; there are: {_some(known)}"
        case OrderKind.DRY_RUN:
            return "" if not subject else "a dry run is of everything: it has no subject"


def apply_order(state: State, event: OrderGiven, unix_s: float) -> tuple[State, list[Command]]:
    """Take in an order; the same one again changes nothing."""
    before = find_order(state, event.kind, event.subject)
    if event.is_on == (before is not None):
        return state, []
    others = tuple(order for order in state.orders if order is not before)
    if before is not None:
        state = replace(state, orders=others)
        said = f"order={before.kind} subject={before.subject} taken back by {event.operator}"
        state, commands = _woken(state, before)
        return state, [
            DropOrder(kind=before.kind, subject=before.subject),
            Say(text=said),
            *commands,
        ]
    if len(others) >= MOST_ORDERS or why_unknown(state, event.kind, event.subject):
        return state, []
    named = parse_rank_subject(event.subject) if event.kind is OrderKind.CORDON_RANK else None
    order = OperatorOrder(
        kind=event.kind,
        subject=event.subject,
        operator=event.operator,
        reason=event.reason,
        since_unix_s=unix_s,
        run_id=0 if named is None else state.jobs[named[0]].run_id,
    )
    state = replace(state, orders=(*others, order))
    said = f"order={order.kind} subject={order.subject} {order.text}"
    state, commands = _woken(state, order)
    return state, [SaveOrder(order=order), Say(text=said), *commands]


def why_no_plans(state: State, job: str) -> str:
    """Why no plan of this job may be made; empty: it may."""
    order = find_order(state, OrderKind.PAUSE, job)
    return "" if order is None else f"paused {order.text}"


def why_dry(state: State) -> str:
    """Why plans are made, and not offered; empty: they are."""
    order = find_order(state, OrderKind.DRY_RUN, "")
    return "" if order is None else f"dry run {order.text}"


def orders_of_job(state: State, job: JobState) -> tuple[OperatorOrder, ...]:
    """The orders that hold for a job."""
    nodes, ranks = set(job.nodes), {rank_subject(job.name, rank) for rank in job.ranks}
    return tuple(
        order
        for order in state.orders
        if order.kind is OrderKind.DRY_RUN
        or (order.kind is OrderKind.PAUSE and order.subject == job.name)
        or (order.kind is OrderKind.CORDON_NODE and order.subject in nodes)
        or (
            order.kind is OrderKind.CORDON_RANK
            and order.subject in ranks
            and order.run_id == job.run_id
        )
    )


def with_cordons(state: State, job: JobState) -> JobState:
    """The job with the ranks that are cordoned now, themselves or by their node."""
    if not state.orders and not job.cordoned:
        return job
    nodes = {o.subject for o in state.orders if o.kind is OrderKind.CORDON_NODE}
    named = {
        o.subject
        for o in state.orders
        if o.kind is OrderKind.CORDON_RANK and o.run_id == job.run_id
    }
    cordoned = frozenset(
        rank
        for rank, known in job.ranks.items()
        if known.node in nodes or (named and rank_subject(job.name, rank) in named)
    )
    return job if cordoned == job.cordoned else replace(job, cordoned=cordoned)


def _woken(state: State, order: OperatorOrder) -> tuple[State, list[Command]]:
    """Every job it holds for is decided on anew; where no plans may be, none is on its way."""
    commands: list[Command] = []
    jobs = dict(state.jobs)
    for name, known in state.jobs.items():
        job = with_cordons(state, known)
        job = replace(job, plan=replace(job.plan, decided_on=None))
        if why := why_no_plans(state, name) or why_dry(state):
            job, said = _stopped(job, why)
            commands += said
        jobs[name] = job
    return replace(state, jobs=jobs), commands


def _stopped(job: JobState, why: str) -> tuple[JobState, list[Command]]:
    job, commands = approvals.withdraw(replace(job, plan=replace(job.plan, asked=0)), why)
    if job.plan.desired is None:
        return job, commands
    text = f"job={job.name} plan={job.plan.desired.generation} given up: {why}"
    return rollout.withdraw_offer(job, WithdrawCause.STOPPED), [
        *commands,
        SaveJob(job=job.name),
        Say(text=text),
    ]


def _some(names: object) -> str:
    listed = sorted(map(str, names))[:20]  # type: ignore[call-overload]
    return ", ".join(listed) or "none yet"
