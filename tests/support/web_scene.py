"""A controller's state as people might see it: a large job, a small one, an incident from end to
end. Nothing runs; what is done changes the state as the machine would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pacekeeper.controller.api.auth.audit_log import AuditLog
from pacekeeper.controller.api.auth.authenticator import Authenticator
from pacekeeper.controller.api.auth.tokens import TokenFile
from pacekeeper.controller.api.operator_actions import OperatorActions
from pacekeeper.controller.api.web.app import WebApp
from pacekeeper.controller.api.web.auth import WebAuthenticator
from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.events import Event, SaveIncident, StepSummary
from pacekeeper.controller.state.job_parts import (
    Coverage,
    DetectionState,
    LayoutState,
    PlanState,
    StepProgress,
)
from pacekeeper.controller.state.persistent_map import RankMap
from pacekeeper.controller.state.plan_phase import AwaitingApproval
from pacekeeper.controller.state.rank_timings import RankTiming, RankTimings
from pacekeeper.controller.state.state import (
    JobState,
    NodeState,
    RankState,
    RankStatus,
    State,
)
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.store_thread import call_here
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.config.security import AccessConfig, LimitsConfig
from pacekeeper.core.incidents.findings import (
    ConsideredLayout,
    CoverageState,
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.incidents.proposals import Proposal
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import Attachment, Clock
from pacekeeper.core.telemetry.node_report import AgentHealth

BEGAN_S = 1_772_000_000.0
ASKING = ControllerConfig(policy=PolicyConfig(mode="approve"))
SLOW_RANK = 21
ONSET, FOUND, RELIEF, END = 400, 402, 412, 560
CAUSE = (
    "confirmed clock_events: its clock was held down by heat for 61% of the time, its peers' for "
    "0%; probable temperature: its device is at 92 C, its peers' at 61 C; not told: fan speed"
)
PLAN_REASON = (
    f"rank {SLOW_RANK} is x1.62 slow: other expert replicas, token shares and batch shares take a "
    "step from 1,310 to 1,020 ms (no layout can be below 1,004 ms)"
)


@dataclass(kw_only=True)
class Scene:
    """State, history and page of one controller that does not run."""

    state: State
    history: TimelineWriter
    audit: AuditLog
    heard: list[Event] = field(default_factory=list)

    async def put(self, event: Event) -> None:
        """As the inbox would."""
        self.heard.append(event)
        self.state, _ = advance(self.state, event, config=ASKING, now_s=1000.0)

    def web(self, *, tokens: TokenFile | None = None, is_secure: bool = False) -> WebApp:
        """The page."""
        authenticator = WebAuthenticator(
            authenticator=Authenticator(
                is_required=tokens is not None, config=AccessConfig(), tokens=tokens
            ),
            is_secure=is_secure,
            limits=LimitsConfig(),
            audit=self.audit,
        )
        return WebApp(
            state=lambda: self.state,
            history=self.history,
            ask=call_here,
            actions=OperatorActions(state=lambda: self.state, put=self.put),
            authenticator=authenticator,
            past_layout=lambda job, generation: None,
            is_secure=is_secure,
        )


def scene(folder: Path, *, num_nodes: int = 64, per_node: int = 8) -> Scene:
    """Job "pretrain-moe" on all nodes but two, with `SLOW_RANK` slow for a while; "ablation-7"."""
    nodes = [f"gpu-{i:03d}" for i in range(num_nodes)]
    large = _large([node for node in nodes[:-2] for _ in range(per_node)])
    small = _small([node for node in nodes[-2:] for _ in range(per_node)])
    states = {
        name: NodeState(
            name=name,
            agent_incarnation="a",
            product_version="0.1.0",
            is_connected=i % 29 != 17,
            health=AgentHealth(nvml="ok", num_devices=per_node),
            last_report_s=990.0,
        )
        for i, name in enumerate(nodes)
    }
    state = State(
        jobs={large.name: large, small.name: small},
        nodes=states,
        next_incident_id=3,
        next_proposal_id=2,
        unix_offset_s=BEGAN_S,
    )
    audit = AuditLog(folder / "audit.jsonl", max_bytes=1 << 20, kept=1, on_failure=lambda: None)
    history = TimelineWriter(store=Store.open(folder / "store.sqlite"))
    _happened(history, large)
    return Scene(state=state, history=history, audit=audit)


def incident(number: int, *, job: str = "pretrain-moe", is_open: bool = False) -> Incident:
    """The slow rank, found, acted on and over."""
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.CONFIRMED,
        rank=SLOW_RANK if job == "pretrain-moe" else 3,
        slowdown=1.62,
        onset_step=ONSET,
        step=FOUND,
        reason=f"rank {SLOW_RANK} computed 1,290 ms where its work should take 796 ms; x1.62 in "
        "the median of 2 steps since step 400; its healthy peers stayed within x1.02",
        cause=CAUSE,
        probe="the probe read it x1.60 slower than its peers: confirmed",
    )
    return Incident(
        incident_id=number,
        job=job,
        finding=finding,
        opened_unix_s=BEGAN_S + FOUND,
        closed_unix_s=None if is_open else BEGAN_S + END,
        closed_step=None if is_open else END,
        actions=()
        if is_open
        else (f"generation 2: {PLAN_REASON}", f"rank {SLOW_RANK} is back at its expected time"),
    )


def _large(on: Sequence[str]) -> JobState:
    experts = min(64, len(on))
    layout = even_layout(
        ranks=range(len(on)), num_layers=8, num_experts=experts, replicas=2, num_stages=4
    )
    ranks, paces = {}, {}
    for rank, node in enumerate(on):
        wave = 1.0 + 0.012 * ((rank * 7919) % 11 - 5) / 5
        slowdown = {SLOW_RANK: 1.62, 188: 1.18, 301: 1.09}.get(rank, wave)
        status = RankStatus.DEAD if rank == 333 else RankStatus.ALIVE
        ranks[rank] = _rank("pretrain-moe", rank, node, len(on), status)
        paces[rank] = _pace(slowdown)
    return JobState(
        name="pretrain-moe",
        ranks=ranks,
        world_size=len(on),
        incidents=(incident(1), incident(2, is_open=True)),
        heard_s=_heard(len(on)),
        detection=DetectionState(measured=RankTimings(others=paces)),
        layouts=LayoutState(current=layout, reason="the layout the job runs", newest_generation=1),
        progress=StepProgress(
            step=700, recent_step_s=(0.98,), tokens_per_s=4_280_000.0, loss=2.417
        ),
        coverage=Coverage(
            state=CoverageState.DEGRADED,
            reason="a rank that becomes x1.10 slow is named within 4 steps",
            blind=None,
            silent=tuple(range(80, 88)) if len(on) > 100 else (),
            judged_s=990.0,
        ),
        plan=PlanState(
            last_decision=Decision(
                level=MitigationLevel.NOTHING, layout=None, reason="no layout is better"
            )
        ),
    )


def _small(on: Sequence[str]) -> JobState:
    layout = even_layout(
        ranks=range(len(on)), num_layers=4, num_experts=8, replicas=2, num_virtual_shards=8,
        num_stages=2, tensor_size=4,
    )  # fmt: skip
    plan = replace(layout, generation=2)
    decision = Decision(
        level=MitigationLevel.MOVE_REPLICAS,
        layout=plan,
        reason="rank 3 is x1.35 slow: other expert replicas, token shares and batch shares take a "
        "step from 412 to 371 ms (no layout can be below 366 ms)",
        current_step_s=0.412,
        planned_step_s=0.371,
        fluid_step_s=0.366,
        cost_s=1.4,
        moved_bytes=3_400_000_000,
    )
    proposal = Proposal(
        proposal_id=1,
        job="ablation-7",
        decision=decision,
        base=layout,
        slow={},
        incident_ids=(),
        made_unix_s=BEGAN_S,
        expires_unix_s=BEGAN_S + 1e6,
    )
    return JobState(
        name="ablation-7",
        ranks={rank: _rank("ablation-7", rank, node, len(on)) for rank, node in enumerate(on)},
        world_size=len(on),
        heard_s=_heard(len(on)),
        detection=DetectionState(
            measured=RankTimings(
                others={rank: _pace(1.35 if rank == 3 else 1.0) for rank in range(len(on))}
            )
        ),
        layouts=LayoutState(current=layout, reason="the layout the job runs"),
        plan=PlanState(pending=AwaitingApproval(proposal=proposal)),
        progress=StepProgress(step=2140, recent_step_s=(0.412,), tokens_per_s=188_000.0),
        coverage=Coverage(
            state=CoverageState.HEALTHY,
            reason="a rank that becomes x1.10 slow is named within 3 steps",
            blind=None,
        ),
    )


def _rank(
    job: str, rank: int, node: str, world: int, status: RankStatus = RankStatus.ALIVE
) -> RankState:
    return RankState(
        attachment=Attachment(job=job, rank=rank, world_size=world, pid=rank + 1, clock=Clock.CUDA),
        node=node,
        status=status,
        observed_generation=1,
    )


def _pace(slowdown: float) -> RankTiming:
    return RankTiming(
        observed_s=0.8 * slowdown,
        expected_s=0.8,
        slowdown=slowdown,
        suspicion=min(1.0, max(0.0, slowdown - 1.02) * 4),
    )


def _heard(count: int) -> RankMap[float]:
    return RankMap(dict.fromkeys(range(count), 990.0))


def _happened(history: TimelineWriter, job: JobState) -> None:
    """700 steps of it, a second each: the fault, the plan, the relief, the end."""
    recorder = history._recorder
    ranks = tuple(range(min(64, len(job.ranks))))
    for step in range(701):
        is_slow = ONSET <= step < END
        is_planned = RELIEF <= step < END + 4
        wave = 1.0 + 0.012 * ((step * 7919) % 13 - 6) / 6
        slowdown = tuple(1.62 if is_slow and rank == SLOW_RANK else 1.0 for rank in ranks)
        share = 0.63 if is_planned else 1.0  # what the slow rank has left to do
        expected = tuple(0.796 * (share if rank == SLOW_RANK else 1.01) for rank in ranks)
        step_s = wave * (0.98 if not is_slow else 1.02 if is_planned else 1.31)
        summary = StepSummary(
            job=job.name,
            step=step,
            generation=2 if is_planned else 1 if step < RELIEF else 3,
            tokens=4_194_304,
            duration_s=step_s,
            loss=None,
            ranks=ranks,
            observed_s=tuple(e * s * wave for e, s in zip(expected, slowdown, strict=True)),
            expected_s=expected,
            slowdown=slowdown,
            watch="healthy",
        )
        recorder.on_step(summary, BEGAN_S + step)
        if step == FOUND:
            history.on_command(SaveIncident(incident=replace(incident(1, is_open=True))))
        if step == FOUND + 3:
            recorder.decided(job.name, _decision(job.layouts.current), BEGAN_S + step)
    for one in job.incidents:
        recorder.on_incident(one, BEGAN_S + END)


def _decision(layout: Layout | None) -> Decision:
    assert layout is not None, "the job has one"
    passed = (
        (MitigationLevel.TOKEN_SHARES, 1.118, 0.1, 0, "another gains more"),
        (MitigationLevel.BATCH_SHARES, 1.064, 0.1, 0, "another gains more"),
        (MitigationLevel.MOVE_REPLICAS, 1.020, 2.2, 9_800_000_000, ""),
        (
            MitigationLevel.MOVE_LAYERS,
            1.016,
            38.0,
            212_000_000_000,
            "gains 58.8 s in 200 steps and costs 38.0 s; "
            "the fault has cost 3.1 s so far: it may pass",
        ),
    )
    return Decision(
        level=MitigationLevel.MOVE_REPLICAS,
        layout=replace(layout, generation=2),
        reason=PLAN_REASON,
        current_step_s=1.31,
        planned_step_s=1.02,
        fluid_step_s=1.004,
        cost_s=2.2,
        moved_bytes=9_800_000_000,
        considered=tuple(
            ConsideredLayout(
                level=level, planned_step_s=step_s, cost_s=cost_s, moved_bytes=size, why_not=why
            )
            for level, step_s, cost_s, size, why in passed
        ),
    )
