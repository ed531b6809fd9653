"""Greyhound (ATC'25): detection in 3 iterations, then S2 and S3 by ski-rental.

S2 hands on whole micro-batches (`simulator/baselines/greyhound.py`); S3 exchanges groups, too.
Each is taken when what was lost so far equals its published price: 10 slow iterations' loss for
S2, 60 s for S3 (research 5.1). S4, a restart, brings no other devices: it is not taken. A
validation pauses training for 3 s (2.24-3.72 s, research 2.4).
"""

from dataclasses import dataclass, replace
from math import ceil

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.simulator.baselines.even_pipelines import baseline_groups
from pacekeeper.simulator.baselines.greyhound import s2, s3
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Planned, Work
from pacekeeper.simulator.policies.base import Cause, Use
from pacekeeper.simulator.policies.pipeline.base import (
    Known,
    PipelineAnswer,
    PipelineMoment,
    PipelinePolicy,
    all_at_baseline,
)

S2_STEPS = 10  # slow iterations whose loss is S2's price: interval 20, halved
S3_S = 60.0
BETTER = 0.99  # of S2's step: what S3 has to stay below


@dataclass(frozen=True, slots=True, kw_only=True)
class Greyhound(PipelinePolicy):
    name: str = "greyhound"
    notice_steps: int = S2_STEPS
    validate_s: float = 3.0

    def work_for(self, problem: PartitionProblem) -> Work | None:
        if all_at_baseline(problem) is None:
            return None
        return Planned(partition=s2(problem, baseline_groups(problem)))

    def answer(self, moment: PipelineMoment, job: PipelineJob) -> PipelineAnswer:
        known = moment.memory if isinstance(moment.memory, Known) else Known()
        is_over = known.coming is not None and moment.step >= known.coming_step
        if moment.cause is Cause.DUE and known.speed and not is_over:
            return self._escalates(moment, job, known)
        answer = PipelinePolicy.answer(self, moment, job)
        known = answer.memory if isinstance(answer.memory, Known) else Known()
        if answer.layout is None or known.coming is not None or not known.speed:
            return answer
        exchanged = self._exchanged(job, known)
        now_s, then_s = (self._step_s(job, work, known) for work in (answer.layout, exchanged))
        lost_s = now_s - self._step_s(job, Planned(partition=job.baseline), Known())
        if then_s > BETTER * now_s or lost_s <= 0.0:
            return answer
        return replace(answer, again_after_steps=ceil(S3_S / lost_s))

    def _escalates(self, moment: PipelineMoment, job: PipelineJob, known: Known) -> PipelineAnswer:
        exchanged = self._exchanged(job, known)
        return PipelineAnswer(
            layout=exchanged,
            phases=((Use.MOVED, S3_S),),
            again_after_steps=known.after(moment.step),
            copied_bytes=job.copied_bytes(moment.layout, exchanged) if moment.layout else 0,
            memory=known,
            reason="S3: slow groups into the same pipelines",
        )

    def _exchanged(self, job: PipelineJob, known: Known) -> Work:
        problem = job.as_is(known.speed)
        return Planned(partition=s2(problem, s3(problem)))

    def _step_s(self, job: PipelineJob, work: Work, known: Known) -> float:
        return job.step_s(work, job.routing.at(0), known.speed, self.dispatch)
