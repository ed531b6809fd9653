"""A controller that answers with fixed messages: two jobs, two nodes, three incidents, one plan.

Used by the snapshots of the command line; every text in an answer is made here, so that a snapshot
changes only where the command line changes.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from pacekeeper.protos import operator_pb2, operator_pb2_grpc, status_pb2, status_pb2_grpc

NOW_S = 1_772_000_000.0  # 2026-02-25 06:13:20 UTC
DAY_S = 86_400.0


def order(kind: str, subject: str, by: str = "ada (open)", reason: str = "") -> status_pb2.Order:
    return status_pb2.Order(
        kind=kind, subject=subject, operator=by, reason=reason, since_unix_s=NOW_S - 600.0
    )


def proposal(number: int, answer: str, by: str = "", note: str = "") -> status_pb2.Proposal:
    return status_pb2.Proposal(
        proposal_id=number,
        job="pretrain",
        answer=answer,
        level="move expert replicas",
        reason="REASON OF THE PLAN",
        incident_ids=[2],
        generation=4,
        base_generation=3,
        current_step_s=0.412,
        planned_step_s=0.371,
        cost_s=1.4,
        moved_bytes=3_400_000_000,
        made_unix_s=NOW_S - 60.0,
        expires_unix_s=NOW_S + 540.0,
        operator=by,
        note=note,
    )


def rank(number: int, **values: Any) -> status_pb2.Rank:
    known = {
        "node": f"gpu-{number // 2}",
        "state": "alive",
        "slowdown": 1.0,
        "observed_s": 0.4,
        "expected_s": 0.4,
        "suspicion": 0.0,
        "batch_share": 0.25,
        "num_expert_replicas": 8,
    }
    return status_pb2.Rank(rank=number, **{**known, **values})


def jobs() -> dict[str, status_pb2.Job]:
    """One that has everything a job can have, and one that has just attached."""
    ranks = [
        rank(0),
        rank(1, slowdown=1.62, observed_s=0.648, suspicion=1.0, is_cordoned=True),
        rank(2, slowdown=1.04, observed_s=0.416, state="silent"),
        rank(3, state="dead"),
    ]
    orders = [
        order("cordon_rank", "pretrain/1", reason="fan replaced tomorrow"),
        order("cordon_node", "gpu-9", by="bob (open)"),
        order("pause", "pretrain"),
        order("dry_run", ""),
    ]
    full = status_pb2.Job(
        name="pretrain",
        watch="degraded",
        generation=3,
        desired_generation=4,
        step=700,
        step_s=0.412,
        tokens_per_s=4_280_000.0,
        loss=2.417,
        ranks=ranks,
        open_incidents=2,
        clock="cuda",
        last_decision="LAST DECISION",
        watch_reason="WATCH REASON",
        advice=["ADVICE"],
        canary=status_pb2.Canary(rank=1, slowdown=1.2, is_found=True, num_steps=4, step=640),
        proposal=proposal(1, "waiting"),
        checkpoints=status_pb2.Checkpoints(step=600, duration_s=12.5),
        snapshots=status_pb2.Checkpoints(
            step=650, duration_s=0.3, trouble="late", reason="SAVE REASON", since_step=690, missed=2
        ),
        orders=orders,
    )
    fresh = status_pb2.Job(
        name="ablation", watch="measuring", generation=1, desired_generation=1, step=3
    )
    fresh.ranks.append(status_pb2.Rank(rank=0, node="gpu-0", state="unknown", batch_share=1.0))
    return {"ablation": fresh, "pretrain": full}


def nodes() -> list[status_pb2.Node]:
    """A lemon that is cordoned, one without NVML that is disconnected, one without any finding."""
    strikes = [
        status_pb2.Strike(
            incident_id=number,
            job="pretrain",
            device_uuid=device,
            kind="device",
            slowdown=1.0 + number / 10,
            unix_s=NOW_S - days * DAY_S,
        )
        for number, device, days in ((5, "GPU-a", 2.0), (4, "", 6.0), (3, "GPU-a", 9.0))
    ]
    return [
        status_pb2.Node(
            name="gpu-0",
            is_connected=True,
            product_version="0.1.0",
            nvml="ok",
            num_devices=2,
            jobs=["ablation", "pretrain"],
            rack="r1",
            history=["HISTORY"] * 3,
            is_lemon=True,
            strikes=strikes,
            cordon=order("cordon_node", "gpu-0", reason="fan"),
        ),
        status_pb2.Node(
            name="gpu-1",
            product_version="0.1.0",
            nvml="NVML REASON",
            jobs=["pretrain"],
            records_lost=12,
            records_corrupt=1,
            batches_dropped=3,
            unreadable=["UNREADABLE RING"],
            strikes=strikes[:1],
            history=["HISTORY"],
        ),
        status_pb2.Node(name="gpu-2", is_connected=True, product_version="0.1.0", nvml="ok"),
    ]


def incidents() -> list[status_pb2.Incident]:
    """A slow rank that recovered, deaths of several ranks, and uneven experts."""
    slow = status_pb2.Incident(
        incident_id=1,
        job="pretrain",
        kind="device",
        tier="confirmed",
        rank=1,
        node="gpu-0",
        slowdown=1.62,
        onset_step=400,
        found_step=402,
        reason="REASON",
        opened_unix_s=NOW_S - 300.0,
        closed_unix_s=NOW_S - 142.0,
        closed_step=560,
        actions=["FIRST ACTION", "SECOND ACTION"],
        cause="CONFIRMED CAUSE; PROBABLE CAUSE",
        normal_signals=["NORMAL SIGNAL"],
        missing_signals=["MISSING SIGNAL"],
        probe="PROBE RESULT",
    )
    deaths = [
        status_pb2.Deaths(
            ranks=[status_pb2.RankRun(first=2, last=3)],
            reason="its process ended by signal 9",
            step=690,
            unix_s=NOW_S - 30.0,
        ),
        status_pb2.Deaths(
            ranks=[status_pb2.RankRun(first=0, last=0)],
            reason="its process ended by signal 9",
            step=691,
            unix_s=NOW_S - 29.0,
            closed_unix_s=NOW_S - 20.0,
            closed_step=692,
        ),
    ]
    dead = status_pb2.Incident(
        incident_id=2,
        job="pretrain",
        kind="death",
        tier="confirmed",
        rank=2,
        node="gpu-1",
        slowdown=math.inf,
        onset_step=690,
        found_step=690,
        reason="REASON",
        opened_unix_s=NOW_S - 30.0,
        deaths=deaths,
        nodes=["gpu-0", "gpu-1", "gpu-2"],
        num_nodes=5,
    )
    uneven = status_pb2.Incident(
        incident_id=3,
        job="ablation",
        kind="expert_imbalance",
        tier="probable",
        slowdown=1.25,
        onset_step=1,
        found_step=2,
        reason="REASON",
        opened_unix_s=NOW_S - 10.0,
    )
    return [slow, dead, uneven]


def explanation(incident: status_pb2.Incident) -> status_pb2.Explanation:
    """Of the slow rank all that can be kept; of the others nothing but the incident."""
    found = status_pb2.Explanation(incident=incident)
    if incident.incident_id != 1:
        return found
    found.measured.CopyFrom(
        status_pb2.SlowdownEstimate(slowdown=1.61, low=1.58, high=1.64, num_values=158)
    )
    for when, generation, first, count, step_s, slowdown in (
        ("before", 1, 380, 20, 0.98, 1.0),
        ("during", 1, 400, 12, 1.31, 1.62),
        ("during", 2, 412, 148, 1.02, 1.61),
        ("after", 3, 560, 40, 0.98, math.nan),
    ):
        found.phases.append(
            status_pb2.Phase(
                when=when,
                generation=generation,
                first_step=first,
                num_steps=count,
                step_s=step_s,
                slowdown=slowdown,
            )
        )
    found.gain_ratio = 0.221
    considered = [
        status_pb2.ConsideredPlan(level="batch shares", planned_step_s=1.064, why_not="WHY NOT"),
        status_pb2.ConsideredPlan(level="move expert replicas", planned_step_s=1.02),
    ]
    found.plans.append(
        status_pb2.PlanNote(
            step=405,
            unix_s=NOW_S - 295.0,
            level="move expert replicas",
            reason="REASON OF THE PLAN",
            generation=2,
            current_step_s=1.31,
            planned_step_s=1.02,
            fluid_step_s=1.004,
            cost_s=2.2,
            moved_bytes=9_800_000_000,
            considered=considered,
        )
    )
    found.plans.append(status_pb2.PlanNote(step=403, level="nothing", reason="REASON"))
    found.notes.append(status_pb2.Note(step=402, unix_s=NOW_S - 298.0, text="FIRST NOTE"))
    timeline = found.timeline
    for step in range(380, 600):
        is_slow = 400 <= step < 560
        timeline.step.append(step)
        timeline.unix_s.append(NOW_S - 320.0 + step - 380)
        timeline.num_steps.append(1)
        timeline.generation.append(1 if step < 412 else 2 if step < 560 else 3)
        timeline.step_s.append(1.31 if 400 <= step < 412 else 1.02 if is_slow else 0.98)
        timeline.observed_s.append(1.29 if is_slow else 0.796)
        timeline.expected_s.append(0.796)
        timeline.peers_slowdown.append(1.01 if step % 2 else 0.99)
    return found


class Answers(status_pb2_grpc.StatusServiceServicer, operator_pb2_grpc.OperatorServiceServicer):
    """Both services of a controller; plan 1 waits, plan 2 was denied."""

    def __init__(self, *, is_empty: bool = False) -> None:
        self.jobs = {} if is_empty else jobs()
        self.nodes = [] if is_empty else nodes()
        self.incidents = [] if is_empty else incidents()

    def ListJobs(self, request: Any, context: Any) -> Any:
        return status_pb2.ListJobsResponse(jobs=self.jobs.values())

    def GetJob(self, request: Any, context: Any) -> Any:
        if request.job not in self.jobs:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no job {request.job!r}")
        return status_pb2.GetJobResponse(job=self.jobs[request.job])

    def ListNodes(self, request: Any, context: Any) -> Any:
        return status_pb2.ListNodesResponse(nodes=self.nodes)

    def ListIncidents(self, request: Any, context: Any) -> Any:
        found = [
            one
            for one in self.incidents
            if (not request.job or one.job == request.job)
            and not (request.open_only and one.HasField("closed_unix_s"))
        ]
        return status_pb2.ListIncidentsResponse(incidents=found)

    def WatchIncidents(self, request: Any, context: Any) -> Iterator[Any]:
        for one in self.incidents:
            yield status_pb2.WatchIncidentsResponse(incident=one)

    def ListProposals(self, request: Any, context: Any) -> Any:
        return status_pb2.ListProposalsResponse(proposals=[proposal(1, "offered", "ada (open)")])

    def GetExplanation(self, request: Any, context: Any) -> Any:
        for one in self.incidents:
            if one.incident_id == request.incident_id:
                return status_pb2.GetExplanationResponse(explanation=explanation(one))
        context.abort(grpc.StatusCode.NOT_FOUND, f"no incident {request.incident_id}")
        return None

    def ListOrders(self, request: Any, context: Any) -> Any:
        return status_pb2.ListOrdersResponse()

    def GetPace(self, request: Any, context: Any) -> Any:
        rates = [4.2e6 if step % 40 else 3.1e6 for step in range(200)]
        steps = range(200)
        pace = status_pb2.JobTimeline(step=steps, tokens_per_s=rates)
        return status_pb2.GetPaceResponse(pace=pace)

    def ApproveProposal(self, request: Any, context: Any) -> Any:
        if request.proposal_id != 1:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it was denied")
        answered = proposal(1, "approved", f"{request.operator} (open)")
        return operator_pb2.ApproveProposalResponse(proposal=answered)

    def DenyProposal(self, request: Any, context: Any) -> Any:
        answered = proposal(1, "denied", f"{request.operator} (open)", request.reason)
        return operator_pb2.DenyProposalResponse(proposal=answered)

    def GiveOrder(self, request: Any, context: Any) -> Any:
        if "unknown" in request.subject:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no node {request.subject!r}")
        if request.operator == "viewer":
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "the role viewer may not")
        kind = operator_pb2.OrderKind.Name(request.kind).removeprefix("ORDER_KIND_").lower()
        given = order(kind, request.subject, f"{request.operator} (open)", request.reason)
        return operator_pb2.GiveOrderResponse(order=given)


@contextmanager
def answering(answers: Answers) -> Iterator[str]:
    """The address at which these answers are given."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        status_pb2_grpc.add_StatusServiceServicer_to_server(answers, server)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(answers, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
