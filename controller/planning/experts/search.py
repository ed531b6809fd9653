"""Candidates for the replicas of all experts, the promising ones first. Pure.

A candidate is one structure, one fill or one circle over groups of ranks. What it costs at least is
known before its experts are assigned, so most are never built.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pacekeeper.controller.planning.experts.bin_packing import greedy_fill, values_with_drift
from pacekeeper.controller.planning.experts.chained_declustering import (
    ChainedDeclustering,
    arcs_of,
    circle,
    classes_of,
    declusterings,
)
from pacekeeper.controller.planning.experts.objective import (
    CandidatePlacement,
    PlacementProblem,
    check_candidate,
)
from pacekeeper.controller.planning.experts.ring_arcs import arc_values, circle_arcs
from pacekeeper.controller.planning.experts.small_swaps import MAX_RANKS, table_values, with_swaps
from pacekeeper.controller.planning.token_split.min_max import min_max_split

MAX_CIRCLE = 256  # groups: a larger circle takes too long, and its slots suffice for a structure
MAX_WORK = 1_500_000  # places of tables: a second or two
MAX_CIRCLES = 4  # group sizes tried
FILL_WORK = 8  # places of tables that take as long as a group of a fill


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LazyCandidate:
    """`least_s`: what its drafts cost at least; `work` to build them, in places of tables."""

    least_s: float
    work: int
    drafts: Callable[[], list[CandidatePlacement]]


def cheapest_placement(
    task: PlacementProblem,
    best: CandidatePlacement | None,
    *,
    saved_s: float,
    adapt: Callable[[CandidatePlacement], CandidatePlacement | None],
) -> CandidatePlacement | None:
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


def candidates(task: PlacementProblem) -> list[LazyCandidate]:
    """The promising first; of equals the quickest to build."""
    found = []
    for order, generate in enumerate(GENERATORS):
        found += [(candidate.least_s, order, candidate) for candidate in generate(task)]
    return [candidate for _, _, candidate in sorted(found, key=lambda entry: entry[:2])]


def _structures(task: PlacementProblem) -> list[LazyCandidate]:
    found = declusterings(task.loads.shape[1], task.cluster, task.floors)
    return [_structure_candidate(task, structure) for structure in found]


def _swaps(task: PlacementProblem) -> list[LazyCandidate]:
    if task.cluster.num_ranks > MAX_RANKS:
        return []
    found = []
    for structure in declusterings(task.loads.shape[1], task.cluster, task.floors):
        plain = _structure_candidate(task, structure)
        loss = task.loss(structure.windows(task.cluster.num_ranks))
        found.append(
            LazyCandidate(
                least_s=loss * task.prices.restart_s,
                work=plain.work,
                drafts=partial(_swapped_drafts, task, structure),
            )
        )
    return found


def _fills(task: PlacementProblem) -> list[LazyCandidate]:
    return [_fill_candidate(task, groups) for groups in _fewest_groups(task)]


def _arcs(task: PlacementProblem) -> list[LazyCandidate]:
    return [_circle_candidate(task, groups) for groups in _circles(task)]


GENERATORS = (_structures, _swaps, _fills, _arcs)


def _structure_candidate(task: PlacementProblem, structure: ChainedDeclustering) -> LazyCandidate:
    loss = task.loss(structure.windows(task.cluster.num_ranks))
    by_load = -np.sort(-task.loads, axis=1)
    speeds = task.group_speeds(structure.groups)
    widest = np.sum([np.roll(speeds, -step) for step in range(structure.span)], axis=0).max()
    # The largest expert that is not wide has one window.
    left = by_load[:, structure.num_wide :]
    hottest = left[:, 0] / widest if left.shape[1] else np.zeros(len(left))
    return LazyCandidate(
        least_s=task.wait_s(hottest) + loss * task.prices.restart_s,
        work=len(task.loads) * (1 if structure.span == 1 else len(structure.groups)) ** 2,
        drafts=partial(_structure_drafts, task, structure),
    )


def _structure_drafts(
    task: PlacementProblem, structure: ChainedDeclustering
) -> list[CandidatePlacement]:
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
    drafts = check_candidate(
        task, name, structure.groups, arcs.replicas(len(structure.groups)), value
    )
    assert drafts, "the structure itself keeps the floors"
    return drafts


def _swapped_drafts(
    task: PlacementProblem, structure: ChainedDeclustering
) -> list[CandidatePlacement]:
    """The structure with swaps in the layers where it is not even."""
    (plain,) = _structure_drafts(task, structure)
    if task.wait_s(plain.value) == 0.0:
        return []
    risk = task.cluster.node_failure
    replicas = with_swaps(
        plain.on_ranks(),
        task.loads,
        task.speeds,
        np.array([risk[node] for node in task.cluster.nodes]),
        even=task.prices.even,
    )
    single = tuple((rank,) for rank in range(task.cluster.num_ranks))
    value = table_values(replicas, task.loads, task.speeds, task.drift)
    return check_candidate(task, f"{plain.name}, swaps", single, replicas, value)


def _fewest_groups(task: PlacementProblem) -> list[tuple[tuple[int, ...], ...]]:
    """Groups that can be filled evenly: as few as can be, and so many that they are of equal size.

    None where slots are so many that a structure does it.
    """
    slots, num_ranks = min(task.cluster.slots), task.cluster.num_ranks
    if slots < 2:
        return []
    fewest = -(-(task.loads.shape[1] - 1) // (slots - 1))
    if not 1 < fewest <= num_ranks:
        return []
    sizes = sorted({fewest, num_ranks // (num_ranks // fewest)})
    return [groups for groups in (circle(task.cluster, n) for n in sizes) if all(groups)]


def _fill_candidate(task: PlacementProblem, groups: tuple[tuple[int, ...], ...]) -> LazyCandidate:
    alone = np.zeros((len(groups), task.cluster.num_ranks), dtype=np.bool_)
    for group, ranks in enumerate(groups):
        alone[group, list(ranks)] = True
    return LazyCandidate(
        least_s=task.loss(alone) * task.prices.restart_s,
        work=FILL_WORK * len(task.loads) * len(groups),
        drafts=partial(_fill_drafts, task, groups),
    )


def _fill_drafts(
    task: PlacementProblem, groups: tuple[tuple[int, ...], ...]
) -> list[CandidatePlacement]:
    speeds = task.group_speeds(groups)
    slots = np.array([min(task.cluster.slots[rank] for rank in ranks) for ranks in groups])
    found = greedy_fill(task.loads, speeds, slots)
    if found is None:
        return []
    replicas, even = found
    value = values_with_drift(
        replicas,
        task.loads,
        speeds,
        even.value,
        num_ranks=task.cluster.num_ranks,
        drift=task.drift,
    )
    drafts = check_candidate(task, f"fill of {len(groups)}", groups, replicas, value)
    return [replace(draft, even=even) for draft in drafts]


def _circles(task: PlacementProblem) -> list[tuple[tuple[int, ...], ...]]:
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


def _circle_order(task: PlacementProblem) -> list[int]:
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


def _circle_candidate(task: PlacementProblem, groups: tuple[tuple[int, ...], ...]) -> LazyCandidate:
    alone = np.zeros((len(groups), task.cluster.num_ranks), dtype=np.bool_)
    for group, ranks in enumerate(groups):
        alone[group, list(ranks)] = True
    # As if every group had an expert of its own; with a floor above that, arcs are longer.
    num_nodes = min(len({task.cluster.nodes[r] for r in ranks}) for ranks in groups)
    num_ranks = min(map(len, groups))
    min_length = max(-(-task.floors.nodes // num_nodes), -(-task.floors.replicas // num_ranks))
    for step in range(1, min_length):
        alone = alone | np.roll(alone, -step, axis=0)
    return LazyCandidate(
        least_s=task.loss(alone) * task.prices.restart_s,
        work=len(task.loads) * len(groups) ** 2,
        drafts=partial(_circle_drafts, task, groups, min_length),
    )


def _circle_drafts(
    task: PlacementProblem, groups: tuple[tuple[int, ...], ...], min_length: int
) -> list[CandidatePlacement]:
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
    return check_candidate(
        task, f"circle of {len(groups)}", groups, arcs.replicas(len(groups)), value
    )


def round_robin(task: PlacementProblem) -> list[CandidatePlacement]:
    """Experts dealt out in turn, as often as the floor asks: fits wherever the floor of nodes can.

    Every rank takes the next so many of the sequence 0 .. experts - 1, repeated; no more than one
    round of it (of each node and rack: no more than keeps its floor), so none twice (McNaughton's
    rule).
    """
    cluster, num_experts = task.cluster, task.loads.shape[1]
    replicas = np.zeros((num_experts, cluster.num_ranks), dtype=np.bool_)
    floors = task.floors
    dealt_out, whole = 0, floors.replicas * num_experts
    left_in_rack = dict.fromkeys(cluster.racks, num_experts * (floors.replicas // floors.racks))
    left_in_node = dict.fromkeys(cluster.nodes, num_experts * (floors.replicas // floors.nodes))
    for rank in sorted(
        range(cluster.num_ranks), key=lambda r: (cluster.racks[r], cluster.nodes[r], r)
    ):
        node, rack = cluster.nodes[rank], cluster.racks[rank]
        slots = min(cluster.slots[rank], num_experts)
        taken = min(slots, left_in_node[node], left_in_rack[rack], whole - dealt_out)
        replicas[(dealt_out + np.arange(taken)) % num_experts, rank] = True
        dealt_out += taken
        left_in_node[node] -= taken
        left_in_rack[rack] -= taken
    if dealt_out < whole:
        return []
    everywhere = np.repeat(replicas[None], len(task.loads), axis=0)
    value = min_max_split(task.loads, everywhere, task.speeds).value
    single = tuple((rank,) for rank in range(cluster.num_ranks))
    return check_candidate(task, "dealt", single, everywhere, value)
