"""Converts the state to messages of the status service; used by gRPC and the web page."""

import math
from collections.abc import Collection, Iterable

from pacekeeper.controller.detection import root_cause
from pacekeeper.controller.mitigation import overrides
from pacekeeper.controller.observability.explain import Explanation, SlowdownInterval
from pacekeeper.controller.observability.timeline import JobRow, PlanNote
from pacekeeper.controller.state import device_history
from pacekeeper.controller.state.events import StepSummary
from pacekeeper.controller.state.job_parts import Saves
from pacekeeper.controller.state.rank_timings import RankTiming
from pacekeeper.controller.state.state import JobState, NodeState, RankState, RankStatus, State
from pacekeeper.core.incidents.findings import Incident
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from pacekeeper.core.incidents.proposals import Proposal
from pacekeeper.core.incidents.rank_failures import RankFailures
from pacekeeper.core.layout.layout import Layout
from pacekeeper.predictor.assurance.canary import CanaryResult
from pacekeeper.protos import status_pb2
from pacekeeper.protos.convert.plain import columns_of, message_of

SHOWN_NODES = 16  # named nodes of one incident
UNKNOWN = "unknown"  # a rank of the layout that no agent has reported


def job_view(state: State, job: JobState) -> status_pb2.Job:
    """A job with its ranks, also those known from the store only and those never reported."""
    layout = job.layouts.current
    disconnected = {name for name, node in state.nodes.items() if not node.is_connected}
    generation = 0 if layout is None else layout.generation
    message = status_pb2.Job(
        name=job.name,
        watch=job.coverage.state,
        generation=generation,
        desired_generation=generation if job.plan.desired is None else job.plan.desired.generation,
        step=max(0, job.progress.step),
        step_s=job.progress.recent_step_s[-1] if job.progress.recent_step_s else 0.0,
        tokens_per_s=job.progress.tokens_per_s,
        loss=job.progress.loss,
        open_incidents=len(job.open_incidents),
        clock=next((r.attachment.clock for r in job.ranks.values()), ""),
        advice=[i.finding.reason for i in job.open_incidents if i.finding.kind.is_advice],
        last_decision="" if job.plan.last_decision is None else job.plan.last_decision.text,
        watch_reason=job.coverage.reason,
        blind_cause="" if job.coverage.blind is None else job.coverage.blind.value,
        detectable_slowdown=None
        if job.coverage.sensitivity is None
        else job.coverage.sensitivity.slowdown,
        detectable_steps=None
        if job.coverage.sensitivity is None
        else job.coverage.sensitivity.steps,
        canary=canary_view(job.detection.canaries.last),
        proposal=None if job.plan.open_proposal is None else proposal_view(job.plan.open_proposal),
        checkpoints=_saves_view(job.progress.saves),
        snapshots=_saves_view(job.progress.snapshots),
        iteration=""
        if job.detection.iteration.newest is None
        else str(job.detection.iteration.newest),
        orders=[order_view(order) for order in overrides.orders_of_job(state, job)],
    )
    shares = {rank: layout.batch_share_of(rank) for rank in layout.working} if layout else {}
    places = {} if layout is None else places_of(layout)
    replicas = {} if layout is None else replicas_by_rank(layout)
    cordoned = overrides.with_cordons(state, job).cordoned
    for number in sorted({*job.ranks, *job.remembered, *job.unattached}):
        rank, stored = job.ranks.get(number), job.remembered.get(number)
        if rank is None:
            message.ranks.append(
                status_pb2.Rank(
                    rank=number,
                    state=UNKNOWN if stored is None else rank_state(stored.status, is_silent=True),
                    batch_share=shares.get(number, 0.0),
                    num_expert_replicas=replicas.get(number, 0),
                    place=places.get(number, ""),
                )
            )
            continue
        is_silent = (
            rank.node in disconnected or number in job.coverage.silent or number not in job.heard_s
        )
        message.ranks.append(
            _rank_view(
                number,
                rank,
                job.detection.measured.of(number),
                state=rank_state(rank.status, is_silent=is_silent),
                batch_share=shares.get(number, 0.0),
                replicas=replicas.get(number, 0),
                is_cordoned=number in cordoned,
                place=places.get(number, ""),
            )
        )
    return message


def canary_view(canary: CanaryResult | None) -> status_pb2.Canary | None:
    """The result of the newest canary; None: none has ended."""
    return None if canary is None else message_of(status_pb2.Canary, canary)


def _saves_view(saves: Saves | None) -> status_pb2.Checkpoints | None:
    """The state of checkpoints or snapshots; None: none was reported."""
    if saves is None:
        return None
    step = saves.complete[1]
    return message_of(status_pb2.Checkpoints, saves, step=None if step < 0 else step)


def rank_state(status: RankStatus, *, is_silent: bool) -> str:
    """ "alive", "dead", "finished", or "silent": alive when last reported, and not reported now."""
    return "silent" if status is RankStatus.ALIVE and is_silent else status.value


def places_of(layout: Layout) -> dict[int, str]:
    """Describe each rank's part of the model; empty where all ranks have all of it."""
    if len(layout.working) == len(layout.pipelines):
        return {}
    found = dict.fromkeys(layout.standing_by, "standby")
    for at, pipeline in enumerate(layout.pipelines):
        for number, stage in enumerate(pipeline.stages):
            layers = _span(stage.first_layer, stage.end_layer)
            for run in stage.attention:
                found[run.rank] = f"pipeline {at}, stage {number}: layers {layers}"
                if len(stage.attention) > 1:
                    found[run.rank] += f", shards {_span(run.first, run.end)}"
    return found


def _span(first: int, end: int) -> str:
    if end <= first + 1:
        return str(first) if end > first else "none"
    return f"{first}-{end - 1}"


