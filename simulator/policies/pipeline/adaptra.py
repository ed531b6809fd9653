"""Adaptra (PipeMorph, arXiv 2504.19232): the order of chunks changes, nothing else does.

Its schedules absorb what waits for others: stages run ahead of 1F1B as inputs come, or fill their
bubbles with weight gradients; the best of the three is taken, as its analytical model would. That
it takes messages off the devices is nothing here: no link is slow. Its changes cost no time; slow
ranks are told to it as Greyhound finds them (research 5.3).
"""

from dataclasses import dataclass, replace

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.simulator.baselines.even_pipelines import baseline_groups
from pacekeeper.simulator.baselines.resihp_migration import StageOrder
from pacekeeper.simulator.baselines.step_simulation import NEVER, walked
from pacekeeper.simulator.jobs.pipeline_assignment import Handed, Planned, Work
from pacekeeper.simulator.policies.pipeline.base import PipelinePolicy, all_at_baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptra(PipelinePolicy):
    name: str = "adaptra"
    validate_s: float = 3.0

    def work_for(self, problem: PartitionProblem) -> Work | None:
        baseline = all_at_baseline(problem)
        if baseline is None:
            return None
        eager = Handed(
            groups=tuple(tuple(of_pipeline) for of_pipeline in baseline_groups(problem)),
            ends=problem.baseline.pipelines[0].cuts,
            counts=tuple(len(pipeline.micro_batches) for pipeline in problem.baseline.pipelines),
            delta=NEVER,
            order=StageOrder.EAGER,
        )
        filled = Planned(partition=replace(problem.baseline, schedule=Schedule.ZERO_BUBBLE))
        filled_s = price(filled.partition, problem).step_s
        eager_s = walked(eager.groups, eager.ends, problem, delta=NEVER, order=eager.order).step_s
        choices = [
            (price(problem.baseline, problem).step_s, baseline),
            (filled_s, filled),
            (eager_s, eager),
        ]
        return min(choices, key=lambda choice: choice[0])[1]
