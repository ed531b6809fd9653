"""What a step takes under a layout, as decisions compare it: one road for each kind of job. Pure.

Data parallel jobs by the forecast of ranks that meet at every layer; those with stages or tensor
groups by the longest path of their pipelines. Never a layout by the one, its rival by the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pacekeeper.controller.mitigation.migration_costs import (
    MoveCosts,
    Moved,
    cost_s,
    costs_of,
    moved,
)
from pacekeeper.controller.planning.model.problem import PartitionProblem, healthy
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.controller.planning.token_split.linear_program import Split
from pacekeeper.controller.planning.token_split.proportional import split_layers
from pacekeeper.controller.policy.partition_inputs import as_partition, problem_of, unevenness_of
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.layout import Layout
from pacekeeper.predictor.cost.forecast import forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds of a step; `fluid_step_s`: no layout is below it, whatever it moves."""

    step_s: float
    fluid_step_s: float


class Pricing:
    """The prices of one decision, in the speeds as they are found. `overhead_s`: of a step, what no
    forecast explains. Raises ValueError where pipelines can not be priced.
    """

    def __init__(self, view: PlanningSnapshot, config: PolicyConfig) -> None:
        self.view = view
        self.speeds: Mapping[int, float] = view.speeds
        self.costs: MoveCosts = costs_of(tuple(view.moves.values()), config)
        self._moved: tuple[Layout, Moved] | None = None  # of the layout asked for last
        self.problem: PartitionProblem | None = None
        if view.is_partitioned:
            uneven = unevenness_of(view.layout, view.workload.loads, self.speeds)
            self.problem = problem_of(view, config, self.costs, unevenness=uneven)
        priced_s = self._bare(self.as_run(view.layout)).step_s
        self.overhead_s = max(0.0, view.step_s - priced_s)
        self.current_s = priced_s + self.overhead_s

    def price(self, layout: Layout) -> Price:
        """Of a step under it, its shares taken as they stand."""
        bare = self._bare(layout)
        return Price(
            step_s=bare.step_s + self.overhead_s, fluid_step_s=bare.fluid_step_s + self.overhead_s
        )

    def as_run(self, layout: Layout) -> Layout:
        """With the shares that ranks really compute under it."""
        is_present = layout is self.view.layout
        splits = self.present_splits if is_present else self._own_splits(layout)
        if splits is None:
            return layout
        return replace(layout, experts=tuple(split.replicas for split in splits))

    @cached_property
    def present_splits(self) -> tuple[Split, ...] | None:
        """What the trainer gives by itself under the layout in force, None where it does not."""
        return self._own_splits(self.view.layout)

    def moved(self, layout: Layout) -> Moved:
        """What has to be copied to get there."""
        if self._moved is None or self._moved[0] is not layout:
            self._moved = layout, moved(self.view.layout, layout, self.view.shape)
        return self._moved[1]

    def cost_s(self, layout: Layout) -> float:
        """Seconds until it is in force."""
        is_repartition = layout.stages != self.view.layout.stages
        return cost_s(self.moved(layout), self.costs, is_repartition=is_repartition)

    def _own_splits(self, layout: Layout) -> tuple[Split, ...] | None:
        """Where it splits every step: the best there is for the speeds the layout says, whatever
        the loads were when it was planned.
        """
        if not self.view.shape.splits_each_step:
            return None
        return split_layers(layout, loads=self.view.workload.loads, speeds=layout.speed_by_rank)

    def _bare(self, layout: Layout) -> Price:
        view = self.view
        if self.problem is None:
            found = forecast(layout, model=view.model, workload=view.workload, speeds=self.speeds)
            return Price(step_s=found.step_s, fluid_step_s=found.fluid_step_s)
        uneven = unevenness_of(layout, view.workload.loads, self.speeds)
        partition = as_partition(view, layout)
        step_s = price(partition, replace(self.problem, unevenness=uneven)).step_s
        return Price(step_s=step_s, fluid_step_s=self._fluid_s)

    @cached_property
    def _fluid_s(self) -> float:
        """The healthy step of the baseline, experts spread evenly, over the mean of all speeds."""
        assert self.problem is not None, "of pipelines only"
        whole = healthy(replace(self.problem, unevenness=1.0))
        return price(self.problem.baseline, whole).step_s * self.problem.fluid_ratio
