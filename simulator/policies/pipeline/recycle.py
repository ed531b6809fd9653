"""ReCycle (SOSP'24), alone and strengthened: peers take over a dead stage's micro-batches.

A tensor group that loses a rank is gone with all its ranks; its micro-batches run on the same stage
of other pipelines, which hold its parameters, so no state moves. Where no pipeline has the stage
left, it stops. Backward passes are split, so that weight gradients fill bubbles. `is_strengthened`:
with Greyhound's detection and S2 for slow ranks (research 4, 5.10).
"""

from dataclasses import dataclass

import numpy as np

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.compute import layer_sums
from pacekeeper.simulator.baselines.even_pipelines import (
    Ranks,
    baseline_groups,
    batch_rows,
    even_cost,
    num_batches,
    stage_s,
)
from pacekeeper.simulator.baselines.greyhound import SLOW, least_variance
from pacekeeper.simulator.baselines.resihp_migration import StageOrder
from pacekeeper.simulator.baselines.step_simulation import NEVER
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Handed, Work
from pacekeeper.simulator.policies.pipeline.base import (
    Known,
    PipelineMoment,
    PipelinePolicy,
    all_at_baseline,
)
from pacekeeper.simulator.policies.pipeline.greyhound import S2_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReCycle(PipelinePolicy):
    name: str = "recycle"
    notice_steps: int = S2_STEPS
    validate_s: float = 3.0
    is_strengthened: bool = False

    def work_for(self, problem: PartitionProblem) -> Work | None:
        if all(device.speed == 1.0 for device in problem.devices):
            return all_at_baseline(problem)
        groups = whole_groups(problem)
        if not all(any(of[stage] for of in groups) for stage in range(len(groups[0]))):
            return None
        counts = tuple(len(pipeline.micro_batches) for pipeline in problem.baseline.pipelines)
        if self.is_strengthened:
            counts = even_microbatches(groups, counts, problem)
        return Handed(
            groups=groups,
            ends=problem.baseline.pipelines[0].cuts,
            counts=counts,
            delta=NEVER,
            order=StageOrder.SPLIT,
        )

    def notices(self, moment: PipelineMoment, job: PipelineJob, known: Known) -> bool:
        return self.is_strengthened


def whole_groups(problem: PartitionProblem) -> tuple[tuple[Ranks, ...], ...]:
    """groups[pipeline][stage] of the baseline whose ranks all live; () for the others."""
    return tuple(
        tuple(
            ranks if all(problem.device_of[rank].speed > 0.0 for rank in ranks) else ()
            for ranks in of_pipeline
        )
        for of_pipeline in baseline_groups(problem)
    )


def even_microbatches(
    groups: tuple[tuple[Ranks, ...], ...], counts: tuple[int, ...], problem: PartitionProblem
) -> tuple[int, ...]:
    """Greyhound's S2: whole micro-batches by the pace of each pipeline's slowest living stage."""
    sums, rows = layer_sums(problem.model, problem.links), batch_rows(problem)
    ends = problem.baseline.pipelines[0].cuts
    paces = [
        max(
            (
                stage_s(even_cost(ranks, problem), first, end, rows, sums)
                for ranks, first, end in zip(of_pipeline, (0, *ends[:-1]), ends, strict=True)
                if ranks
            ),
            default=0.0,
        )
        for of_pipeline in groups
    ]
    median = float(np.median([pace for pace in paces if pace > 0.0]))
    paces = [pace or median for pace in paces]
    if max(paces) <= SLOW * median:
        return counts
    return least_variance(num_batches(problem), paces)
