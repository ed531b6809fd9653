"""Lazarus (arXiv 2407.04656), from its published rules (research 1.3, 1.4, 1.9).

Replicas in proportion to load with a floor (Eq. 1), maximum rank overlap, equal tokens for every
replica; plan columns go to the nodes that lack least of them (4.3); loads are planned for anew
every 200 steps (6.1); a restart only where an expert has no living copy.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.lazarus import Placement, maximum_rank_overlap, replica_counts
from pacekeeper.core.layout import Layout
from pacekeeper.simulator.job_model import Dispatch, JobModel, copied_bytes, with_hosts
from pacekeeper.simulator.policy_checkpoint import reconfigured
from pacekeeper.simulator.sim_policy import PUBLISHED, Answer, Cause, Costs, Moment, Use

Array = npt.NDArray[np.float64]


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
            return Answer(layout=moment.layout, reason="takes all nodes for equally fast")
        layout = placed(
            moment.nodes, moment.parts, job, min_replicas=self.min_replicas, layout=moment.layout
        )
        if moment.cause is not Cause.DUE or moment.layout is None or layout is None:
            return reconfigured(moment, layout, job, self.costs)
        moved = copied_bytes(moment.layout, layout, job, living=moment.nodes)
        return Answer(
            layout=layout,
            phases=((Use.RECONFIGURED, self.costs.copying_s(moved)),) if moved else (),
            copied_bytes=moved,
            reason="plans for the loads as they are",
        )


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
    plans = [overlap(loads, len(order), min_replicas, job) for loads in parts]
    column_of = _nearest_columns(plans, order, layout)
    return with_hosts(order, [_shares(plan, column_of, job.num_experts) for plan in plans])


def overlap(loads: Array, num_nodes: int, min_replicas: int, job: JobModel) -> Placement:
    """One layer's columns."""
    counts = replica_counts(
        loads.tolist(), num_slots=num_nodes * job.slots_per_node, min_replicas=min_replicas
    )
    return maximum_rank_overlap(counts, num_nodes=num_nodes, slots_per_node=job.slots_per_node)


def _nearest_columns(
    plans: Sequence[Placement], nodes: Sequence[int], layout: Layout | None
) -> dict[int, int]:
    """Node -> column of all layers' plans: in turn the one that lacks fewest experts (4.3)."""
    held: dict[int, list[set[int]]] = {node: [set() for _ in plans] for node in nodes}
    if layout is not None:
        for layer, experts in enumerate(layout.experts):
            for expert, hosts in enumerate(experts):
                for host in hosts:
                    if host.rank in held:
                        held[host.rank][layer].add(expert)
    free = list(range(len(nodes)))
    column_of = {}
    for node in nodes:

        def lacking(column: int, node: int = node) -> int:
            return sum(len(set(p[column]) - has) for p, has in zip(plans, held[node], strict=True))

        best = min(free, key=lambda column: (lacking(column), column))
        free.remove(best)
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
