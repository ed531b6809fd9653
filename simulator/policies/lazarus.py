"""Lazarus (arXiv 2407.04656), from its published rules (research 1.3, 1.4, 1.9).

Replicas in proportion to load with a floor (Eq. 1), maximum rank overlap, equal tokens for every
replica; plan columns go to the nodes that lack least of them (4.3); loads are planned for anew
every 200 steps (6.1); a restart only where an expert has no living copy.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pacekeeper.core.layout.layout import Layout
from pacekeeper.simulator.baselines.lazarus import Placement, maximum_rank_overlap, replica_counts
from pacekeeper.simulator.jobs.data_parallel import Dispatch, JobModel, copied_bytes, with_replicas
from pacekeeper.simulator.policies.base import PUBLISHED, Answer, Cause, Costs, Moment
from pacekeeper.simulator.policies.checkpoint_restart import reconfigured

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Planned:
    """Its last plan, and the loads [layers, experts] it is for."""

    layout: Layout | None
    parts: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazarus:
    """`min_replicas`: its f, 2 in its evaluation. One order of nodes serves all layers: the paper
    plans layers one by one and does not say, and any other order loses experts sooner (1.5).

    Planning anew costs the transfers alone: with new groups too its 200-step period would cost
    more than the 10 % of the time that its break-down (6.4) leaves for both together.
    """

    name: str = "lazarus"
    min_replicas: int = 2
    checkpoint_steps: int | None = 250
    review_steps: int | None = 200
    costs: Costs = PUBLISHED
    dispatch: Dispatch = Dispatch.BY_SHARES

    def answer(self, moment: Moment, job: JobModel) -> Answer:
        if moment.cause is Cause.PACED:
            return Answer(
                layout=moment.layout,
                memory=moment.memory,
                reason="takes all nodes for equally fast",
            )
        if moment.cause is Cause.DUE and _has_planned(moment):
            return Answer(layout=moment.layout, memory=moment.memory, reason="nothing has changed")
        layout = placed(
            moment.nodes, moment.parts, job, min_replicas=self.min_replicas, layout=moment.layout
        )
        if moment.cause is not Cause.DUE or moment.layout is None or layout is None:
            answer = reconfigured(moment, layout, job, self.costs, is_planned=True)
            return replace(answer, memory=_Planned(layout=layout, parts=moment.parts))
        moved = copied_bytes(moment.layout, layout, job)
        return Answer(
            layout=layout,
            phases=self.costs.copying(moved),
            copied_bytes=moved,
            memory=_Planned(layout=layout, parts=moment.parts),
            reason="plans for the loads as they are",
        )


def _has_planned(moment: Moment) -> bool:
    """Is the layout in force its plan for just these loads?"""
    last = moment.memory
    if not isinstance(last, _Planned) or last.layout is not moment.layout:
        return False
    return np.array_equal(last.parts, moment.parts)


def placed(
    nodes: Collection[int],
    parts: Array,
    job: JobModel,
    *,
    min_replicas: int,
    layout: Layout | None = None,
) -> Layout | None:
    """The plan for loads [layers, experts], near to `layout`; None: too few slots for the model."""
    order = sorted(nodes)
    if not order or not job.has_room(len(order)):
        return None
    known: dict[bytes, Placement] = {}  # layers of the same loads have the same plan
    for loads in parts:
        if loads.tobytes() not in known:
            known[loads.tobytes()] = overlap(loads, len(order), min_replicas, job)
    plans = [known[loads.tobytes()] for loads in parts]
    column_of = _nearest_columns(plans, order, layout, job.num_experts)
    return with_replicas(order, [_shares(plan, column_of, job.num_experts) for plan in plans])


def overlap(loads: Array, num_nodes: int, min_replicas: int, job: JobModel) -> Placement:
    """One layer's columns."""
    counts = replica_counts(
        loads.tolist(), num_slots=num_nodes * job.slots_per_node, min_replicas=min_replicas
    )
    return maximum_rank_overlap(counts, num_nodes=num_nodes, slots_per_node=job.slots_per_node)


def _nearest_columns(
    plans: Sequence[Placement], nodes: Sequence[int], layout: Layout | None, num_experts: int
) -> dict[int, int]:
    """Node -> column of all layers' plans: in turn the one that lacks fewest experts (4.3)."""
    place = {node: at for at, node in enumerate(nodes)}
    wanted = np.zeros((len(nodes), len(plans), num_experts))
    lacks = np.ones((len(nodes), len(plans), num_experts))
    for layer, plan in enumerate(plans):
        for column, experts in enumerate(plan):
            wanted[column, layer, list(experts)] = 1.0
    if layout is not None:
        for layer, of_layer in enumerate(layout.experts):
            for expert, hosts in enumerate(of_layer):
                lacks[[place[h.rank] for h in hosts if h.rank in place], layer, expert] = 0.0
    lacking = np.einsum("nle,cle->nc", lacks, wanted, optimize=True)
    column_of = {}
    for node, at in place.items():
        best = int(lacking[at].argmin())  # of several the first
        lacking[:, best] = np.inf
        column_of[node] = best
    return column_of


def _shares(plan: Placement, column_of: dict[int, int], num_experts: int) -> list[dict[int, float]]:
    """Of every expert node -> share: equal for each replica, of which a node may have several."""
    number = [sum(column.count(expert) for column in plan) for expert in range(num_experts)]
    shares: list[dict[int, float]] = [{} for _ in range(num_experts)]
    for node, column in column_of.items():
        for expert in set(plan[column]):
            shares[expert][node] = plan[column].count(expert) / number[expert]
    return shares
