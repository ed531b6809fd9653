"""pacekeeper's policy for simulated pipelined jobs: the controller's detector and planner.

Slow ranks are those with open findings of the state machine
(`simulator/engine/controller_in_loop.py`), as slow as it measured them. The partition is that of
`plan_partition`, which is wider than a live job's `Layout`: pipelines may have their own cuts, and
attention and MLP their own runs of shards. When to act repeats two rules of
`controller/policy/decide.py`: minimum gain, and ski rental (the fault has cost as much as the
move). The plan waits for a probe, which takes a step, and for the next step boundary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from pacekeeper.controller.planning.model.partition import Partition, PartitionPlan
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.text import format_s
from pacekeeper.simulator.engine.controller_in_loop import Watched, Watcher
from pacekeeper.simulator.jobs.data_parallel import Dispatch
from pacekeeper.simulator.jobs.document_lengths import Lengths
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Planned, Work
from pacekeeper.simulator.policies.base import Cause, Costs, Use, nonzero_phases
from pacekeeper.simulator.policies.pipeline.base import ON_CLUSTER, PipelineAnswer, PipelineMoment

# As in `simulator/policies/pacekeeper.py`: checkpoints are copied, and written beside the training.
OURS = replace(ON_CLUSTER, copy_s_per_byte=1e-9)
ACT_STEPS = 2  # after a finding: the probe, and the plan at a boundary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """What the controller remembers. speed: by open findings; coming: its state at coming_step."""

    speed: Mapping[int, float] = field(default_factory=dict)
    watched: Watched | None = None
    coming: Watched | None = None
    coming_step: int = 0
    onset_step: int = 0  # since when ranks are as slow as they are

    def after(self, step: int) -> int | None:
        return None if self.coming is None else max(1, self.coming_step - step)

    def arrived(self) -> "_Known":
        """What was coming is known."""
        assert self.coming is not None, "something was coming"
        speed = {d: 1.0 / slowdown for d, slowdown in self.coming.slow.items()}
        return _Known(speed=speed, watched=self.coming, onset_step=self.onset_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repartition:
    """A partition of any job that `PipelineJob` says."""

    name: str = "pacekeeper"
    checkpoint_steps: int | None = None
    review_steps: int | None = None
    costs: Costs = OURS
    dispatch: Dispatch = Dispatch.EVENED
    config: ControllerConfig = field(default_factory=ControllerConfig)
    lengths: Lengths | None = None  # of the documents that its detector sees trained

    def answer(self, moment: PipelineMoment, job: PipelineJob) -> PipelineAnswer:
        known = moment.memory if isinstance(moment.memory, _Known) else _Known()
        held = _partition(moment.layout)
        if moment.cause is Cause.PACED and held is not None:
            return self._sees(moment, job, known, held)
        if known.coming is not None and moment.step >= known.coming_step:
            known = known.arrived()
        if held is None and moment.is_fresh and set(job.baseline.ranks) <= set(moment.nodes):
            return PipelineAnswer(layout=Planned(partition=job.baseline), reason="begins")
        known = self._with_nodes(moment, job, known)
        problem = job.as_is(known.speed, living=moment.nodes, present=held or job.baseline)
        prices = replace(problem.prices, num_steps=self.config.policy.horizon_steps)
        problem = replace(problem, prices=prices)
        try:
            plan = plan_partition(problem)
        except ValueError as error:
            return PipelineAnswer(layout=None, memory=known, reason=str(error))
        if moment.cause is Cause.DUE and held is not None and known.speed:
            waits = self._waits(moment, known, plan, problem)
            if waits is not None:
                return waits
        return self._moved(moment, known, plan, held)

    def _waits(
        self, moment: PipelineMoment, known: _Known, plan: PartitionPlan, problem: PartitionProblem
    ) -> PipelineAnswer | None:
        """Where nothing is to be done about slow ranks, or not yet."""
        now_s = price(problem.now, problem).step_s
        gain_s = now_s - plan.step_s
        if gain_s < self.config.policy.min_gain * now_s:
            return PipelineAnswer(
                layout=moment.layout,
                again_after_steps=known.after(moment.step),
                memory=known,
                reason=f"gains {gain_s / now_s:.1%}: too little",
            )
        slow_steps = moment.step - known.onset_step
        if gain_s * slow_steps >= plan.moves.move_s:
            return None
        left = ceil(plan.moves.move_s / gain_s) - slow_steps
        return PipelineAnswer(
            layout=moment.layout,
            again_after_steps=min(left, known.after(moment.step) or left),
            memory=known,
            reason=f"has cost {format_s(gain_s * slow_steps)} so far: it may pass",
        )

    def _sees(
        self, moment: PipelineMoment, job: PipelineJob, known: _Known, held: Partition
    ) -> PipelineAnswer:
        seed = moment.draws.number(moment.now_s, "jitter")
        watcher = Watcher(job, self.config, seed, self.lengths)
        watched = known.watched or watcher.begun(moment.nodes, held)
        steps, seen = watcher.until_seen(watched, held, moment.speed)
        known = replace(
            known,
            coming=seen,
            coming_step=moment.step + steps + ACT_STEPS,
            onset_step=moment.step,
        )
        return PipelineAnswer(
            layout=moment.layout,
            again_after_steps=steps + ACT_STEPS,
            memory=known,
            reason=f"seen in {steps} steps",
        )

    def _with_nodes(self, moment: PipelineMoment, job: PipelineJob, known: _Known) -> _Known:
        """The machine hears of exits and of who attaches."""
        there = set(moment.nodes)
        speed = {d: pace for d, pace in known.speed.items() if d in there}
        return replace(
            known,
            speed=speed,
            watched=self._followed(known.watched, moment, job),
            coming=self._followed(known.coming, moment, job),
        )

    def _followed(
        self, watched: Watched | None, moment: PipelineMoment, job: PipelineJob
    ) -> Watched | None:
        if watched is None:
            return None
        watcher = Watcher(job, self.config, 0)
        there = set(moment.nodes)
        gone = watched.number_of.keys() - there
        if gone:
            watched = watcher.gone(watched, gone)
        come = there - watched.number_of.keys()
        return watcher.joined(watched, come) if come else watched

    def _moved(
        self, moment: PipelineMoment, known: _Known, plan: PartitionPlan, held: Partition | None
    ) -> PipelineAnswer:
        work = Planned(partition=plan.partition)
        again = known.after(moment.step)
        if plan.partition != held:
            known = replace(
                known,
                watched=known.watched and known.watched.moved(),
                coming=known.coming and known.coming.moved(),
            )
        if held is None or plan.moves.bytes_from_checkpoint > 0.0:
            phases = ((Use.RESTARTED, self.costs.restart(moment)[1]),)
            return PipelineAnswer(
                layout=work,
                phases=() if moment.is_fresh else phases,
                is_rolled_back=True,
                again_after_steps=again,
                memory=known,
                reason=plan.reason,
            )
        noticed_s = 0.0
        if moment.lost:
            noticed_s = moment.draws.between(self.costs.notice_s, moment.now_s, "notice")
        return PipelineAnswer(
            layout=work if plan.partition != held else moment.layout,
            phases=nonzero_phases((Use.NOTICED, noticed_s), (Use.MOVED, plan.moves.move_s)),
            again_after_steps=again,
            copied_bytes=round(plan.moves.total_bytes),
            memory=known,
            reason=plan.reason,
        )


def _partition(work: Work | None) -> Partition | None:
    """What runs now. Ours runs on nothing but partitions."""
    if work is None:
        return None
    assert isinstance(work, Planned), "its own answers"
    return work.partition
