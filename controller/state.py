"""Everything the controller knows, as one frozen value; only `machine.advance` makes a new one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from pacekeeper.core.findings import Decision, Incident, Watch
from pacekeeper.core.layout import Layout
from pacekeeper.core.records import Record
from pacekeeper.core.reports import AgentHealth
from pacekeeper.core.topology import Attachment
from pacekeeper.predictor.evidence import Evidence

EMPTY: Mapping[str, object] = MappingProxyType({})


class RankLife(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank as the controller sees it. None: not known yet (measuring)."""

    attachment: Attachment
    node: str
    life: RankLife = RankLife.ALIVE
    observed_generation: int = 0
    observed_s: float | None = None
    expected_s: float | None = None
    slowdown: float | None = None
    suspicion: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job. `layout` is the observed one, `desired` the one offered (None: nothing offered).

    `home` is the layout to go back to when the open incidents are over. `pending` holds records
    of steps that are not complete yet, by step. `loads[layer][expert]` is the running mean of
    tokens per step.
    """

    name: str
    ranks: Mapping[int, RankState] = field(default_factory=dict)
    layout: Layout | None = None
    desired: Layout | None = None
    desired_reason: str = ""
    desired_said_s: float = 0.0
    home: Layout | None = None
    newest_generation: int = 0
    evidence: Evidence | None = None
    pending: Mapping[int, tuple[Record, ...]] = field(default_factory=dict)
    loads: tuple[tuple[float, ...], ...] = ()
    incidents: tuple[Incident, ...] = ()
    step: int = -1
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    loss: float | None = None
    watch: Watch = Watch.BLIND
    last_record_s: float = 0.0
    last_plan_step: int = -1
    last_decision: Decision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node's agent."""

    name: str
    agent_life: str
    product_version: str = ""
    is_connected: bool = True
    health: AgentHealth = AgentHealth()
    device_uuids: tuple[str, ...] = ()
    last_report_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All jobs and nodes. `unix_offset_s` turns the machine's clock into Unix time."""

    jobs: Mapping[str, JobState] = field(default_factory=dict)
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    next_incident_id: int = 1
    unix_offset_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What of a job outlives the controller (with its incidents and layouts)."""

    name: str
    generation: int
    newest_generation: int
    step: int
    layout: Layout | None
    home: Layout | None
