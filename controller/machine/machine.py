"""The controller as one pure function: (state, event, now) -> (state, commands).

Level-triggered: unacknowledged desired state is sent again, and handlers are idempotent. All state
changes happen here and below: `reports.py`, `steps.py`, `controller/detection/incidents.py` (what
reports contain), `controller/detection/root_cause.py` (why a rank is slow),
`controller/policy/decide.py` (what to do).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from pacekeeper.controller.detection import coverage, hangs, root_cause
from pacekeeper.controller.detection.link_verdicts import slow_links
from pacekeeper.controller.machine import job_lifecycle, report_parsing, reports, tick
from pacekeeper.controller.machine.tick import next_jobs
from pacekeeper.controller.mitigation import approvals, overrides, probes, rollout
from pacekeeper.controller.policy.inputs import snapshot_of
from pacekeeper.controller.state import device_history
from pacekeeper.controller.state.events import (
    Command,
    DecisionMade,
    Event,
    Failed,
    Log,
    NodeAttached,
    NodeDetached,
    NodeReported,
    NodesReported,
    OrderGiven,
    ProposalAnswered,
    RequestDecision,
    Tick,
)
from pacekeeper.controller.state.persistent_map import node_map
from pacekeeper.controller.state.plan_phase import (
    PlanEvent,
    Proposed,
    WithdrawCause,
    Withdrawn,
    transition,
)
from pacekeeper.controller.state.state import JobState, NodeState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import Blindness, CoverageState, MitigationLevel
from pacekeeper.core.telemetry.node_report import JobReport

Handler = Callable[[State], tuple[State, Sequence[Command]]]


def contain_failure(
    state: State, name: str, doing: str, part: Handler, *, drops_steps: bool = False
) -> tuple[State, Sequence[Command]]:
    """Apply `part` to the state; on an exception keep the state and report the failure.

    Args:
        state: The state before.
        name: The job that is being handled.
        doing: What is being done, for the log.
        part: The step to apply.
        drops_steps: Drop the pending steps of the job: every later report would fail on them again.
    """
    try:
        return part(state)
    except Exception as error:
        commands: list[Command] = [Failed(what=f"job={name} {doing} failed", error=error)]
        job = state.jobs.get(name)
        if job is None:
            return state, commands
        job = replace(
            job,
            progress=replace(job.progress, pending={} if drops_steps else job.progress.pending),
            coverage=replace(
                job.coverage,
                state=CoverageState.BLIND,
                reason=f"{doing} failed by an internal error of the controller: {error!r:.500}",
                blind=Blindness.FAILED,
            ),
        )
        return replace(state, jobs={**state.jobs, name: job}), commands


DECIDE_WITHIN_S = 120.0  # after which a requested decision is given up
CALM_PERIOD_STEPS = 8  # between two decisions while no rank is slow


def advance(
    state: State, event: Event, *, config: ControllerConfig, now_s: float
) -> tuple[State, tuple[Command, ...]]:
    """Apply one event to the state.

    Args:
        state: The state before.
        event: The event.
        config: The controller's settings.
        now_s: The machine's clock; it never runs backwards.

    Returns:
        The new state, and the commands to execute.
    """
    match event:
        case NodeAttached():
            return _attach(state, event, now_s), ()
        case NodeDetached():
            return _detach(state, event), ()
        case NodeReported():
            return _report(state, (event,), config, now_s)
        case NodesReported():
            return _report(state, event.reports, config, now_s)
        case Tick(unix_offset_s=unix_offset_s):
            state, said = tick.apply_clock_change(state, unix_offset_s)
            state, more = _tick(state, config, now_s)
            return state, (*said, *more)
        case DecisionMade():
            return _apply_decision(state, event, config, now_s)
        case ProposalAnswered():
            return _apply_answer(state, event, config, now_s)
        case OrderGiven():
            state, said = overrides.apply_order(state, event, now_s + state.unix_offset_s)
            return state, tuple(said)


def _attach(state: State, event: NodeAttached, now_s: float) -> State:
    known = state.nodes.get(event.node)
    node = NodeState(
        name=event.node,
        agent_incarnation=event.agent_incarnation,
        product_version=event.product_version,
        rack=event.rack,
        last_report_s=now_s,
    )
    if known is not None:
        node = replace(
            node,
            health=known.health,
            devices=known.devices,
            host=known.host,
            unread_devices=known.unread_devices,
            unread_host=known.unread_host,
            newest=known.newest,
        )
    return _with_node(state, node)


def _detach(state: State, event: NodeDetached) -> State:
    """Mark an agent as disconnected. Its ranks do not count as dead."""
    known = state.nodes.get(event.node)
    if known is None or known.agent_incarnation != event.agent_incarnation:
        return state  # an older stream of a node that has reconnected
    return _with_node(state, replace(known, is_connected=False))


def _report(
    state: State, events: Sequence[NodeReported], config: ControllerConfig, now_s: float
) -> tuple[State, tuple[Command, ...]]:
    """Apply reports: node data first, then job by job, both in the order of arrival."""
    told: dict[str, NodeState] = {}
    for event in events:
        known = told.get(event.node) or state.nodes.get(event.node)
        if known is not None:
            told[event.node] = root_cause.store_samples(known, event.report, now_s)
    if told:
        state = replace(state, nodes=node_map(state.nodes).changed(told))
    commands: list[Command] = []
    for node, report in report_parsing.by_job(events):
        state, said = _apply_job_report(state, node, report, config, now_s)
        commands += said
    return state, tuple(commands)


def _apply_job_report(
    state: State, node: str, report: JobReport, config: ControllerConfig, now_s: float
) -> tuple[State, list[Command]]:
    """Apply one job's part. Exits of ranks come first, so that no failed judgement loses them."""
    name, commands = report.job, list[Command]()
    before = state.jobs.get(name)

    def learn(state: State) -> tuple[State, Sequence[Command]]:
        return reports.ingest_report(state, node, report, now_s)

    def judge(state: State) -> tuple[State, Sequence[Command]]:
        return reports.judge(state, name, config, now_s)

    def act(state: State) -> tuple[State, Sequence[Command]]:
        return _request_decision(state, name, config, now_s)

    state, said = contain_failure(state, name, "applying its report", learn)
    commands += said
    if name not in state.jobs:
        return state, commands
    state, said = contain_failure(state, name, "judging its steps", judge, drops_steps=True)
    commands += said
    # Only a new step requests a decision at once; other changes wait for the next tick.
    if before is None or state.jobs[name].progress.step != before.progress.step:
        state, said = contain_failure(state, name, "requesting a decision", act)
        commands += said
    return state, commands


