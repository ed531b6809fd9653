"""Nothing is done about slow ranks, and a lost one is waited for: the degraded run."""

from dataclasses import dataclass

from pacekeeper.controller.partition_problem import Problem
from pacekeeper.simulator.pipeline_job import PipelineJob
from pacekeeper.simulator.pipeline_policy import Known, PipelineMoment, PipelinePolicy, all_at_home
from pacekeeper.simulator.pipeline_work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmitigated(PipelinePolicy):
    name: str = "degraded"

    def work_for(self, problem: Problem) -> Work | None:
        return all_at_home(problem)

    def notices(self, moment: PipelineMoment, job: PipelineJob, known: Known) -> bool:
        return False
