"""Step time of a job under a layout, the price that decisions compare. Pure.

Data-parallel jobs are priced by a forecast in which ranks meet at every layer; jobs with pipeline
stages or tensor groups by the longest path of their pipelines. All candidates of a job are priced
by the same method. Used by `decide.py` and `candidates.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from pacekeeper.controller.mitigation.migration_costs import (
    MoveCosts,
    Moved,
    cost_s,
    costs_of,
    moved,
)
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.controller.planning.token_split.linear_program import Split
from pacekeeper.controller.planning.token_split.proportional import split_layers
from pacekeeper.controller.policy.partition_inputs import as_partition, problem_of, unevenness_of
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.apportion import num_micro_batches
from pacekeeper.core.layout.layout import Layout
from pacekeeper.predictor.cost.forecast import Workload, forecast, least_step_s, row_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds of a step; `fluid_step_s` is a lower bound for every layout."""

    step_s: float
    fluid_step_s: float


class Pricing:
    """The prices of one decision, at the present speeds.

    `overhead_s` is the part of the measured step that the forecast does not explain.
    `expert_speeds`: at what speed the ranks get and compute rows of experts, where the messages of
    slow links are not priced by pipelines.

    Raises:
        ValueError: Pipelines cannot be priced (see `partition_inputs.problem_of`).
    """

    def __init__(self, view: PlanningSnapshot, config: PolicyConfig) -> None:
        self.view, self._config = view, config
        self.speeds: Mapping[int, float] = view.speeds
        self.expert_speeds = self.speeds if view.is_partitioned else _with_links(view)
        self.costs: MoveCosts = costs_of(tuple(view.history.moves.values()), config)
        self._moved: tuple[Layout, Moved] | None = None  # of the layout asked for last
        self.problem: PartitionProblem | None = None
        if view.is_partitioned:
            uneven = unevenness_of(view.layout, view.workload.loads, self.speeds)
            self.problem = problem_of(view, config, self.costs, unevenness=uneven)
        priced_s = self._bare(self.as_run(view.layout)).step_s
        self.overhead_s = max(0.0, view.step_s - priced_s)
        self.current_s = priced_s + self.overhead_s

    def price(self, layout: Layout) -> Price:
        """Return the price of a step under the layout, with the layout's own shares."""
        bare = self._bare(layout)
        return Price(
            step_s=bare.step_s + self.overhead_s, fluid_step_s=bare.fluid_step_s + self.overhead_s
        )

    def as_run(self, layout: Layout) -> Layout:
        """Return the layout with the shares that the trainer would use under it."""
        is_present = layout is self.view.layout
        splits = self.present_splits if is_present else self._own_splits(layout)
        if splits is None:
            return layout
        return replace(layout, experts=tuple(split.replicas for split in splits))

    @cached_property
    def present_splits(self) -> tuple[Split, ...] | None:
        """The shares that the trainer computes under the present layout; None: it computes none."""
        return self._own_splits(self.view.layout)

    @cached_property
    def cautious(self) -> "Pricing":
        """The prices if slow ranks are only as slow as is certain."""
        slow = {**self.view.slow, **self.view.slow_at_least}
        return Pricing(replace(self.view, slow=slow), self._config)

    def moved(self, layout: Layout) -> Moved:
        """Return what has to be copied to reach the layout."""
        if self._moved is None or self._moved[0] is not layout:
            self._moved = layout, moved(self.view.layout, layout, self.view.shape)
        return self._moved[1]

    def cost_s(self, layout: Layout) -> float:
        """Return the seconds that the move to the layout takes."""
        is_repartition = layout.mesh != self.view.layout.mesh
        return cost_s(self.moved(layout), self.costs, is_repartition=is_repartition)

    def _own_splits(self, layout: Layout) -> tuple[Split, ...] | None:
        """Return the shares of a trainer that splits every step: the best for the layout's speeds.

        None for other trainers.
        """
        if not self.view.shape.splits_each_step:
            return None
        return split_layers(layout, loads=self.view.workload.loads, speeds=layout.speed_by_rank)

    def _bare(self, layout: Layout) -> Price:
        view = self.view
        if self.problem is None:
            found = forecast(
                layout,
                model=view.model,
                workload=self._workload(layout),
                speeds=self.speeds,
                expert_speeds=self.expert_speeds,
            )
            return Price(step_s=found.step_s, fluid_step_s=self._fluid_s)
        uneven = unevenness_of(layout, view.workload.loads, self.speeds)
        partition = as_partition(view, layout)
        step_s = price(partition, replace(self.problem, unevenness=uneven)).step_s
        return Price(step_s=step_s, fluid_step_s=self._fluid_s)

    def _workload(self, layout: Layout) -> Workload:
        """The measured workload, in as many micro-batches as the trainer runs under the layout."""
        shape = self.view.shape
        if not shape.rows_per_microbatch:
            return self.view.workload
        most = layout.most_rows(shape.rows_per_step)
        count = num_micro_batches(most, shape.rows_per_microbatch)
        return replace(self.view.workload, num_microbatches=count)

    @cached_property
    def _fluid_s(self) -> float:
        """Seconds of the step's compute, divided over all devices without messages or idle time."""
        if self.problem is None:
            return self._least_s()
        model = self.problem.model
        layers_s = sum(
            one.attention_s + one.mlp_s + one.replicated_s + one.expert_s for one in model.layers
        )
        forward_s = self.problem.rows_per_step * (model.embedding_s + layers_s + model.head_s)
        speed = sum(device.speed for device in self.problem.devices)
        return (1.0 + model.backward_ratio) * forward_s / speed

    def _least_s(self) -> float:
        """Return the bound of data-parallel layouts, over their numbers of micro-batches."""
        view, shape = self.view, self.view.shape
        counts = range(view.workload.num_microbatches, view.workload.num_microbatches + 1)
        if shape.rows_per_microbatch:
            even = ceil(shape.rows_per_step / len(view.layout.ranks))
            fewest, most = (
                num_micro_batches(rows, shape.rows_per_microbatch)
                for rows in (even, shape.rows_per_step)
            )
            counts = range(fewest, most + 1)
        return least_step_s(
            model=view.model, workload=view.workload, speeds=self.speeds, counts=counts
        )


def _with_links(view: PlanningSnapshot) -> dict[int, float]:
    """Return the ranks' speeds with the extra time of rows that travel over slow links.

    A row goes to its expert and back, and so does its gradient. What a healthy link takes is in the
    unexplained part of the step.
    """
    moved_s = 4.0 * view.shape.hidden_bytes * view.link_s_per_byte
    if not view.slow_links or not moved_s:
        return view.speeds
    part = moved_s / row_s(view.model, view.workload, view.layout)
    return {
        rank: 1.0 / (1.0 / speed + part * (view.slow_links.get(rank, 1.0) - 1.0))
        for rank, speed in view.speeds.items()
    }
