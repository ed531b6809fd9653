"""Candidates for the hosts of all experts, each with its price in seconds. Pure.

A candidate is one structure or one circle over groups of ranks. What it costs at least is known
before its experts are assigned, so the search looks at the promising ones only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.arc_values import arc_values
from pacekeeper.controller.even_shares import even_shares
from pacekeeper.controller.expert_arcs import circle_arcs
from pacekeeper.controller.expert_cluster import Cluster, Floors, Prices
from pacekeeper.controller.expert_proof import node_kill_sets
from pacekeeper.controller.expert_structures import (
    Structure,
    arcs_of,
    circle,
    classes_of,
    structures,
)
from pacekeeper.controller.host_swaps import MAX_RANKS, table_values, with_swaps
from pacekeeper.controller.survival import loss_probability

EVEN = 5e-4  # a layer's value this far above the fluid counts as even
MAX_CIRCLE = 256  # groups: a larger circle takes too long, and its slots suffice for a structure
MAX_CIRCLES = 4  # group sizes tried

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """loads [layers, experts] in rows, and all else that a candidate is judged by."""

    loads: Array
    cluster: Cluster
    floors: Floors
    prices: Prices
    drift: float

    @property
    def speeds(self) -> Array:
        return np.array(self.cluster.speeds)

    @property
    def fluid(self) -> Array:
        """[layers]"""
        rows: Array = self.loads.sum(axis=1) / self.speeds.sum()
        return rows

    def group_speeds(self, groups: tuple[tuple[int, ...], ...]) -> Array:
        speeds = self.speeds
        return np.array([speeds[list(ranks)].sum() for ranks in groups])

    def wait_s(self, value: Array) -> float:
        """What the layers' values [layers] cost above even load, until the next plan."""
        above = float(np.maximum(value - (1.0 + EVEN) * self.fluid, 0.0).sum())
        whole = float(self.fluid.sum())
        return above / whole * self.prices.step_s * self.prices.num_steps if above > 0.0 else 0.0

    def loss(self, hosts: Flags) -> float:
        """The probability that an expert loses all its nodes; hosts [.., ranks]."""
        return loss_probability(node_kill_sets(hosts, self.cluster), self.cluster.node_failure)

    def keeps_floors(self, hosts: Flags) -> bool:
        """Is every expert on enough distinct nodes and racks? hosts [.., ranks]."""
        for labels, floor in (
            (self.cluster.nodes, self.floors.nodes),
            (self.cluster.racks, self.floors.racks),
        ):
            kinds, at = np.unique(labels, return_inverse=True)
            member = (np.arange(len(kinds)) == at[:, None]).astype(np.float32)
            if ((hosts.astype(np.float32) @ member > 0.0).sum(axis=-1) < floor).any():
                return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """Hosts [layers, experts, groups] over groups of ranks that hold the same experts.

    `value` [layers]: the best split's, with room for drift; `price_s` of waits and losses.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    hosts: Flags
    value: Array
    loss: float
    price_s: float

    def on_ranks(self) -> Flags:
        """[layers, experts, ranks]"""
        group_of = np.empty(sum(map(len, self.groups)), dtype=np.intp)
        for group, ranks in enumerate(self.groups):
            group_of[list(ranks)] = group
        return self.hosts[:, :, group_of]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """`least_s`: what its drafts cost at least."""

    least_s: float
    drafts: Callable[[], list[Draft]]


def candidates(task: Task) -> list[Candidate]:
    """The promising first."""
    found = [
        _structure_candidate(task, structure)
        for structure in structures(task.loads.shape[1], task.cluster, task.floors)
    ]
    found += [_circle_candidate(task, groups) for groups in _circles(task)]
    return sorted(found, key=lambda candidate: candidate.least_s)


def _structure_candidate(task: Task, structure: Structure) -> Candidate:
    loss = task.loss(structure.windows(task.cluster.num_ranks))
    by_load = -np.sort(-task.loads, axis=1)
    speeds = task.group_speeds(structure.groups)
    widest = np.sum([np.roll(speeds, -step) for step in range(structure.span)], axis=0).max()
    # The largest expert that is not wide has one window.
    left = by_load[:, structure.num_wide :]
    hottest = left[:, 0] / widest if left.shape[1] else np.zeros(len(left))
    return Candidate(
        least_s=task.wait_s(hottest) + loss * task.prices.restart_s,
        drafts=partial(_structure_drafts, task, structure),
    )


def _structure_drafts(task: Task, structure: Structure) -> list[Draft]:
    """The structure; where some layer is not even and ranks are few, also with swaps."""
    speeds = task.group_speeds(structure.groups)
    arcs = arcs_of(classes_of(task.loads, structure, task.speeds), structure)
    value = arc_values(
        arcs,
        task.loads,
        speeds,
        num_ranks=task.cluster.num_ranks,
        drift=task.drift,
        longest=1 if structure.span == 1 else None,
    )
    name = f"{structure.num_wide} wide, {len(structure.groups)} groups, span {structure.span}"
    drafts = _checked(task, name, structure.groups, arcs.hosts(len(structure.groups)), value)
    assert drafts, "the structure itself keeps the floors"
    if task.cluster.num_ranks > MAX_RANKS or task.wait_s(value) == 0.0:
        return drafts
    risk = task.cluster.node_failure
    hosts = with_swaps(
        drafts[0].on_ranks(),
        task.loads,
        task.speeds,
        np.array([risk[node] for node in task.cluster.nodes]),
    )
    single = tuple((rank,) for rank in range(task.cluster.num_ranks))
    value = table_values(hosts, task.loads, task.speeds, task.drift)
    return drafts + _checked(task, f"{name}, swaps", single, hosts, value)


def _checked(
    task: Task,
    name: str,
    groups: tuple[tuple[int, ...], ...],
    hosts: Flags,
    value: Array,
) -> list[Draft]:
    """The draft with its price; none where it breaks a floor."""
    draft = Draft(name=name, groups=groups, hosts=hosts, value=value, loss=0.0, price_s=0.0)
    on_ranks = draft.on_ranks()
    if not task.keeps_floors(on_ranks):
        return []
    loss = task.loss(on_ranks)
    price_s = task.wait_s(value) + loss * task.prices.restart_s
    return [Draft(name=name, groups=groups, hosts=hosts, value=value, loss=loss, price_s=price_s)]


def _circles(task: Task) -> list[tuple[tuple[int, ...], ...]]:
    """Circles of groups whose ranks hold the same experts, the fewest groups first."""
    cluster, num_experts = task.cluster, task.loads.shape[1]
    fewest = -(-num_experts // min(cluster.slots))
    most = min(cluster.num_ranks, MAX_CIRCLE)
    sizes = [n for n in range(fewest, most + 1) if cluster.num_ranks // n > 1]
    if len(sizes) > MAX_CIRCLES:
        sizes = sorted({sizes[round(i)] for i in np.linspace(0, len(sizes) - 1, MAX_CIRCLES)})
    found = [groups for groups in (circle(cluster, n) for n in sizes) if all(groups)]
    if cluster.num_ranks <= MAX_CIRCLE:
        found.append(tuple((rank,) for rank in _circle_order(task)))
    return found


def _circle_order(task: Task) -> list[int]:
    """Ranks of one node side by side; where experts need several nodes, one of each node in turn.
    Racks take turns in the same way.
    """
    cluster = task.cluster
    turn, seen = [], dict[int, int]()
    for node in cluster.nodes:
        turn.append(seen.get(node, 0))
        seen[node] = turn[-1] + 1
    if task.floors.nodes == 1:
        return sorted(range(cluster.num_ranks), key=lambda r: (cluster.nodes[r], r))
    in_rack: dict[int, list[int]] = {}
    for node, rack in sorted(set(zip(cluster.nodes, cluster.racks, strict=True))):
        in_rack.setdefault(rack, []).append(node)
    place = {node: (i, rack) for rack, nodes in in_rack.items() for i, node in enumerate(nodes)}
    return sorted(range(cluster.num_ranks), key=lambda r: (turn[r], place[cluster.nodes[r]], r))


def _circle_candidate(task: Task, groups: tuple[tuple[int, ...], ...]) -> Candidate:
    alone = np.zeros((len(groups), task.cluster.num_ranks), dtype=np.bool_)
    for group, ranks in enumerate(groups):
        alone[group, list(ranks)] = True
    # As if every group had an expert of its own; with a floor above that, arcs are longer.
    num_nodes = min(len({task.cluster.nodes[r] for r in ranks}) for ranks in groups)
    min_length = -(-task.floors.nodes // num_nodes)
    for step in range(1, min_length):
        alone = alone | np.roll(alone, -step, axis=0)
    return Candidate(
        least_s=task.loss(alone) * task.prices.restart_s,
        drafts=partial(_circle_drafts, task, groups, min_length),
    )


def _circle_drafts(task: Task, groups: tuple[tuple[int, ...], ...], min_length: int) -> list[Draft]:
    slots = np.array([min(task.cluster.slots[rank] for rank in ranks) for ranks in groups])
    found = circle_arcs(
        task.loads,
        task.group_speeds(groups),
        slots,
        min_length=min_length,
        drift=task.drift,
        num_ranks=task.cluster.num_ranks,
    )
    if found is None:
        return []
    arcs, value = found
    return _checked(task, f"circle of {len(groups)}", groups, arcs.hosts(len(groups)), value)


def dealt(task: Task) -> list[Draft]:
    """Experts dealt out in turn, as often as the floor asks: fits wherever the floor of nodes can.

    Every node takes the next so many of the sequence 0 .. experts - 1, repeated; no more than one
    round of it (of each rack: no more than keeps its floor), so none twice (McNaughton's rule).
    """
    cluster, num_experts = task.cluster, task.loads.shape[1]
    hosts = np.zeros((num_experts, cluster.num_ranks), dtype=np.bool_)
    dealt_out, whole = 0, task.floors.nodes * num_experts
    left_in_rack = dict.fromkeys(
        cluster.racks, num_experts * (task.floors.nodes // task.floors.racks)
    )
    left_in_node = dict.fromkeys(cluster.nodes, num_experts)
    for rank in sorted(
        range(cluster.num_ranks), key=lambda r: (cluster.racks[r], cluster.nodes[r], r)
    ):
        node, rack = cluster.nodes[rank], cluster.racks[rank]
        room = (cluster.slots[rank], left_in_node[node], left_in_rack[rack], whole - dealt_out)
        taken = min(room)
        hosts[(dealt_out + np.arange(taken)) % num_experts, rank] = True
        dealt_out += taken
        left_in_node[node] -= taken
        left_in_rack[rack] -= taken
    if dealt_out < whole:
        return []
    everywhere = np.repeat(hosts[None], len(task.loads), axis=0)
    value = even_shares(task.loads, everywhere, task.speeds).value
    single = tuple((rank,) for rank in range(cluster.num_ranks))
    return _checked(task, "dealt", single, everywhere, value)
