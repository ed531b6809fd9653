"""Certificate of an expert placement: bounds on balance, survival of node losses, replicas to copy.

Built by `planner.plan_experts`; the decision's reason and `pacekeeper plan` print it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.problem import Cluster, Floors
from pacekeeper.controller.planning.reliability import (
    CutSet,
    loss_probability,
    loss_with_racks,
    minimal_cut_sets,
    survival,
    survival_bound,
    union_bound,
)
from pacekeeper.controller.planning.token_split.min_max import MinMaxSplit, unique_rows
from pacekeeper.core.layout.layout import ReplicaSet


def lower_bound(
    loads: Sequence[float], speeds: Mapping[int, float], *, num_slots: int, min_hosts: Sequence[int]
) -> float:
    """Lower bound on the largest load_j / speed_j for any placement in `num_slots` slots.

    At value v an expert with load L needs the fastest ranks until their speeds add up to L / v, and
    at least `min_hosts` of them. The bound is the smallest v for which all experts fit the slots
    (found by bisection), at least the fluid limit. It may be unattainable.

    Args:
        loads: [experts] rows.
        speeds: relative speed by rank.
        num_slots: replicas of one layer.
        min_hosts: [experts] least number of replica ranks.
    """
    fastest = np.cumsum(sorted(speeds.values(), reverse=True))
    rows, floor = np.array(loads, dtype=np.float64), np.array(min_hosts)
    fluid = float(rows.sum() / fastest[-1])

    def fits(value: float) -> bool:
        needed = 1 + np.searchsorted(fastest, rows / value * (1.0 - 1e-9))
        return bool(np.maximum(np.where(rows > 0.0, needed, 0), floor).sum() <= num_slots)

    if fluid == 0.0 or fits(fluid):
        return fluid
    low, high = fluid, max(fluid, float(rows.max() / fastest[0]))
    while high > low * (1.0 + 1e-6):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


MAX_OVERLAPS = 32  # cut sets of which the probability of loss is exact

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProof:
    """Balance of one layer: largest load_j / speed_j in rows per unit of speed, and its bounds.

    Attributes:
        value: reached by the planned shares.
        replicas_bound: no shares over these replica ranks are lower.
        slots_bound: no replica ranks in so many slots, with these floors, are lower.
        fluid: all rows / all speeds; the lowest of all.
        bottleneck: ranks that attain `replicas_bound` (rows that only they can compute / their
            speed).
    """

    value: float
    replicas_bound: float
    slots_bound: float
    fluid: float
    bottleneck: tuple[int, ...]

    @property
    def gap(self) -> float:
        """Largest relative distance of the value from the best placement and shares."""
        return self.value / self.slots_bound - 1.0 if self.slots_bound > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Certificate of a placement.

    Attributes:
        layers: balance of each layer.
        survival: part of the losses of 0, 1, .. nodes that leaves every expert a replica.
        survival_bound: no placement in so many slots survives a larger part.
        loss_probability: that some expert loses all its nodes before the next plan.
        cut_sets: minimal sets of nodes whose loss takes all replicas of some expert.
        num_replicas: of all layers.
        num_copied: replicas that are not on their rank yet.
        reason: the chosen candidate and its price.
    """

    layers: tuple[LayerProof, ...]
    survival: tuple[float, ...]
    survival_bound: tuple[float, ...]
    loss_probability: float
    cut_sets: tuple[CutSet, ...]
    num_replicas: int
    num_copied: int
    reason: str

    @property
    def gap(self) -> float:
        """The largest gap of a layer."""
        return max(layer.gap for layer in self.layers)


def node_cut_sets(replicas: Flags, cluster: Cluster) -> tuple[CutSet, ...]:
    """The least sets of nodes that hold all replicas of some expert; replicas [.., ranks]."""
    flat = replicas.reshape(-1, replicas.shape[-1])
    on_ranks = flat[unique_rows(flat)[0]]
    nodes = np.array(cluster.nodes)
    return minimal_cut_sets(nodes[row.nonzero()[0]].tolist() for row in on_ranks)


