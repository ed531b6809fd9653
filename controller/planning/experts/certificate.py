"""What is proven of a placement of experts: balance, survival, moves. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.problem import Cluster, Floors
from pacekeeper.controller.planning.reliability import (
    KillSet,
    kill_sets,
    loss_probability,
    loss_with_racks,
    survival,
    survival_bound,
    union_bound,
)
from pacekeeper.controller.planning.token_split.min_max import EvenShares, numbered_rows
from pacekeeper.core.layout.layout import ReplicaSet


def least_value(
    loads: Sequence[float], speeds: Mapping[int, float], *, num_slots: int, min_hosts: Sequence[int]
) -> float:
    """No hosts in so many slots have a lower value (largest load_j / speed_j); it may be out of
    reach.

    The fluid; more where the slots do not suffice: at value v an expert needs so many of the
    fastest ranks that their speeds add up to load / v, and `min_hosts[expert]` at least.
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


MAX_OVERLAPS = 32  # kill sets of which the probability of loss is exact

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProof:
    """One layer's largest load_j / speed_j in rows per unit of speed, and what bounds it.

    `value` is reached by the shares given. `hosts_bound`: no shares over these hosts are lower;
    `witness` are the ranks that prove it (rows that only they can take / their speed).
    `slots_bound`: no hosts in so many slots, with these floors, are lower; `fluid`: all rows / all
    speeds, the least of all.
    """

    value: float
    hosts_bound: float
    slots_bound: float
    fluid: float
    witness: tuple[int, ...]

    @property
    def gap(self) -> float:
        """How far the value may be above the best hosts and shares, relative to them."""
        return self.value / self.slots_bound - 1.0 if self.slots_bound > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`survival` of all layers by number of lost nodes; `survival_bound`: no hosts in so many
    slots survive a larger part. `loss_probability`: that an expert loses all its nodes before the
    next plan, where nodes fail independently.
    """

    layers: tuple[LayerProof, ...]
    survival: tuple[float, ...]
    survival_bound: tuple[float, ...]
    loss_probability: float
    kill_sets: tuple[KillSet, ...]
    num_replicas: int
    num_copied: int
    reason: str

    @property
    def gap(self) -> float:
        """The largest gap of a layer."""
        return max(layer.gap for layer in self.layers)


def node_kill_sets(hosts: Flags, cluster: Cluster) -> tuple[KillSet, ...]:
    """The least sets of nodes that hold all replicas of some expert; hosts [.., ranks]."""
    flat = hosts.reshape(-1, hosts.shape[-1])
    on_ranks = flat[numbered_rows(flat)[0]]
    nodes = np.array(cluster.nodes)
    return kill_sets(nodes[row.nonzero()[0]].tolist() for row in on_ranks)


def loss_of(hosts: Flags, cluster: Cluster) -> float:
    """The probability that an expert loses all its nodes; hosts [.., ranks].

    Where many kill sets overlap, a bound from above: their sum.
    """
    killers, risk = node_kill_sets(hosts, cluster), cluster.node_failure
    if cluster.rack_failure:
        return loss_with_racks(killers, risk, cluster.rack_of, cluster.rack_failure)
    num_nodes = len(frozenset[int]().union(*killers))
    if len(killers) > MAX_OVERLAPS and sum(map(len, killers)) > num_nodes:
        return min(1.0, union_bound(killers, risk))
    return loss_probability(killers, risk)


def layer_proofs(
    loads: Array,
    even: EvenShares,
    groups: Sequence[Sequence[int]],
    hosts: Flags,
    cluster: Cluster,
    floors: Floors,
) -> tuple[LayerProof, ...]:
    """loads [layers, experts], shares over groups of ranks, hosts [layers, experts, ranks].

    Where floors are no promise, the bounds are of as many hosts as an expert has, if fewer.
    """
    speeds = dict(enumerate(cluster.speeds))
    fluid = loads.sum(axis=1) / sum(cluster.speeds)
    number = hosts.sum(axis=2)
    floor = np.minimum(number, floors.hosts)
    num_slots = sum(min(slots, loads.shape[1]) for slots in cluster.slots)
    return tuple(
        LayerProof(
            value=float(even.value[layer]),
            hosts_bound=float(even.bound[layer]),
            slots_bound=least_value(
                rows.tolist(),
                speeds,
                num_slots=max(num_slots, int(number[layer].sum())),
                min_hosts=floor[layer].tolist(),
            ),
            fluid=float(fluid[layer]),
            witness=tuple(sorted(r for g in even.inside[layer].nonzero()[0] for r in groups[g])),
        )
        for layer, rows in enumerate(loads)
    )


def prove(
    layers: tuple[LayerProof, ...],
    hosts: Flags,
    cluster: Cluster,
    *,
    max_losses: int,
    loss: float,
    reason: str,
    present: Flags | None = None,
) -> Proof:
    """hosts, present [layers, experts, ranks]; without `present` every replica is a copy."""
    names = sorted(set(cluster.nodes))
    place = {node: i for i, node in enumerate(names)}
    killers = node_kill_sets(hosts, cluster)
    renamed = [frozenset(place[node] for node in killer) for killer in killers]
    num_nodes, num_experts = len(names), hosts.shape[1]
    at_node = dict.fromkeys(names, 0)
    # Where floors are no promise, a rank may hold more than its slots: then as many count.
    held = np.maximum(cluster.slots, hosts.sum(axis=1).max(axis=0)).tolist()
    for node, slots in zip(cluster.nodes, held, strict=True):
        at_node[node] += min(slots, num_experts)
    rarest = min(sum(at_node.values()) // num_experts, num_nodes)
    largest = sorted(at_node.values(), reverse=True)
    survived = survival(renamed, num_nodes, max_losses=max_losses)
    num_copied = int((hosts if present is None else hosts & ~present).sum())
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
        kill_sets=killers,
        num_replicas=int(hosts.sum()),
        num_copied=num_copied,
        reason=reason,
    )


def survival_by(
    hosts: Sequence[Sequence[ReplicaSet]], labels: Sequence[int], *, max_losses: int
) -> tuple[float, ...]:
    """The part of all losses of so many devices, nodes or racks that is survived.

    hosts[layer][expert]; labels [ranks]: those with the same one fail together.
    """
    place = {label: i for i, label in enumerate(sorted(set(labels)))}
    at = [place[label] for label in labels]
    killers = kill_sets(frozenset(at[host.rank] for host in on) for layer in hosts for on in layer)
    return survival(killers, len(place), max_losses=max_losses)
