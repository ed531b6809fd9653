"""Placement of expert replicas by the joint planner, with its proof as text. Pure.

Stages are planned one by one, since an expert stays on the ranks that run its layer. Called by
`candidates.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.certificate import loss_of
from pacekeeper.controller.planning.experts.planner import (
    ExpertPlan,
    NoPlacement,
    PresentPlacement,
    plan_experts,
)
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices
from pacekeeper.controller.planning.reliability import minimal_cut_sets, survival
from pacekeeper.controller.planning.token_split.linear_program import Split
from pacekeeper.controller.policy.failure_domains import SpreadFloor, fatal_domains
from pacekeeper.core.layout.layout import ExpertReplica, Layout, ReplicaSet
from pacekeeper.core.layout.replica_spread import DomainOf, domains_of_ranks, number_domains

MAX_LOSSES = 3  # of nodes at once, in the proof

Flags = npt.NDArray[np.bool_]


DOUBTED_TIMES = 10.0  # failure probability of a rank on a node that was slow repeatedly, to others'


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRequest:
    """Constraints and prices of a placement.

    Attributes:
        slots_per_rank: Replicas that a rank can hold per stage.
        min_hosts: Replica ranks of each expert; one that has fewer keeps them where no placement
            is better.
        spread: Over how many nodes and racks an expert's replicas must be spread.
        row_s: Seconds per row on the fullest rank of a layer.
        replica_s: Seconds per step that a replica costs its rank.
        num_steps: Steps until the next plan.
        move_s: Seconds per copy of a replica.
        restart_s: Seconds that the loss of an expert costs.
        failure_probability: Of each rank until the next plan.
        rack_failure_probability: Of each rack until the next plan, where racks are known.
        max_copies: Copies of replicas allowed; None: any number.
        doubted: Ranks that fail `DOUBTED_TIMES` as likely as others.
    """

    slots_per_rank: int
    min_hosts: int
    spread: SpreadFloor
    row_s: float
    replica_s: float
    num_steps: int
    move_s: float
    restart_s: float
    failure_probability: float
    rack_failure_probability: float = 0.0
    max_copies: int | None = None
    doubted: frozenset[int] = frozenset()

    def failure_of(self, rank: int) -> float:
        """Return the probability that this rank fails until the next plan."""
        times = DOUBTED_TIMES if rank in self.doubted else 1.0
        return min(1.0, times * self.failure_probability)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """A placement of all experts.

    Attributes:
        experts: experts[layer][expert], as in a layout.
        loss: Probability that some expert loses all its nodes until the next plan.
        loss_now: The same under the present placement.
        proof: Balance, survival and their bounds, for operators.
    """

    experts: tuple[tuple[ReplicaSet, ...], ...]
    loss: float
    loss_now: float
    proof: str


def plan_replicas(
    layout: Layout,
    splits: Sequence[Split],
    loads: Sequence[Sequence[float]],
    speeds: Mapping[int, float],
    request: ReplicaRequest,
) -> ReplicaPlan | None:
    """Return the cheapest placement of experts, starting from the present one.

    Args:
        layout: The present layout.
        splits: The best shares over the present replica ranks; layers that do not change keep them.
        loads: loads[layer][expert] in rows.
        speeds: The speed of each rank.
        request: Constraints and prices.

    Returns:
        The placement; None: every expert stays on its ranks.

    Raises:
        ValueError: A load or speed is not a valid number.
    """
    experts = [split.replicas for split in splits]
    node = number_domains(request.spread.domain_of, layout.ranks)
    rack_of = request.spread.rack_of
    rack = number_domains(rack_of, layout.ranks) if rack_of else node
    rack_failure = request.rack_failure_probability if rack_of else 0.0
    parts: list[tuple[tuple[int, ...], ExpertPlan]] = []
    losses, losses_now, num_copied = 0.0, 0.0, 0
    for ranks, layers in _alike_layers(layout):
        at = {rank: position for position, rank in enumerate(ranks)}
        present = [
            [[at[replica.rank] for replica in on] for on in layout.experts[i]] for i in layers
        ]
        cluster = Cluster(
            speeds=tuple(speeds[rank] for rank in ranks),
            slots=(max(1, request.slots_per_rank),) * len(ranks),
            failure_probability=tuple(request.failure_of(rank) for rank in ranks),
            nodes=tuple(node[rank] for rank in ranks),
            racks=tuple(rack[rank] for rank in ranks),
            rack_failure={rack[rank]: rack_failure for rank in ranks} if rack_failure else {},
        )
        loss_now = loss_of(_flags(present, len(ranks)), cluster)
        losses_now += loss_now
        plan = _planned([loads[i] for i in layers], cluster, present, request, num_copied)
        if plan is None:
            losses += loss_now
            continue
        losses += plan.proof.loss_probability
        num_copied += plan.proof.num_copied
        parts.append((layers, plan))
        for layer, planned in zip(layers, plan.replicas, strict=True):
            replicas = tuple(
                tuple(ExpertReplica(ranks[h.rank], h.share) for h in on) for on in planned
            )
            if _ranks(replicas) != _ranks(layout.experts[layer]):
                experts[layer] = _with_left(replicas, layout.experts[layer], request)
    if num_copied == 0:
        return None
    return ReplicaPlan(
        experts=tuple(experts),
        loss=min(1.0, losses),
        loss_now=min(1.0, losses_now),
        proof=_in_words(parts, len(set(node.values())), num_copied) + _of_racks(experts, rack_of),
    )


def _with_left(
    planned: tuple[ReplicaSet, ...],
    present: tuple[ReplicaSet, ...],
    request: ReplicaRequest,
) -> tuple[ReplicaSet, ...]:
    """Keep present replicas without a share where a slot is free, which saves copies back later.

    Replicas of an expert in too few failure domains are not kept: the spread rule requires more
    domains for more replicas.
    """
    held: dict[int, int] = {}
    for on in planned:
        for replica in on:
            held[replica.rank] = held.get(replica.rank, 0) + 1
    result = []
    for now, then in zip(planned, present, strict=True):
        kept = {replica.rank for replica in now}
        left = [replica.rank for replica in then if replica.rank not in kept]
        if not left or any(
            len(domains_of_ranks(domain_of, kept)) < least
            for least, domain_of in request.spread.levels
        ):
            result.append(now)
            continue
        stays = []
        for rank in left:
            if held.get(rank, 0) < request.slots_per_rank:
                stays.append(ExpertReplica(rank, 0.0))
                held[rank] = held.get(rank, 0) + 1
        result.append(tuple(sorted((*now, *stays))))
    return tuple(result)


def _planned(
    loads: Sequence[Sequence[float]],
    cluster: Cluster,
    present: list[list[list[int]]],
    request: ReplicaRequest,
    num_copied: int,
) -> ExpertPlan | None:
    racks = min(request.spread.least_racks, len(set(cluster.racks)))
    nodes = max(racks, min(request.spread.least, len(set(cluster.nodes))))
    rows = sum(map(sum, loads)) / sum(cluster.speeds)
    left = None if request.max_copies is None else request.max_copies - num_copied
    try:
        return plan_experts(
            loads,
            cluster,
            floors=Floors(
                ranks=min(max(request.min_hosts, nodes), cluster.num_ranks),
                nodes=nodes,
                racks=racks,
                is_strict=False,
            ),
            prices=Prices(
                step_s=request.row_s * rows,
                num_steps=request.num_steps,
                restart_s=request.restart_s,
                move_s=request.move_s,
                # Replicas are spread evenly: one more makes each rank a little slower.
                hold_s=request.replica_s * request.num_steps / cluster.num_ranks,
            ),
            present=PresentPlacement(present, left),
            max_losses=MAX_LOSSES,
        )
    except NoPlacement:
        return None  # the budget of copies is too small for any change


def _alike_layers(layout: Layout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (ranks, layers) to plan together: of one stage, with the same number of experts."""
    found = []
    for span in layout.spans:
        by_number: dict[int, list[int]] = {}
        for layer in span:
            by_number.setdefault(len(layout.experts[layer]), []).append(layer)
        ranks = layout.ranks_of_layer(span.start)
        found += [(ranks, tuple(layers)) for number, layers in by_number.items() if number]
    return found


