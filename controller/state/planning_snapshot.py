"""The inputs of a decision of the policy, as one value. Built by `controller/policy/inputs.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pacekeeper.controller.state.job_parts import MeasuredMove
from pacekeeper.controller.state.plan_phase import BackoffReason, Judged
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import DomainOf
from pacekeeper.core.telemetry.attachment import ModelShape
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
class PlanningSnapshot:
    """What a decision rests on. `slow`: open findings, rank -> slowdown; `slow_links`: of links.

    `node_of`: where each rank sits; one that is not named is alone on its node. `rack_of`: the rack
    of each rank whose node has told it.
    `baseline`: the layout before the first open finding, None where there is nothing to go back to.
    `step_s`: the measured step under `layout`, 0 where unknown. `steps_since_plan`: steps under it.
    `unread`: slow ranks of which no probe has been read; `refuted`: those whose probe was not slow.
    `is_probing`: a probe is under way, and what is costly waits for it.
    `refusals`: of each kind of plan the last one, and until when such plans wait; `asked_s`: now.
    `is_provisional`: the layout was made for what is over, so any better one is welcome at once;
    `by_survivors`: it stands where survivors of a death could put it in a hurry.
    `slow_steps`: since the newest finding's onset; None: nobody is slow, or it is not known.
    `work`: by rank, needed of stages and tensor groups only; empty: not measured yet.
    `moves`: how earlier plans went; `failed`: the present plan, where its steps are
    no faster than those before it.
    `approved`: what a person has approved: no other plan is looked for.
    `cordoned`: ranks that are to have no work, by a person's order.
    `doubted`: ranks on nodes that were slow again and again, in whatever job: no expert is left to
    such ranks alone where others can have it.
    `losses`: of the ranks, the part that each loss so far took.
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
    unread: frozenset[int] = frozenset()
    refuted: frozenset[int] = frozenset()
    is_probing: bool = False
    refusals: Mapping[MitigationLevel, BackoffReason] = field(default_factory=dict)
    asked_s: float = 0.0
    by_survivors: bool = False
    slow_steps: int | None = None
    slow_links: Mapping[int, float] = field(default_factory=dict)
    work: Mapping[int, RankTime] = field(default_factory=dict)
    moves: Mapping[int, MeasuredMove] = field(default_factory=dict)
    failed: Judged | None = None
    approved: Decision | None = None
    cordoned: frozenset[int] = frozenset()
    doubted: frozenset[int] = frozenset()
    losses: tuple[float, ...] = ()

    @property
    def is_partitioned(self) -> bool:
        """Does the layout have stages or tensor groups?"""
        return len(self.layout.stages) > 1 or any(
            len(group) > 1 for group in self.layout.stages[0].groups
        )

    @property
    def speeds(self) -> dict[int, float]:
        """How fast each rank of the layout is."""
        return {rank: 1.0 / self.slow.get(rank, 1.0) for rank in self.layout.ranks}
