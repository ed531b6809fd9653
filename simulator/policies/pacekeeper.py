"""Ours: what survivors, newcomers and the controller of a real job do, by their own code.

Survivors shrink and newcomers widen the layout (`core/layout/resize/`);
then, and every `review_steps`, the controller's policy (`controller/policy/decide.py`) is asked
with a view like a live one, and what it decides is done. That a node is slow it learns from the
detector (`simulator/engine/detection_model.py`). Nothing is decided here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.failure_rates import add_loss
from pacekeeper.controller.state.planning_snapshot import PlanHistory, PlanningSnapshot
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.errors import LostStateError
from pacekeeper.core.incidents.findings import Decision
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.grow import resize
from pacekeeper.core.layout.resize.shrink import ReplicationFloor
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.predictor.cost.features import FEATURES
from pacekeeper.predictor.cost.forecast import Workload
from pacekeeper.predictor.cost.model import CostModel
from pacekeeper.simulator.engine.detection_model import Detection, simulate_detection
from pacekeeper.simulator.jobs.data_parallel import Dispatch, JobModel, copied_bytes
from pacekeeper.simulator.jobs.document_lengths import Lengths
from pacekeeper.simulator.policies.base import PUBLISHED, Answer, Array, Cause, Costs, Moment

# From the end of a process until its peers know: a supervisor sees it at once, and whole recoveries
# take less than this (`benchmarks/recovery_time.py`). Checkpoints are copied at a step boundary and
# written beside the training (ADR 32); 1 GB/s for the copy is what MoC measured (2408.04307, 6.2).
OURS = replace(PUBLISHED, notice_s=(1.0, 1.0), copy_s_per_byte=1e-9)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """What the controller remembers. `slow`: open findings; `baseline`: the layout before them;
    `coming`, `coming_step`: what the detector will have seen at that step; `refused`: what it was
    asked about last, with the answer to do nothing; `losses`: the part of the nodes each took.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    baseline: Layout | None = None
    coming: Detection | None = None
    coming_step: int = 0
    refused: tuple[Layout, Array] | None = None
    losses: tuple[float, ...] = ()

    def has_refused(self, layout: Layout, parts: Array) -> bool:
        return (
            self.refused is not None
            and self.refused[0] is layout
            and np.array_equal(self.refused[1], parts)
        )

    def within(self, held: Sequence[int], nodes: Collection[int]) -> "_Known":
        """Some of these are gone, or everybody sits elsewhere: there is no baseline any more."""
        slow = {rank: slowdown for rank, slowdown in self.slow.items() if rank in nodes}
        losses = add_loss(self.losses, held, nodes)
        return replace(self, slow=slow, baseline=None, refused=None, losses=losses)

    def again_after(self, step: int, usual: int | None) -> int | None:
        return usual if self.coming is None else max(1, self.coming_step - step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacekeeper:
    """`min_hosts`: floor of every expert, as long as there are slots for it. `nodes_per_rack`: what
    agents tell of racks, in the order of nodes; 0: nothing.

    Groups, copies, restarts and storage cost what they cost Lazarus; but noticing does not wait for
    a time-out of the collectives, nor training for the storage.
    """

    name: str = "pacekeeper"
    min_hosts: int = 2
    checkpoint_steps: int | None = 250
    review_steps: int | None = 200
    costs: Costs = OURS
    config: PolicyConfig = field(default_factory=PolicyConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    dispatch: Dispatch = Dispatch.EVENED
    lengths: Lengths | None = None  # of the documents that its detector sees trained
    nodes_per_rack: int = 0

    def answer(self, moment: Moment, job: JobModel) -> Answer:
        known = moment.memory if isinstance(moment.memory, _Known) else _Known()
        if moment.layout is not None and moment.cause not in (Cause.PACED, Cause.DUE):
            known = known.within(moment.layout.ranks, moment.nodes)
        if not moment.nodes or not job.has_room(len(moment.nodes)):
            reason = "too few nodes for the model"
            return Answer(layout=None, is_rolled_back=True, memory=known, reason=reason)
        if moment.layout is None:
            return self._begin(moment, job, known)
        if moment.cause is Cause.PACED:
            return self._watched(moment, job, known, moment.layout)
        if moment.cause is Cause.DUE:
            return self._review(moment, job, known, moment.layout)
        return self._regroup(moment, job, known, moment.layout)

    def _begin(self, moment: Moment, job: JobModel, known: _Known) -> Answer:
        layout = _as_started(moment, job)
        again = self.config.settle_steps
        known = _Known(losses=known.losses)  # of nodes that are gone nothing else matters
        if moment.is_fresh:
            return Answer(layout=layout, again_after_steps=again, memory=known, reason="begins")
        return Answer(
            layout=layout,
            phases=(self.costs.restart(moment),),
            is_rolled_back=True,
            again_after_steps=again,
            memory=known,
            reason="starts again",
        )

    def _watched(self, moment: Moment, job: JobModel, known: _Known, held: Layout) -> Answer:
        """Speeds have changed: nobody knows until the detector has seen it."""
        sight = simulate_detection(
            job,
            held,
            moment.parts,
            self.dispatch,
            known=known.slow,
            speed=moment.speed,
            config=self.detector,
            seed=moment.draws.number(moment.now_s, "jitter"),
            lengths=self.lengths,
        )
        known = replace(known, coming=sight, coming_step=moment.step + sight.steps)
        return Answer(
            layout=held,
            again_after_steps=sight.steps,
            memory=known,
            reason=f"seen in {sight.steps} steps",
        )

    def _regroup(self, moment: Moment, job: JobModel, known: _Known, held: Layout) -> Answer:
        """As ranks do by themselves, and then as the controller wants it."""
        if not set(held.ranks) & set(moment.nodes):  # newcomers are all there is
            return self._begin(moment, job, known)
        floor = ReplicationFloor(
            replicas=self._floor(job, len(moment.nodes)), slots_per_rank=job.slots_per_node
        )
        regrouped = partial(resize, held, moment.nodes, generation=held.generation + 1, floor=floor)
        again = known.again_after(moment.step, self.config.settle_steps)
        try:
            layout = regrouped()
        except LostStateError as error:
            return Answer(
                layout=regrouped(is_restored=True),
                phases=(self.costs.restart(moment),),
                is_rolled_back=True,
                again_after_steps=again,
                memory=known,
                reason=error.what,
            )
        moved = copied_bytes(held, layout, job)
        phases = self.costs.regrouping(moment, moved, is_planned=True)
        decision = self._decision(
            moment, job, layout, known, is_provisional=True, by_survivors=True
        )
        if decision.layout is None and self.config.rebalance_min_gain >= self.config.min_gain:
            # Once settled it would be asked the same again, and be harder to win over.
            known = replace(known, refused=(layout, moment.parts))
        elif decision.layout is not None:
            more = copied_bytes(layout, decision.layout, job)
            moved, phases = moved + more, (*phases, *self.costs.copying(more))
        return Answer(
            layout=decision.layout or layout,
            phases=phases,
            copied_bytes=moved,
            again_after_steps=again,
            memory=known,
            reason=f"survivors and newcomers regroup; {decision.reason}",
        )

    def _review(self, moment: Moment, job: JobModel, known: _Known, held: Layout) -> Answer:
        is_over = False
        if known.coming is not None and moment.step >= known.coming_step:
            slow = {r: s for r, s in known.coming.slow.items() if r in held.ranks}
            is_over = bool(known.slow) and not slow
            baseline = known.baseline if known.slow else held
            known = replace(known, slow=slow, baseline=baseline, coming=None, refused=None)
        if known.has_refused(held, moment.parts):
            return Answer(layout=held, memory=known, reason="nothing has changed")
        decision = self._decision(moment, job, held, known, is_provisional=is_over)
        again = known.again_after(moment.step, None)
        if decision.layout is None:
            known = replace(known, refused=(held, moment.parts))
            return Answer(
                layout=held, again_after_steps=again, memory=known, reason=decision.reason
            )
        if not known.slow:
            known = replace(known, baseline=None)
        moved = copied_bytes(held, decision.layout, job)
        return Answer(
            layout=decision.layout,
            phases=self.costs.copying(moved),
            copied_bytes=moved,
            again_after_steps=again,
            memory=known,
            reason=decision.reason,
        )

    def _decision(
        self,
        moment: Moment,
        job: JobModel,
        layout: Layout,
        known: _Known,
        *,
        is_provisional: bool,
        by_survivors: bool = False,
    ) -> Decision:
        """What the controller says of a view like a live one's. The probe that comes before costly
        plans is taken for read: it takes one step."""
        num_nodes = len(layout.ranks)
        workload = workload_of(job, moment.parts, num_nodes)
        settled = self.config.settle_steps
        view = PlanningSnapshot(
            layout=layout,
            shape=shape_of(job, num_nodes),
            model=model_of(job),
            workload=workload,
            slow={rank: slowdown for rank, slowdown in known.slow.items() if rank in layout.ranks},
            baseline=known.baseline,
            step_s=0.0,
            steps_since_plan=settled,
            is_provisional=is_provisional,
            by_survivors=by_survivors,
            num_load_steps=settled,
            next_generation=layout.generation + 1,
            rack_of=self._racks(layout.ranks),
            history=PlanHistory(losses=known.losses),
        )
        return decide(view, self._config(job, num_nodes))

    def _racks(self, ranks: Sequence[int]) -> dict[int, str]:
        size = self.nodes_per_rack
        return {rank: f"rack-{rank // size}" for rank in ranks} if size else {}

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
    known = dict(zip(("tokens", "expert_rows"), job.unit_s, strict=True))
    return CostModel(
        coefficients=np.array([known.get(name, 0.0) for name in FEATURES]),
        covariance=np.zeros((len(FEATURES), len(FEATURES))),
        sigma=0.0,
    )