def _tick(
    state: State, config: ControllerConfig, now_s: float
) -> tuple[State, tuple[Command, ...]]:
    commands: list[Command] = []
    state, turn = next_jobs(state, now_s)
    lemons = device_history.lemons(state.strikes, now_s + state.unix_offset_s)
    for name in turn:

        def follow(state: State, name: str = name) -> tuple[State, Sequence[Command]]:
            return _update_on_tick(state, name, config, now_s)

        def repeat(state: State, name: str = name) -> tuple[State, Sequence[Command]]:
            job, said = rollout.repeat_notices(state.jobs[name], now_s, lemons)
            return _with_job(state, job), said

        state, said = contain_failure(state, name, "updating it on a tick", follow)
        commands += said
        if state.jobs[name].coverage.state is not CoverageState.ENDED:
            state, said = contain_failure(state, name, "repeating its notices", repeat)
            commands += said
    state, said = job_lifecycle.forget_jobs(state, now_s, config.retention)
    return state, (*commands, *said)


def _update_on_tick(
    state: State, name: str, config: ControllerConfig, now_s: float
) -> tuple[State, Sequence[Command]]:
    """Apply the passage of time to a job: its end, its coverage, its timeouts."""
    unix_s = now_s + state.unix_offset_s
    job, commands = job_lifecycle.update_lifecycle(state.jobs[name], now_s, unix_s)
    if job.reported_s is None:
        job = replace(job, reported_s=now_s)  # of a stored past: its silence begins now
    if job.coverage.state is not CoverageState.ENDED:
        job, said = coverage.update_on_tick(job, config, now_s)
        commands += said
        if job.plan.asked and now_s - job.plan.asked_s > DECIDE_WITHIN_S:
            commands.append(Log(text=f"job={name} no decision for {DECIDE_WITHIN_S:.0f} s"))
            job = replace(job, plan=replace(job.plan, asked=0))
        state, job, said = hangs.judge_hangs(state, job, now_s)
        commands += said
        job, said = probes.update_probe(job, now_s, unix_s)
        commands += said
        job, said = approvals.close_if_stale(job, config.policy, unix_s)
        commands += said
    if job is not state.jobs[name]:
        state = _with_job(state, job)
    if job.coverage.state is CoverageState.ENDED:
        return state, commands
    state, asked = _request_decision(state, name, config, now_s)
    return state, (*commands, *asked)