def _ranks(experts: Sequence[ReplicaSet]) -> list[list[int]]:
    return [[replica.rank for replica in on] for on in experts]


def _flags(present: list[list[list[int]]], num_ranks: int) -> Flags:
    flags = np.zeros((len(present), len(present[0]), num_ranks), dtype=np.bool_)
    for layer, experts in enumerate(present):
        for expert, on in enumerate(experts):
            flags[layer, expert, on] = True
    return flags


def _of_racks(experts: Sequence[Sequence[ReplicaSet]], rack_of: DomainOf) -> str:
    """Describe how many racks hold all replicas of some expert."""
    if not rack_of:
        return ""
    lost = len(fatal_domains(experts, rack_of))
    number = len(set(rack_of.values()))
    return f"; the loss of {lost or 'none'} of {number} racks would lose an expert"


def _in_words(
    parts: Sequence[tuple[tuple[int, ...], ExpertPlan]], num_nodes: int, num_copied: int
) -> str:
    """Describe balance and its bound, survival and its bound, and the copies."""
    worst, layer = max(
        ((proof, layers[i]) for layers, plan in parts for i, proof in enumerate(plan.proof.layers)),
        key=lambda entry: entry[0].gap,
    )
    proofs = [plan.proof for _, plan in parts]
    lived = proofs[0].survival
    if len(proofs) > 1:  # stages fail together
        cut_sets = minimal_cut_sets(cut_set for proof in proofs for cut_set in proof.cut_sets)
        lived = survival(cut_sets, num_nodes, max_losses=MAX_LOSSES)
    bounds = [min(each) for each in zip(*(proof.survival_bound for proof in proofs), strict=False)]
    survived = ", ".join(
        f"{part:.1%} of losses of {lost} (at most {bounds[lost]:.1%})"
        for lost, part in enumerate(lived)
        if 0 < lost < len(bounds)
    )
    return (
        f"proven: layer {layer} has the largest gap, {worst.value:.0f} rows on its fullest rank"
        f" where no placement in these slots has less than {worst.slots_bound:.0f} (gap"
        f" {worst.gap:.2%}); survives {survived} nodes; {num_copied} replicas are copied"
    )
