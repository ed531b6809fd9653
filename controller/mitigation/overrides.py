"""Operator orders: issued, revoked, and their effect on each job. Pure.

A pause or a dry run also withdraws the open offer and the open proposal of the jobs concerned.
Cordons are applied by the policy (`controller/policy/cordons.py`). Called by `machine.py`.
"""

from dataclasses import replace

from pacekeeper.controller.mitigation import approvals, rollout
from pacekeeper.controller.state.events import (
    Command,
    DeleteOrder,
    Log,
    OrderGiven,
    SaveJob,
    SaveOrder,
)
from pacekeeper.controller.state.plan_phase import WithdrawCause
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.incidents.operator_orders import (
    OperatorOrder,
    OrderKind,
    parse_rank_subject,
    rank_subject,
)

MAX_ORDERS = 10_000


def find_order(state: State, kind: OrderKind, subject: str) -> OperatorOrder | None:
    """Return the order of this kind and subject that is in effect; None: none is."""
    return next((o for o in state.orders if (o.kind, o.subject) == (kind, subject)), None)


def subject_error(state: State, kind: OrderKind, subject: str) -> str | None:
    """Return why an order cannot have this subject; None: it can."""
    match kind:
        case OrderKind.CORDON_NODE:
            known = sorted({*state.nodes, *(n for job in state.jobs.values() for n in job.nodes)})
            return None if subject in known else f"no node {subject!r}; nodes are: {_listed(known)}"
        case OrderKind.CORDON_RANK:
            named = parse_rank_subject(subject)
            job = None if named is None else state.jobs.get(named[0])
            if named is None or job is None:
                return f"no rank {subject!r}: expected JOB/RANK, jobs are: {_listed(state.jobs)}"
            is_known = named[1] in job.ranks or named[1] in job.remembered
            return None if is_known else f"job {job.name} has no rank {named[1]}"
        case OrderKind.PAUSE:
            known = sorted(state.jobs)
            return None if subject in known else f"no job {subject!r}; jobs are: {_listed(known)}"
        case OrderKind.DRY_RUN:
            return None if not subject else "a dry run applies to all jobs: it has no subject"


def apply_order(state: State, event: OrderGiven, unix_s: float) -> tuple[State, list[Command]]:
    """Apply an order or its revocation; a repetition has no effect."""
    before = find_order(state, event.kind, event.subject)
    if event.is_on == (before is not None):
        return state, []
    others = tuple(order for order in state.orders if order is not before)
    if before is not None:
        state = replace(state, orders=others)
        said = f"order={before.kind} subject={before.subject} revoked by {event.operator}"
        state, commands = _apply_to_jobs(state, before)
        return state, [
            DeleteOrder(kind=before.kind, subject=before.subject),
            Log(text=said),
            *commands,
        ]
    if len(others) >= MAX_ORDERS:
        return state, []
    if subject_error(state, event.kind, event.subject) is not None:
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
    state, commands = _apply_to_jobs(state, order)
    return state, [SaveOrder(order=order), Log(text=said), *commands]


def pause_order(state: State, job: str) -> OperatorOrder | None:
    """Return the order that forbids plans for this job; None: they are allowed."""
    return find_order(state, OrderKind.PAUSE, job)


def dry_run_order(state: State) -> OperatorOrder | None:
    """Return the order that forbids offering plans; None: they are offered."""
    return find_order(state, OrderKind.DRY_RUN, "")


def orders_of_job(state: State, job: JobState) -> tuple[OperatorOrder, ...]:
    """Return the orders that apply to a job."""
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
    """Update the job's cordoned ranks: those with an order of their own or on a cordoned node."""
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


def _apply_to_jobs(state: State, order: OperatorOrder) -> tuple[State, list[Command]]:
    """Request a new decision for every job; withdraw the plans of jobs that may have none now."""
    commands: list[Command] = []
    jobs = dict(state.jobs)
    for name, known in state.jobs.items():
        job = with_cordons(state, known)
        job = replace(job, plan=replace(job.plan, decided_on=None))
        stop = pause_order(state, name) or dry_run_order(state)
        if stop is not None:
            label = "paused" if stop.kind is OrderKind.PAUSE else "dry run"
            job, said = _stop_plans(job, f"{label} {stop.text}")
            commands += said
        jobs[name] = job
    return replace(state, jobs=jobs), commands


def _stop_plans(job: JobState, why: str) -> tuple[JobState, list[Command]]:
    job, commands = approvals.withdraw(replace(job, plan=replace(job.plan, asked=0)), why)
    if job.plan.desired is None:
        return job, commands
    text = f"job={job.name} plan={job.plan.desired.generation} given up: {why}"
    return rollout.withdraw_offer(job, WithdrawCause.STOPPED), [
        *commands,
        SaveJob(job=job.name),
        Log(text=text),
    ]


def _listed(names: object) -> str:
    listed = sorted(map(str, names))[:20]  # type: ignore[call-overload]
    return ", ".join(listed) or "none yet"
