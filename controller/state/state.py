"""Everything the controller knows, as one frozen value; only `machine.advance` makes a new one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pacekeeper.controller.state.device_history import Strikes
from pacekeeper.controller.state.job_parts import (
    Coverage,
    DetectionState,
    LayoutState,
    NoticeState,
    PlanState,
    StepProgress,
    WorkloadState,
)
from pacekeeper.controller.state.persistent_map import NodeMap, RankMap
from pacekeeper.core.incidents.findings import Incident
from pacekeeper.core.incidents.operator_orders import OperatorOrder
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import Attachment, Capability, ModelShape
from pacekeeper.core.telemetry.node_report import AgentHealth, LazyNodeData, LazySamples
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample


class RankStatus(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank as the controller sees it."""

    attachment: Attachment
    node: str
    status: RankStatus = RankStatus.ALIVE
    observed_generation: int = 0  # the newest that it reported to run
    observed_crc: int | None = None  # of that layout; None: it reported the generation only
    attached_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job in its present run: identity and ranks, and a frozen part for each concern.

    `JobState(name=..., run_id=...)` is a job of which nothing is known yet, as at its start.

    Attributes:
        name: The job's name.
        run_id: ID of the present run; 0: unknown.
        ranks: The ranks that attached.
        remembered: Ranks of a stored past that have not attached to this controller yet.
        world_size: As the ranks report it.
        cordoned: Ranks that must get no work (see controller/mitigation/overrides.py).
        losses: The fraction of the ranks that each failure took (see
            controller/policy/failure_rates.py).
        heard_s: When each rank's last record came.
        reported_s: When an agent last reported the job; None: not since the controller's start.
        ended_s: When its last rank was seen to have ended.
    """

    name: str
    run_id: int = 0
    ranks: Mapping[int, RankState] = field(default_factory=dict)
    remembered: Mapping[int, "RankRecord"] = field(default_factory=dict)
    world_size: int = 0
    cordoned: frozenset[int] = frozenset()
    losses: tuple[float, ...] = ()
    heard_s: RankMap[float] = field(default_factory=RankMap)
    reported_s: float | None = None
    ended_s: float | None = None
    layouts: LayoutState = field(default_factory=LayoutState)
    plan: PlanState = field(default_factory=PlanState)
    detection: DetectionState = field(default_factory=DetectionState)
    incidents: tuple[Incident, ...] = ()
    progress: StepProgress = field(default_factory=StepProgress)
    workload: WorkloadState = field(default_factory=WorkloadState)
    coverage: Coverage = field(default_factory=Coverage)
    notices: NoticeState = field(default_factory=NoticeState)

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that are known and neither dead nor finished, ascending."""
        return tuple(r for r in sorted(self.ranks) if self.ranks[r].status is RankStatus.ALIVE)

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks that died, ascending, including those only remembered."""
        dead = {r for r, kept in self.remembered.items() if kept.status is RankStatus.DEAD}
        dead |= {r for r, known in self.ranks.items() if known.status is RankStatus.DEAD}
        return tuple(sorted(dead))

    @property
    def unattached(self) -> tuple[int, ...]:
        """Ranks that should run and have not attached, ascending.

        Ranks of the layout, or of the whole world where there is none. A remembered end excludes a
        rank.
        """
        layout = self.layouts.current
        expected = range(self.world_size) if layout is None else layout.ranks
        ended = {r for r, kept in self.remembered.items() if kept.status is not RankStatus.ALIVE}
        return tuple(rank for rank in expected if rank not in self.ranks and rank not in ended)

    def last_heard_s(self, rank: int) -> float:
        """Return when the rank last sent a record or attached."""
        heard_s: float = self.heard_s.get(rank, 0.0)
        return max(heard_s, self.ranks[rank].attached_s)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of its ranks, in order of name."""
        return tuple(sorted({rank.node for rank in self.ranks.values()}))

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape as the ranks report it; None for a trainer that cannot move work."""
        return next((r.attachment.model for r in self.ranks.values()), None)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The plans that the job's trainer can carry out."""
        known = next((r.attachment.capabilities for r in self.ranks.values()), None)
        return frozenset() if known is None else known

    @property
    def open_incidents(self) -> tuple[Incident, ...]:
        """The incidents that are not closed."""
        return tuple(incident for incident in self.incidents if incident.is_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node's agent, with the samples of the last minute, oldest first.

    Attributes:
        name: The node's name.
        agent_incarnation: ID of the agent's process.
        product_version: The agent's version.
        rack: The node's rack; empty: unknown.
        is_connected: The agent has an open stream.
        health: The health that the agent reported, unless `newest` has a newer one.
        devices: Decoded samples by device UUID.
        host: Decoded samples of the host.
        unread_devices: Later device samples, not decoded yet (see
            controller/detection/root_cause.py).
        unread_host: Later host samples, not decoded yet.
        newest: The node's part of the newest report, not decoded yet.
        last_report_s: When the last report came.
    """

    name: str
    agent_incarnation: str
    product_version: str = ""
    rack: str = ""
    is_connected: bool = True
    health: AgentHealth = field(default_factory=AgentHealth)
    devices: Mapping[str, tuple[DeviceSample, ...]] = field(default_factory=dict)
    host: tuple[HostSample, ...] = ()
    unread_devices: tuple[LazySamples[tuple[DeviceSample, ...]], ...] = ()
    unread_host: tuple[LazySamples[HostSample], ...] = ()
    newest: LazyNodeData | None = None
    last_report_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All jobs and nodes. `unix_offset_s` turns the machine's clock into Unix time."""

    jobs: Mapping[str, JobState] = field(default_factory=dict)
    nodes: Mapping[str, NodeState] = field(default_factory=NodeMap)
    next_incident_id: int = 1
    next_proposal_id: int = 1
    num_asked: int = 0  # decisions requested, of all jobs
    orders: tuple[OperatorOrder, ...] = ()  # in effect
    strikes: Strikes = field(default_factory=dict)  # see controller/state/device_history.py
    ticked_s: float = 0.0  # this and the next two: see controller/machine/tick.py
    ranks_left: float = 0.0
    looked_at: str = ""
    unix_offset_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Process and status of a rank, as stored; another process means a new run of the job."""

    rank: int
    pid: int
    status: RankStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The stored part of a job; its incidents and layouts are stored separately."""

    name: str
    newest_generation: int
    step: int
    layout: Layout | None
    layout_reason: str
    desired: Layout | None
    baseline: Layout | None
    ranks: tuple[RankRecord, ...] = ()
    run_id: int = 0
    is_provisional: bool = False


KEPT_INCIDENTS = 256  # of one job, beside the open ones; the store keeps all


def newest_incidents(incidents: Sequence[Incident]) -> tuple[Incident, ...]:
    """Return the incidents to keep in memory: the newest `KEPT_INCIDENTS` and all open ones."""
    older, last = incidents[:-KEPT_INCIDENTS], incidents[-KEPT_INCIDENTS:]
    return (*(incident for incident in older if incident.is_open), *last)
