"""Ours: what survivors, newcomers and the controller of a real job do, by their own code.

Survivors shrink and newcomers widen the layout (`core/shrink.py`, `core/grow.py`); then, and every
`review_steps`, the controller's policy (`controller/policy.py`) is asked with a view like a live
one, and what it decides is done. Nothing is decided here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper.controller.policy import View, decide
from pacekeeper.core.config import PolicyConfig
from pacekeeper.core.errors import LostStateError
from pacekeeper.core.grow import next_of
from pacekeeper.core.layout import Layout, even_layout
from pacekeeper.core.shrink import Floor
from pacekeeper.core.topology import ModelShape
from pacekeeper.predictor.cost_model import CostModel
from pacekeeper.predictor.forecast import Workload
from pacekeeper.predictor.workload import FEATURES
from pacekeeper.simulator.job_model import Dispatch, JobModel, copied_bytes
from pacekeeper.simulator.sim_policy import PUBLISHED, Answer, Array, Cause, Costs, Moment, Use

# From the end of a process until its peers know: a supervisor sees it at once, and whole recoveries
# take less than this (`benchmarks/recovery_time.py`). Checkpoints are copied at a step boundary and
# written beside the training (ADR 32); 1 GB/s for the copy is what MoC measured (2408.04307, 6.2).
OURS = replace(PUBLISHED, notice_s=(1.0, 1.0), copy_s_per_byte=1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacekeeper:
    """`min_hosts`: floor of every expert, as long as there are slots for it.

    Groups, copies, restarts and storage cost what they cost Lazarus; but noticing does not wait for
    a time-out of the collectives, nor training for the storage.
    """

    name: str = "pacekeeper"
    min_hosts: int = 2
    checkpoint_steps: int | None = 250
    review_steps: int | None = 200
    costs: Costs = OURS
    config: PolicyConfig = field(default_factory=PolicyConfig)
    dispatch: Dispatch = Dispatch.EVENED

    def answer(self, moment: Moment, job: JobModel) -> Answer:
        if not moment.nodes or not job.has_room(len(moment.nodes)):
            return Answer(layout=None, is_rolled_back=True, reason="too few nodes for the model")
        if moment.layout is None:
            return self._begin(moment, job)
        if moment.cause is Cause.PACED:
            return Answer(layout=moment.layout, reason="not measured yet")
        if moment.cause is Cause.DUE:
            return self._review(moment, job)
        return self._regroup(moment, job, moment.layout)

    def _begin(self, moment: Moment, job: JobModel) -> Answer:
        layout = _as_started(moment, job)
        if moment.is_fresh:
            return Answer(
                layout=layout, again_after_steps=self.config.settle_steps, reason="begins"
            )
        restart_s = moment.draws.between(self.costs.restart_s, moment.now_s, "restart")
        return Answer(
            layout=layout,
            phases=((Use.RESTARTED, restart_s),),
            is_rolled_back=True,
            again_after_steps=self.config.settle_steps,
            reason="starts again",
        )

    def _regroup(self, moment: Moment, job: JobModel, held: Layout) -> Answer:
        """As ranks do by themselves, and then as the controller wants it."""
        floor = Floor(hosts=self._floor(job, len(moment.nodes)), slots_per_rank=job.slots_per_node)
        generation = held.generation + 1
        draws, costs, now_s = moment.draws, self.costs, moment.now_s
        try:
            layout = next_of(held, moment.nodes, generation=generation, floor=floor)
        except LostStateError as error:
            layout = next_of(
                held, moment.nodes, generation=generation, floor=floor, is_restored=True
            )
            restart_s = draws.between(costs.restart_s, now_s, "restart")
            return Answer(
                layout=layout,
                phases=((Use.RESTARTED, restart_s),),
                is_rolled_back=True,
                again_after_steps=self.config.settle_steps,
                reason=error.what,
            )
        moved = copied_bytes(held, layout, job, living=moment.nodes)
        spent_s = costs.copying_s(moved) + draws.between(costs.regroup_s, now_s, "regroup")
        if moment.lost:
            spent_s += draws.between(costs.notice_s, now_s, "notice")
        view = self._view(moment, job, layout, is_makeshift=True)
        decision = decide(view, self._config(job, len(moment.nodes)))
        if decision.layout is not None:
            more = copied_bytes(layout, decision.layout, job, living=moment.nodes)
            moved, spent_s = moved + more, spent_s + costs.copying_s(more)
        return Answer(
            layout=decision.layout or layout,
            phases=((Use.RECONFIGURED, spent_s),),
            copied_bytes=moved,
            again_after_steps=self.config.settle_steps,
            reason=f"survivors and newcomers regroup; {decision.reason}",
        )

    def _review(self, moment: Moment, job: JobModel) -> Answer:
        held = moment.layout
        assert held is not None
        seen = _Seen(layout=held, parts=moment.parts)
        if isinstance(moment.memory, _Seen) and moment.memory.is_same(seen):
            return Answer(layout=held, memory=seen, reason="nothing has changed since it was asked")
        view = self._view(moment, job, held, is_makeshift=False)
        decision = decide(view, self._config(job, len(moment.nodes)))
        if decision.layout is None:
            return Answer(layout=held, memory=seen, reason=decision.reason)
        moved = copied_bytes(held, decision.layout, job, living=moment.nodes)
        return Answer(
            layout=decision.layout,
            phases=((Use.RECONFIGURED, self.costs.copying_s(moved)),) if moved else (),
            copied_bytes=moved,
            reason=decision.reason,
        )

    def _floor(self, job: JobModel, num_nodes: int) -> int:
        return max(1, min(self.min_hosts, num_nodes * job.slots_per_node // job.num_experts))

    def _config(self, job: JobModel, num_nodes: int) -> PolicyConfig:
        """The settings with the prices of this cluster."""
        floor = self._floor(job, num_nodes)
        return replace(
            self.config,
            min_hosts=floor,
            min_nodes=floor,
            move_s_per_byte=self.costs.transfer_s_per_byte,
            plan_s=self.costs.transfer_s,
            restart_s=sum(self.costs.restart_s) / 2.0,
        )

    def _view(self, moment: Moment, job: JobModel, layout: Layout, *, is_makeshift: bool) -> View:
        workload = workload_of(job, moment.parts, len(layout.ranks))
        return View(
            layout=layout,
            shape=shape_of(job, len(layout.ranks)),
            model=model_of(job),
            workload=workload,
            slow={},
            home=None,
            step_s=0.0,
            steps_since_plan=self.config.settle_steps,
            is_makeshift=is_makeshift,
            by_survivors=is_makeshift,
            num_load_steps=self.config.settle_steps,
            next_generation=layout.generation + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Seen:
    """What the controller was asked about last, with the answer to do nothing."""

    layout: Layout
    parts: Array

    def is_same(self, other: "_Seen") -> bool:
        return self.layout is other.layout and np.array_equal(self.parts, other.parts)


def _as_started(moment: Moment, job: JobModel) -> Layout:
    """As a job starts: as many replicas of each expert as all slots hold evenly."""
    num_nodes = len(moment.nodes)
    return even_layout(
        ranks=moment.nodes,
        num_layers=job.num_layers,
        num_experts=job.num_experts,
        replicas=min(num_nodes, num_nodes * job.slots_per_node // job.num_experts),
    )


def shape_of(job: JobModel, num_nodes: int) -> ModelShape:
    """What ranks of this job say of their model when they attach."""
    return ModelShape(
        num_layers=job.num_layers,
        num_experts=job.num_experts,
        experts_per_token=1,
        rows_per_step=job.samples_per_node * num_nodes,
        slots_per_rank=job.slots_per_node,
        expert_bytes=job.expert_bytes,
        dense_bytes=job.dense_bytes,
        splits_each_step=True,
    )


def workload_of(job: JobModel, parts: Array, num_nodes: int) -> Workload:
    """A step of so many nodes with these parts of tokens [layers, experts]."""
    tokens = job.tokens_per_step(num_nodes)
    return Workload(
        num_rows=job.samples_per_node * num_nodes,
        tokens=float(tokens),
        sum_len_squared=0.0,
        loads=tuple(map(tuple, (parts * tokens).tolist())),
    )


def model_of(job: JobModel) -> CostModel:
    """What the predictor would have learnt of this job: seconds per token and per expert row."""
    per_node = job.samples_per_node * job.tokens_per_sample
    known: Mapping[str, float] = {
        "tokens": (1.0 - job.expert_part) * job.balanced_step_s / per_node,
        "expert_rows": job.expert_part * job.balanced_step_s / (per_node * job.num_layers),
    }
    return CostModel(
        coefficients=np.array([known.get(name, 0.0) for name in FEATURES]),
        covariance=np.zeros((len(FEATURES), len(FEATURES))),
        sigma=0.0,
    )