def _request_decision(
    state: State, name: str, config: ControllerConfig, now_s: float
) -> tuple[State, tuple[Command, ...]]:
    """Ask for a decision on one job, where it can be acted on and nothing is under way."""
    job = overrides.with_cordons(state, state.jobs[name])
    if job is not state.jobs[name]:
        state = _with_job(state, job)
    if overrides.pause_order(state, name) is not None:
        return state, ()
    is_young = job.progress.step - job.layouts.first_step < config.policy.min_steps_between_plans
    is_settled = is_young or _decision_inputs(job) == job.plan.decided_on
    if job.plan.asked or (is_settled and job.plan.approved is None):
        return state, ()
    if not _is_actionable(job) or approvals.awaits_answer(job):
        return state, ()
    number = state.num_asked + 1
    lemons = device_history.lemons(state.strikes, now_s + state.unix_offset_s)
    view = snapshot_of(job, now_s, state.nodes, lemons)
    question = RequestDecision(job=name, asked=number, view=view)
    job = replace(
        job,
        plan=replace(
            job.plan,
            asked=number,
            asked_s=now_s,
            asked_on=_decision_preconditions(job),
            decided_on=_decision_inputs(job),
        ),
    )
    return replace(_with_job(state, job), num_asked=number), (question,)


def _apply_decision(
    state: State, event: DecisionMade, config: ControllerConfig, now_s: float
) -> tuple[State, tuple[Command, ...]]:
    """Act on a decision; where its preconditions changed, drop it and ask again."""
    name, decision = event.job, event.decision
    known = state.jobs.get(name)
    if known is None or known.plan.asked != event.asked:
        return state, ()  # of an earlier run of the job, or given up
    job, unix_s = replace(known, plan=replace(known.plan, asked=0)), now_s + state.unix_offset_s
    if decision is None:
        job, said = approvals.offer_approved(job, None, config.policy, now_s, unix_s)
        return _with_job(state, job), tuple(said)
    if not _is_actionable(job) or _decision_preconditions(job) != job.plan.asked_on:
        state = _with_job(state, replace(job, plan=replace(job.plan, decided_on=None)))
        text = f"job={name} decision dropped: the job changed while it was computed"
        return state, (Log(text=text),)
    before = job.plan.last_decision
    decision = rollout.with_new_exposure(decision, before)
    job = replace(job, plan=replace(job.plan, last_decision=decision))
    if (
        job.layouts.baseline is None
        and decision.level is MitigationLevel.LEAVE_OUT
        and job.cordoned
    ):
        job = replace(
            job, layouts=replace(job.layouts, baseline=job.layouts.current)
        )  # restored once no rank is cordoned
    if job.plan.approved is not None:
        job, said = approvals.offer_approved(job, decision, config.policy, now_s, unix_s)
        return _with_job(state, job), tuple(said)
    job, commands = approvals.close_if_stale(job, config.policy, unix_s)
    is_news = (
        before is None
        or before.level is not decision.level
        or rollout.has_new_exposure(decision, before)
    )
    is_report_only = config.policy.mode == "observe" or overrides.dry_run_order(state) is not None
    proposed = transition(None, PlanEvent.DECIDED, Proposed(decision=decision))
    if decision.level is MitigationLevel.NOTHING or is_report_only:
        job, said = approvals.withdraw(job, decision.reason)
        said += [rollout.decision_log_line(name, decision)] if is_news else []
        if decision.level is not MitigationLevel.NOTHING:
            outcome = Withdrawn(cause=WithdrawCause.REPORT_ONLY)
            outcome = transition(proposed, PlanEvent.WITHDRAWN, outcome)
            job = replace(job, plan=replace(job.plan, last_outcome=outcome))
    elif decision.unconfirmed:
        job, said = probes.request_probe(job, proposed, now_s, unix_s)
    elif approvals.needs_approval(config.policy, decision):
        state, job, said = approvals.propose(state, job, proposed, config.policy, unix_s)
    else:
        job, said = approvals.withdraw(job, "a plan that needs no approval came first")
        job, offered = rollout.offer(job, proposed, decision, now_s)
        said += offered
    return _with_job(state, job), (*commands, *said)


