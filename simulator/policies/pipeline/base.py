"""What published policies for pipelined jobs share: they notice, and go where their rule says.

A rule is one method, `work_for`; speeds are noticed some steps after they change, exactly and
without false alarms, which is generous. Groups of a new arrangement, and state that a rank lacks,
cost what they cost us (`PipelineJob.move_s`); what else is published is said by each policy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.simulator.jobs.data_parallel import Dispatch
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Planned, Work
from pacekeeper.simulator.policies.base import (
    PUBLISHED,
    AnswerOf,
    Cause,
    Costs,
    MomentOf,
    Use,
    nonzero_phases,
)

PipelineMoment = MomentOf[Work]
PipelineAnswer = AnswerOf[Work]

# A lost rank: its node's connection breaks (ResiHP, research 2.1), a second for all policies. Who
# comes back is let in at once.
ON_CLUSTER = replace(PUBLISHED, notice_s=(1.0, 1.0), grow_wait_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """What a policy remembers. speed: of ranks it takes for slow; coming: what it will have noticed
    at `coming_step`.
    """

    speed: Mapping[int, float] = field(default_factory=dict)
    coming: Mapping[int, float] | None = None
    coming_step: int = 0

    def after(self, step: int) -> int | None:
        """Steps until what is coming is known."""
        return None if self.coming is None else max(1, self.coming_step - step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePolicy(ABC):
    """`notice_steps`: from a change of speed until it is acted on; `validate_s`: a pause then;
    `plan_s`: of planning, during which training stands. `is_persisted`: the state after each step
    is in storage, from where a lost shard comes as from a peer.
    """

    name: str = ""
    notice_steps: int = 3
    validate_s: float = 0.0
    plan_s: float = 0.0
    is_persisted: bool = False
    checkpoint_steps: int | None = None
    review_steps: int | None = None
    costs: Costs = ON_CLUSTER
    dispatch: Dispatch = Dispatch.EVENED

    @abstractmethod
    def work_for(self, problem: PartitionProblem) -> Work | None:
        """Where to go for the devices as it knows them; None: it gives up."""

    def notices(self, moment: PipelineMoment, job: PipelineJob, known: Known) -> bool:
        """Would this change of speeds be noticed at all?"""
        return True

    def answer(self, moment: PipelineMoment, job: PipelineJob) -> PipelineAnswer:
        known = moment.memory if isinstance(moment.memory, Known) else Known()
        if moment.cause is Cause.PACED:
            return self._sees(moment, job, known)
        noticed_s = 0.0
        if known.coming is not None and moment.step >= known.coming_step:
            known = Known(speed=known.coming)
            noticed_s = self.validate_s
        there = set(moment.nodes)
        known = replace(known, speed={r: s for r, s in known.speed.items() if r in there})
        problem = job.as_is(known.speed, living=moment.nodes)
        try:
            work = self.work_for(problem)
        except ValueError:
            work = None
        return gone_to(self, moment, job, work, known, noticed_s)

    def _sees(self, moment: PipelineMoment, job: PipelineJob, known: Known) -> PipelineAnswer:
        if not self.notices(moment, job, known):
            return PipelineAnswer(
                layout=moment.layout,
                again_after_steps=known.after(moment.step),
                memory=known,
                reason="does not notice",
            )
        known = replace(
            known, coming=dict(moment.speed), coming_step=moment.step + self.notice_steps
        )
        return PipelineAnswer(
            layout=moment.layout,
            again_after_steps=self.notice_steps,
            memory=known,
            reason=f"notices in {self.notice_steps} steps",
        )


def gone_to(
    policy: PipelinePolicy,
    moment: PipelineMoment,
    job: PipelineJob,
    work: Work | None,
    known: Known,
    noticed_s: float = 0.0,
) -> PipelineAnswer:
    """From what is held to `work`, with all that takes; from storage where a shard is lost.

    Without work it stops, and what it has trained stays trained.
    """
    again = known.after(moment.step)
    if work is None:
        return PipelineAnswer(layout=None, memory=known, reason="can not go on with these ranks")
    if moment.layout is None and moment.is_fresh:
        return PipelineAnswer(layout=work, memory=known, reason="begins")
    if moment.layout is None or not (
        policy.is_persisted or job.is_alive(moment.layout, moment.nodes)
    ):
        return PipelineAnswer(
            layout=work,
            phases=(policy.costs.restart(moment),),
            is_rolled_back=True,
            again_after_steps=again,
            memory=known,
            reason="starts again from storage",
        )
    if moment.lost:
        noticed_s += moment.draws.between(policy.costs.notice_s, moment.now_s, "notice")
    is_moved = work != moment.layout
    return PipelineAnswer(
        layout=work,
        phases=nonzero_phases(
            (Use.NOTICED, noticed_s),
            (Use.PLANNED, policy.plan_s if is_moved else 0.0),
            (Use.MOVED, job.move_s(moment.layout, work)),
        ),
        again_after_steps=again,
        copied_bytes=job.copied_bytes(moment.layout, work),
        memory=known,
        reason="as it is" if work == moment.layout else "reconfigures",
    )


def all_at_baseline(problem: PartitionProblem) -> Work | None:
    """The healthy job's partition; None where one of its ranks is gone."""
    if any(problem.device_of[rank].speed <= 0.0 for rank in problem.baseline.ranks):
        return None
    return Planned(partition=problem.baseline)
