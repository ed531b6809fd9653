"""Nothing is done about slow ranks, and a lost one is waited for: the degraded run."""

from dataclasses import dataclass

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Work
from pacekeeper.simulator.policies.pipeline.base import (
    Known,
    PipelineMoment,
    PipelinePolicy,
    all_at_baseline,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmitigated(PipelinePolicy):
    name: str = "degraded"

    def work_for(self, problem: PartitionProblem) -> Work | None:
        return all_at_baseline(problem)

    def notices(self, moment: PipelineMoment, job: PipelineJob, known: Known) -> bool:
        return False