def _apply_answer(
    state: State, event: ProposalAnswered, config: ControllerConfig, now_s: float
) -> tuple[State, tuple[Command, ...]]:
    """Apply an operator's answer to a proposal; an approved plan is priced again at once."""
    proposal = approvals.find_proposal(state, event.proposal_id)
    if proposal is None:
        return state, ()
    job, said = approvals.answer(
        state.jobs[proposal.job], event, config.policy, now_s, now_s + state.unix_offset_s
    )
    state, asked = _request_decision(_with_job(state, job), job.name, config, now_s)
    return state, (*said, *asked)


def _is_actionable(job: JobState) -> bool:
    """Does every living rank run the observed layout, with no offer open and no rank missing?"""
    layout = job.layouts.current
    if layout is None or job.plan.desired is not None:
        return False
    if job.shape is None or (job.shape.num_experts and not job.workload.loads):
        return False
    return layout.ranks == job.living and all(
        job.ranks[rank].observed_generation == layout.generation for rank in layout.ranks
    )


def _decision_inputs(job: JobState) -> Hashable:
    """Return what the decision depends on: equal inputs are not decided on again.

    Loads drift slowly: while no rank is slow, not every step counts as new input.
    """
    slow = _slow(job)
    is_calm = not any(slow) and job.layouts.baseline is None and not job.layouts.is_provisional
    steps = job.progress.step // CALM_PERIOD_STEPS if is_calm else job.progress.step
    return steps, job.layouts.newest_generation, slow, is_calm, job.cordoned


def _slow(job: JobState) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return the slowdowns of ranks, and of their links."""
    found = job.detection.evidence.slow, slow_links(job)
    return tuple(tuple(sorted(slow.items())) for slow in found)


def _decision_preconditions(job: JobState) -> Hashable:
    """Return the preconditions of a decision: the layout, the next generation, the slow ranks."""
    assert job.layouts.current is not None, "actionable"
    slow = _slow(job)
    is_bound = job.layouts.baseline is None, job.layouts.is_provisional, job.cordoned
    return job.layouts.current.generation, job.layouts.newest_generation, slow, is_bound


def _with_node(state: State, node: NodeState) -> State:
    return replace(state, nodes=node_map(state.nodes).changed({node.name: node}))


def _with_job(state: State, job: JobState) -> State:
    return replace(state, jobs={**state.jobs, job.name: job})