def loss_of(replicas: Flags, cluster: Cluster) -> float:
    """The probability that an expert loses all its nodes; replicas [.., ranks].

    Where many cut sets overlap, a bound from above: their sum.
    """
    cut_sets, risk = node_cut_sets(replicas, cluster), cluster.node_failure
    if cluster.rack_failure:
        return loss_with_racks(cut_sets, risk, cluster.rack_of, cluster.rack_failure)
    num_nodes = len(frozenset[int]().union(*cut_sets))
    if len(cut_sets) > MAX_OVERLAPS and sum(map(len, cut_sets)) > num_nodes:
        return min(1.0, union_bound(cut_sets, risk))
    return loss_probability(cut_sets, risk)


def layer_proofs(
    loads: Array,
    even: MinMaxSplit,
    groups: Sequence[Sequence[int]],
    replicas: Flags,
    cluster: Cluster,
    floors: Floors,
) -> tuple[LayerProof, ...]:
    """loads [layers, experts], shares over groups of ranks, replicas [layers, experts, ranks].

    Where floors are no promise, the bounds are of as many replicas as an expert has, if fewer.
    """
    speeds = dict(enumerate(cluster.speeds))
    fluid = loads.sum(axis=1) / sum(cluster.speeds)
    number = replicas.sum(axis=2)
    floor = np.minimum(number, floors.replicas)
    num_slots = sum(min(slots, loads.shape[1]) for slots in cluster.slots)
    return tuple(
        LayerProof(
            value=float(even.value[layer]),
            replicas_bound=float(even.bound[layer]),
            slots_bound=lower_bound(
                rows.tolist(),
                speeds,
                num_slots=max(num_slots, int(number[layer].sum())),
                min_hosts=floor[layer].tolist(),
            ),
            fluid=float(fluid[layer]),
            bottleneck=tuple(sorted(r for g in even.inside[layer].nonzero()[0] for r in groups[g])),
        )
        for layer, rows in enumerate(loads)
    )


def prove(
    layers: tuple[LayerProof, ...],
    replicas: Flags,
    cluster: Cluster,
    *,
    max_losses: int,
    loss: float,
    reason: str,
    present: Flags | None = None,
) -> Proof:
    """Build the certificate.

    Args:
        layers: balance of each layer.
        replicas: [layers, experts, ranks] replica ranks.
        cluster: nodes and slots.
        max_losses: the largest number of lost nodes that survival is counted for.
        loss: probability that an expert loses all its nodes.
        reason: the chosen candidate, for people.
        present: [layers, experts, ranks] replicas already there; None: every replica is a copy.
    """
    names = sorted(set(cluster.nodes))
    place = {node: i for i, node in enumerate(names)}
    cut_sets = node_cut_sets(replicas, cluster)
    renamed = [frozenset(place[node] for node in cut_set) for cut_set in cut_sets]
    num_nodes, num_experts = len(names), replicas.shape[1]
    at_node = dict.fromkeys(names, 0)
    # Where floors are no promise, a rank may hold more than its slots: then as many count.
    held = np.maximum(cluster.slots, replicas.sum(axis=1).max(axis=0)).tolist()
    for node, slots in zip(cluster.nodes, held, strict=True):
        at_node[node] += min(slots, num_experts)
    rarest = min(sum(at_node.values()) // num_experts, num_nodes)
    largest = sorted(at_node.values(), reverse=True)
    survived = survival(renamed, num_nodes, max_losses=max_losses)
    num_copied = int((replicas if present is None else replicas & ~present).sum())
    return Proof(
        layers=layers,
        survival=survived,
        # Nor do those survive that leave fewer slots than experts.
        survival_bound=tuple(
            survival_bound(num_nodes, k, rarest)
            if sum(largest[: num_nodes - k]) >= num_experts
            else 0.0
            for k in range(len(survived))
        ),
        loss_probability=loss,
        cut_sets=cut_sets,
        num_replicas=int(replicas.sum()),
        num_copied=num_copied,
        reason=reason,
    )


def survival_by(
    replicas: Sequence[Sequence[ReplicaSet]], labels: Sequence[int], *, max_losses: int
) -> tuple[float, ...]:
    """The part of all losses of so many devices, nodes or racks that is survived.

    replicas[layer][expert]; labels [ranks]: those with the same one fail together.
    """
    place = {label: i for i, label in enumerate(sorted(set(labels)))}
    at = [place[label] for label in labels]
    cut_sets = minimal_cut_sets(
        frozenset(at[replica.rank] for replica in on) for layer in replicas for on in layer
    )
    return survival(cut_sets, len(place), max_losses=max_losses)
