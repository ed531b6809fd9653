"""Candidates for the hosts of all experts, each with its price in seconds. Pure.

A candidate is one structure or one circle over groups of ranks. What it costs at least is known
before its experts are assigned, so the search looks at the promising ones only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.arc_values import arc_values
from pacekeeper.controller.even_shares import EvenShares, even_shares
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
from pacekeeper.controller.survival import loss_probability, union_bound

EVEN = 5e-4  # a layer's value this far above the fluid counts as even
MAX_CIRCLE = 256  # groups: a larger circle takes too long, and its slots suffice for a structure
MAX_WORK = 1_500_000  # places of tables: a second or two
MAX_CIRCLES = 4  # group sizes tried
MAX_OVERLAPS = 32  # kill sets of which the probability of loss is exact

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
        """The probability that an expert loses all its nodes; hosts [.., ranks].

        Where many kill sets overlap, a bound from above: their sum.
        """
        killers, risk = node_kill_sets(hosts, self.cluster), self.cluster.node_failure
        num_nodes = len(frozenset[int]().union(*killers))
        if len(killers) > MAX_OVERLAPS and sum(map(len, killers)) > num_nodes:
            return min(1.0, union_bound(killers, risk))
        return loss_probability(killers, risk)

    def below_floors(self, hosts: Flags) -> Flags:
        """[..] which experts are on too few distinct nodes or racks; hosts [.., ranks]."""
        is_below = np.zeros(hosts.shape[:-1], dtype=np.bool_)
        for labels, floor in (
            (self.cluster.nodes, self.floors.nodes),
            (self.cluster.racks, self.floors.racks),
        ):
            kinds, at = np.unique(labels, return_inverse=True)
            if len(kinds) == len(at):
                is_below |= hosts.sum(axis=-1) < floor
                continue
            member = (np.arange(len(kinds)) == at[:, None]).astype(np.float32)
            is_below |= (hosts.astype(np.float32) @ member > 0.0).sum(axis=-1) < floor
        return is_below


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """Hosts [layers, experts, groups] over groups of ranks that hold the same experts.

    `value` [layers]: the best split's, with room for drift; `price_s` of waits, losses and
    `num_copies` beyond the present hosts.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    hosts: Flags
    value: Array
    loss: float
    price_s: float
    num_copies: int = 0
    even: EvenShares | None = None  # where known already

    def on_ranks(self) -> Flags:
        """[layers, experts, ranks]"""
        group_of = np.empty(sum(map(len, self.groups)), dtype=np.intp)
        for group, ranks in enumerate(self.groups):
            group_of[list(ranks)] = group
        return self.hosts[:, :, group_of]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """`least_s`: what its drafts cost at least; `work` to build them, in places of tables."""

    least_s: float
    work: int
    drafts: Callable[[], list[Draft]]


def cheapest(
    task: Task, best: Draft | None, *, saved_s: float, adapt: Callable[[Draft], Draft | None]
) -> Draft | None:
    """The cheapest of `best` and all drafts; the promising candidates first.

    Not built are those that can not be cheaper by `saved_s`, and once there is any, those that
    would exceed MAX_WORK. `adapt` changes a draft before it is judged, or rejects it.
    """
    work = 0
    for candidate in candidates(task):
        if best is not None and candidate.least_s + saved_s >= best.price_s:
            break
        if best is not None and 0 < work < work + candidate.work - MAX_WORK:
            continue
        work += candidate.work
        for draft in map(adapt, candidate.drafts()):
            if draft is not None and (best is None or draft.price_s < best.price_s):
                best = draft
    return best


def candidates(task: Task) -> list[Candidate]:
    """The promising first; of equals the quickest to build."""
    found = []
    for structure in structures(task.loads.shape[1], task.cluster, task.floors):
        plain = _structure_candidate(task, structure)
        found.append((plain.least_s, 0, plain))
        if task.cluster.num_ranks <= MAX_RANKS:
            loss = task.loss(structure.windows(task.cluster.num_ranks))
            swapped = Candidate(
                least_s=loss * task.prices.restart_s,
                work=plain.work,
                drafts=partial(_swapped_drafts, task, structure),
            )
            found.append((swapped.least_s, 1, swapped))
    for groups in _circles(task):
        circle_there = _circle_candidate(task, groups)
        found.append((circle_there.least_s, 2, circle_there))
    return [candidate for _, _, candidate in sorted(found, key=lambda entry: entry[:2])]


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
        work=len(task.loads) * (1 if structure.span == 1 else len(structure.groups)) ** 2,
        drafts=partial(_structure_drafts, task, structure),
    )


def _structure_drafts(task: Task, structure: Structure) -> list[Draft]:
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
    drafts = checked(task, name, structure.groups, arcs.hosts(len(structure.groups)), value)
    assert drafts, "the structure itself keeps the floors"
    return drafts


def _swapped_drafts(task: Task, structure: Structure) -> list[Draft]:
    """The structure with swaps in the layers where it is not even."""
    (plain,) = _structure_drafts(task, structure)
    if task.wait_s(plain.value) == 0.0:
        return []
    risk = task.cluster.node_failure
    hosts = with_swaps(
        plain.on_ranks(),
        task.loads,
        task.speeds,
        np.array([risk[node] for node in task.cluster.nodes]),
    )
    single = tuple((rank,) for rank in range(task.cluster.num_ranks))
    value = table_values(hosts, task.loads, task.speeds, task.drift)
    return checked(task, f"{plain.name}, swaps", single, hosts, value)


def checked(
    task: Task,
    name: str,
    groups: tuple[tuple[int, ...], ...],
    hosts: Flags,
    value: Array,
) -> list[Draft]:
    """The draft with its price; none where it breaks a floor."""
    draft = Draft(name=name, groups=groups, hosts=hosts, value=value, loss=0.0, price_s=0.0)
    kinds = np.unique(np.packbits(hosts.reshape(-1, hosts.shape[2]), axis=1), axis=0)
    distinct = np.unpackbits(kinds, axis=1, count=hosts.shape[2]).astype(np.bool_)
    on_ranks = replace(draft, hosts=distinct[None]).on_ranks()[0]
    if task.below_floors(on_ranks).any():
        return []
    loss = task.loss(on_ranks)
    price_s = task.wait_s(value) + loss * task.prices.restart_s
    return [replace(draft, loss=loss, price_s=price_s)]


def _circles(task: Task) -> list[tuple[tuple[int, ...], ...]]:
    """Circles of groups whose ranks hold the same experts, the fewest groups first.

    From as many groups on as leave a replica more than experts for each: rows can flow all around.
    """
    cluster, num_experts = task.cluster, task.loads.shape[1]
    slots = min(cluster.slots)
    fewest = max(-(-(num_experts - 1) // max(slots - 1, 1)), -(-num_experts // slots))
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
        work=len(task.loads) * len(groups) ** 2,
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
    return checked(task, f"circle of {len(groups)}", groups, arcs.hosts(len(groups)), value)


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
    return checked(task, "dealt", single, everywhere, value)