def replicas_by_rank(layout: Layout) -> dict[int, int]:
    """The number of expert replicas of each rank, summed over layers."""
    replicas: dict[int, int] = {}
    for experts in layout.experts:
        for on in experts:
            for replica in on:
                replicas[replica.rank] = replicas.get(replica.rank, 0) + 1
    return replicas


def node_views(state: State, nodes: Iterable[NodeState]) -> list[status_pb2.Node]:
    """Nodes with the health that their agents report. O(nodes + ranks)."""
    jobs: dict[str, set[str]] = {}
    for job in state.jobs.values():
        for rank in job.ranks.values():
            if rank.status is RankStatus.ALIVE:
                jobs.setdefault(rank.node, set()).add(job.name)
    return [_node_view(state, node, jobs.get(node.name, ())) for node in nodes]


def _node_view(state: State, node: NodeState, jobs: Collection[str]) -> status_pb2.Node:
    cordon = overrides.find_order(state, OrderKind.CORDON_NODE, node.name)
    unix_s = state.ticked_s + state.unix_offset_s
    return message_of(
        status_pb2.Node,
        node,
        root_cause.health_of(node),
        jobs=sorted(jobs),
        last_report_unix_s=node.last_report_s + state.unix_offset_s,
        history=device_history.history(state.strikes, node.name, unix_s),
        is_lemon=device_history.is_lemon(state.strikes, node.name, unix_s),
        strikes=[
            message_of(status_pb2.Strike, one)
            for one in device_history.newest_first(state.strikes, node.name, unix_s)
        ],
        cordon=None if cordon is None else order_view(cordon),
    )


def gone_nodes(state: State) -> list[NodeState]:
    """Nodes that are known by their history only, by name."""
    names = sorted(state.strikes.keys() - state.nodes.keys())
    return [NodeState(name=name, agent_incarnation="", is_connected=False) for name in names]


def incident_view(state: State, incident: Incident) -> status_pb2.Incident:
    """An incident with the node of its rank, if known."""
    finding = incident.finding
    job = state.jobs.get(incident.job)
    rank = None
    if job is not None and finding.rank is not None:
        rank = job.ranks.get(finding.rank)
    return message_of(
        status_pb2.Incident,
        incident,
        finding,
        node="" if rank is None else rank.node,
        found_step=finding.step,
        # A job that ended before its first complete step is at step -1; the field is unsigned.
        closed_step=None if incident.closed_step is None else max(0, incident.closed_step),
        deaths=[_deaths_view(one) for one in incident.all_rank_failures],
        nodes=incident.nodes[:SHOWN_NODES],
        num_nodes=len(incident.nodes),
    )


def _deaths_view(deaths: RankFailures) -> status_pb2.Deaths:
    return message_of(
        status_pb2.Deaths,
        deaths,
        ranks=[status_pb2.RankRun(first=first, last=last) for first, last in deaths.ranks],
        closed_step=None if deaths.closed_step is None else max(0, deaths.closed_step),
    )


def proposal_view(proposal: Proposal) -> status_pb2.Proposal:
    """A proposal with its prices and its state."""
    return message_of(
        status_pb2.Proposal,
        proposal,
        proposal.decision,
        generation=proposal.plan.generation,
        base_generation=proposal.base.generation,
    )


def order_view(order: OperatorOrder) -> status_pb2.Order:
    """An operator order in effect."""
    return message_of(status_pb2.Order, order)


def step_view(summary: StepSummary) -> status_pb2.WatchStepsResponse:
    """One complete step."""
    unknown = [math.nan] * len(summary.ranks)
    return message_of(
        status_pb2.WatchStepsResponse,
        summary,
        expected_s=summary.expected_s or unknown,
        slowdown=summary.slowdown or unknown,
    )


def _rank_view(
    number: int,
    rank: RankState,
    pace: RankTiming,
    *,
    state: str,
    batch_share: float,
    replicas: int,
    is_cordoned: bool,
    place: str,
) -> status_pb2.Rank:
    return status_pb2.Rank(
        rank=number,
        node=rank.node,
        state=state,
        slowdown=pace.slowdown,
        observed_s=pace.observed_s,
        expected_s=pace.expected_s,
        suspicion=pace.suspicion,
        batch_share=batch_share,
        num_expert_replicas=replicas,
        device_uuid=rank.attachment.device_uuid,
        is_cordoned=is_cordoned,
        place=place,
    )


def explanation_view(state: State, explanation: Explanation) -> status_pb2.Explanation:
    """The explanation of an incident."""
    return status_pb2.Explanation(
        incident=incident_view(state, explanation.incident),
        measured=_measured_view(explanation.interval),
        phases=[message_of(status_pb2.Phase, phase) for phase in explanation.phases],
        gain_ratio=explanation.gain_ratio,
        plans=[_plan_view(note) for note in explanation.plans],
        notes=[message_of(status_pb2.Note, note) for note in explanation.notes],
        timeline=columns_of(status_pb2.IncidentTimeline, explanation.rows),
        stacks=[message_of(status_pb2.StackDump, stack) for stack in explanation.stacks],
    )


def job_timeline_view(rows: list[JobRow]) -> status_pb2.JobTimeline:
    """The timeline of a job, as columns."""
    return columns_of(status_pb2.JobTimeline, rows)


def _measured_view(measured: SlowdownInterval | None) -> status_pb2.SlowdownEstimate | None:
    return None if measured is None else message_of(status_pb2.SlowdownEstimate, measured)


def _plan_view(note: PlanNote) -> status_pb2.PlanNote:
    considered = [message_of(status_pb2.ConsideredPlan, one) for one in note.considered]
    return message_of(status_pb2.PlanNote, note, considered=considered)
