"""The inputs of a decision of the policy, as one value. Built by `controller/policy/inputs.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pacekeeper.controller.state.job_parts import MeasuredMove
from pacekeeper.controller.state.plan_phase import BackoffReason, Judged
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import DomainOf
from pacekeeper.core.telemetry.attachment import DEFAULT_CAPABILITIES, Capability, ModelShape
from pacekeeper.predictor.cost.forecast import Workload
from pacekeeper.predictor.cost.model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """The time of a rank's work in one step at speed 1, by its role's model.

    Shards and rows (`dense_s`), experts, and the part of each micro-batch independent of rows.
    """

    dense_s: float
    expert_s: float
    fixed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHistory:
    """How earlier plans of the job went, and which failures it had.

    Attributes:
        moves: The measured moves of earlier plans, by generation.
        failed: The plan in force, where its steps are no faster than those before it.
        refusals: The last refusal or rollback of each level, with the time until which plans of
            the level wait.
        losses: The fraction of the ranks that each failure took.
    """

    moves: Mapping[int, MeasuredMove] = field(default_factory=dict)
    failed: Judged | None = None
    refusals: Mapping[MitigationLevel, BackoffReason] = field(default_factory=dict)
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningSnapshot:
    """The inputs of a decision.

    Attributes:
        layout: The layout in force.
        shape: The model's shape.
        model: The cost model of compute times; None: not fitted yet.
        workload: The mean work of a step.
        slow: The slowdown of each rank with an open finding.
        baseline: The layout before the first open finding; None: there is none to return to.
        step_s: The measured step time under `layout`; 0.0: unknown.
        steps_since_plan: The number of steps under `layout`.
        is_provisional: `layout` was made for a past situation, so that any better one is welcome.
        num_load_steps: The number of steps in the mean expert loads.
        next_generation: The generation of the next layout.
        node_of: The node of each rank; a rank without an entry is alone on its node.
        rack_of: The rack of each rank whose node reports one.
        unprobed: Slow ranks without a probe result.
        refuted: Slow ranks whose probe was at normal speed.
        is_probing: A probe is open; expensive plans wait for it.
        asked_s: When the decision was requested.
        by_survivors: `layout` was made by the survivors of a failure.
        slow_steps: Steps since the newest finding's onset; None: no rank is slow, or unknown.
        slow_links: The slowdown of each rank's link with an open finding.
        slow_at_least: The lower end of the interval of each slow rank's slowdown; without an entry
            it is not known yet.
        link_s_per_byte: Seconds for each byte that a rank sends or receives in a step; 0.0: not
            measured.
        memory_of: Bytes that each rank may use of its device, where it reports them.
        work: The time of each rank's work, for jobs with stages or tensor groups only; empty: not
            measured yet.
        approved: The decision that an operator approved: no other plan is searched for.
        cordoned: Ranks that must get no work.
        doubted: Ranks on nodes that were slow repeatedly, in any job; no expert is placed on such
            ranks only where others have room.
        history: Earlier plans and failures.
        capabilities: The plans that the trainer can carry out.
    """

    layout: Layout
    shape: ModelShape
    model: CostModel | None
    workload: Workload
    slow: Mapping[int, float]
    baseline: Layout | None
    step_s: float
    steps_since_plan: int
    is_provisional: bool
    num_load_steps: int
    next_generation: int
    node_of: DomainOf = field(default_factory=dict)
    rack_of: DomainOf = field(default_factory=dict)
    unprobed: frozenset[int] = frozenset()
    refuted: frozenset[int] = frozenset()
    is_probing: bool = False
    asked_s: float = 0.0
    by_survivors: bool = False
    slow_steps: int | None = None
    slow_links: Mapping[int, float] = field(default_factory=dict)
    slow_at_least: Mapping[int, float] = field(default_factory=dict)
    link_s_per_byte: float = 0.0
    memory_of: Mapping[int, int] = field(default_factory=dict)
    work: Mapping[int, RankTime] = field(default_factory=dict)
    approved: Decision | None = None
    cordoned: frozenset[int] = frozenset()
    doubted: frozenset[int] = frozenset()
    history: PlanHistory = field(default_factory=PlanHistory)
    capabilities: frozenset[Capability] = DEFAULT_CAPABILITIES

    @property
    def is_partitioned(self) -> bool:
        """Whether a pipeline has several stages or a tensor group."""
        return any(len(stages) > 1 or len(stages[0].attention) > 1 for stages in self.layout.mesh)

    @property
    def speeds(self) -> dict[int, float]:
        """The speed of each rank of the layout; 1.0: normal."""
        return {rank: 1.0 / self.slow.get(rank, 1.0) for rank in self.layout.ranks}
