"""ResiHP (arXiv 2605.06374): its Scheduler's three steps, with its published costs.

Devices are left out down to a power of two, layers move for all pipelines alike, micro-batches
change pipelines stage by stage (`simulator/baselines/resihp.py`, which tries whatever the paper
leaves open). A slowdown is noticed in 3 iterations (2-3 published), if the iteration takes more
than 1.25 times what it should; planning takes 1.44 s; a shard that nobody holds comes from the
persisted state of the last iteration (research 2.2, 2.4, 3.6).
"""

from dataclasses import dataclass

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.simulator.baselines.resihp import resihp
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Handed, Work
from pacekeeper.simulator.policies.pipeline.base import (
    Known,
    PipelineMoment,
    PipelinePolicy,
    all_at_baseline,
)

GATE = 1.25  # observed over predicted iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class ResiHP(PipelinePolicy):
    name: str = "resihp"
    plan_s: float = 1.44
    is_persisted: bool = True

    def work_for(self, problem: PartitionProblem) -> Work | None:
        if all(device.speed == 1.0 for device in problem.devices):
            return all_at_baseline(problem)
        plan = resihp(problem)
        return Handed(
            groups=plan.groups,
            ends=plan.ends,
            counts=tuple(len(pipeline.micro_batches) for pipeline in problem.baseline.pipelines),
            delta=plan.delta,
            order=plan.order,
        )

    def notices(self, moment: PipelineMoment, job: PipelineJob, known: Known) -> bool:
        """A slowdown passes the gate. How a recovery is noticed is not published: always."""
        assert moment.layout is not None, "speeds are noticed of a job that runs"
        predicted, observed = (
            job.step_s(moment.layout, moment.parts, speed, self.dispatch)
            for speed in (known.speed, moment.speed)
        )
        return observed <= predicted or observed > GATE * predicted
