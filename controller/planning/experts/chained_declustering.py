"""Host structures that survive much: a few wide experts, the others in windows of a circle. Pure.

Ranks stand in a circle of groups. `num_wide` experts are on every rank; each other expert belongs
to one of as many classes as groups, and the replicas of class g are on groups g .. g + span - 1. So
one structure serves all layers: only which expert is in which class differs, and the cut sets of
all layers are the same few windows. Span 1: disjoint segments, as maximum rank overlap without a
cut last group; span G - 1: every group lacks one class.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.problem import Cluster, Floors
from pacekeeper.controller.planning.experts.ring_arcs import Arcs

MAX_SWAPS = 200  # of experts between two classes, in one layer
MAX_PAIRS = 40  # of experts in one class: beyond, trades of one for one are many enough
NEAR = 5e-4  # of the fluid: classes that agree so well are even
LEAST_RISK = 1e-30  # none is taken for less likely to fail

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Classes = npt.NDArray[np.intp]  # [layers, experts]: the class, -1 where wide


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainedDeclustering:
    """`groups`: positions of ranks; class g holds at most `class_size` experts of a layer."""

    num_wide: int
    span: int
    class_size: int
    groups: tuple[tuple[int, ...], ...]

    def windows(self, num_ranks: int) -> Flags:
        """[classes + 1, ranks]: who holds each class; the last row is the wide experts'."""
        member = np.zeros((len(self.groups), num_ranks), dtype=np.bool_)
        for group, ranks in enumerate(self.groups):
            member[group, list(ranks)] = True
        replicas = member.copy()
        for step in range(1, self.span):
            replicas |= np.roll(member, -step, axis=0)
        return np.vstack([replicas, np.ones((1, num_ranks), dtype=np.bool_)])


def declusterings(num_experts: int, cluster: Cluster, floors: Floors) -> list[ChainedDeclustering]:
    """All that fit the slots and the floors, the fewest classes for each span and number of wide.

    Ranks with more slots than the least leave them free here.
    """
    slots, num_ranks = min(cluster.slots), cluster.num_ranks
    if num_experts <= slots:
        whole = (tuple(range(num_ranks)),)
        everywhere = ChainedDeclustering(num_wide=num_experts, span=1, class_size=0, groups=whole)
        return [everywhere] if _keeps(everywhere, cluster, floors) else []
    result = []
    circles: dict[int, tuple[tuple[int, ...], ...]] = {}
    for num_wide in range(slots):
        for span in range(1, slots - num_wide + 1):
            size = (slots - num_wide) // span
            num_groups = -(-(num_experts - num_wide) // size)
            if not span < num_groups <= num_ranks:
                continue
            if num_groups not in circles:
                circles[num_groups] = circle(cluster, num_groups)
            groups = circles[num_groups]
            if not all(groups):
                continue  # nodes of unequal size
            # Even windows survive most; uneven ones have a larger one, for experts that need it.
            for order in dict.fromkeys((groups, tuple(sorted(groups, key=len, reverse=True)))):
                found = ChainedDeclustering(
                    num_wide=num_wide, span=span, class_size=size, groups=order
                )
                if _keeps(found, cluster, floors):
                    result.append(found)
    return result


def _keeps(structure: ChainedDeclustering, cluster: Cluster, floors: Floors) -> bool:
    nodes, racks = np.array(cluster.nodes), np.array(cluster.racks)
    windows = structure.windows(cluster.num_ranks)
    return all(
        int(on.sum()) >= floors.replicas
        and len(np.unique(nodes[on])) >= floors.nodes
        and len(np.unique(racks[on])) >= floors.racks
        for on in windows
    )


def circle(cluster: Cluster, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Groups of near-equal size, each over as many nodes and racks as can be.

    Nodes with several ranks come in blocks: the groups of one block share all its nodes, so that
    they count as one cut set. Suspect nodes are dealt out first, and one to a block.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(cluster.nodes):
        ranks_of.setdefault(node, []).append(rank)
    rack_of = cluster.rack_of
    speed_of = {n: sum(cluster.speeds[r] for r in ranks) for n, ranks in ranks_of.items()}
    per_node = min(map(len, ranks_of.values()))
    num_blocks = max(1, min(len(ranks_of), -(-num_groups // per_node)))
    risk = cluster.node_failure
    nodes = sorted(ranks_of, key=lambda n: (-risk[n], speed_of[n], n))
    blocks = _deal(nodes, [rack_of[n] for n in nodes], [risk[n] for n in nodes], num_blocks)
    groups: list[tuple[int, ...]] = []
    for block, members in enumerate(blocks):
        share = (block + 1) * num_groups // num_blocks - block * num_groups // num_blocks
        ranks = [rank for node in members for rank in ranks_of[node]]
        ranks.sort(key=lambda r: (cluster.speeds[r], r))
        at = [cluster.nodes[r] for r in ranks]
        odds = [cluster.failure_probability[r] for r in ranks]
        groups += [tuple(sorted(group)) for group in _deal(ranks, at, odds, share)]
    return tuple(groups)


def _deal(
    things: Sequence[int], labels: Sequence[Hashable], risks: Sequence[float], num_bins: int
) -> list[list[int]]:
    """Things into bins of near-equal size, those of one label apart, all bins as safe as can be.

    A bin is lost when all its things are: the next one goes where that is likeliest, so that who is
    suspect gets the company (research 4.4).
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    number: list[dict[Hashable, int]] = [{} for _ in range(num_bins)]
    safety = [0.0] * num_bins  # -log of the likelihood that all its things are lost
    if len(set(labels)) == len(things) and len(set(risks)) < 2:  # all alike
        return _in_turn([list(things[at::num_bins]) for at in range(num_bins)])
    size = -(-len(things) // num_bins)
    left_large = len(things) - (size - 1) * num_bins
    for thing, label, p in zip(things, labels, risks, strict=True):
        limit = size if left_large > 0 else size - 1
        at = min(
            (b for b in range(num_bins) if len(bins[b]) < limit),
            key=lambda b: (number[b].get(label, 0), safety[b], len(bins[b]), b),
        )
        bins[at].append(thing)
        left_large -= len(bins[at]) == size
        number[at][label] = number[at].get(label, 0) + 1
        safety[at] -= log(max(p, LEAST_RISK))
    return _in_turn(bins)


def _in_turn(bins: list[list[int]]) -> list[list[int]]:
    """Large and small ones in turn, so that all windows of as many bins are of near-equal size.

    The smallest window decides how many losses are survived.
    """
    large, small = max(map(len, bins)), min(map(len, bins))
    if large == small:
        return bins
    is_large = [len(held) > small for held in bins]
    num, total = len(bins), sum(is_large)
    rest = {
        kind: [b for b, at in zip(bins, is_large, strict=True) if at == kind] for kind in (0, 1)
    }
    turns = [(at + 1) * total // num - at * total // num for at in range(num)]
    return [rest[turn].pop(0) for turn in turns]


def classes_of(loads: Array, structure: ChainedDeclustering, speeds: Array) -> Classes:
    """Which class each expert of each layer joins; loads [layers, experts] in rows.

    The hottest are wide; the others go, largest first, to the class with least load per speed
    that has room, and then trade places while that makes the worse of two classes better.
    """
    windows = structure.windows(len(speeds))[:-1].astype(np.float64)
    # A rank in several windows serves each of them with a part of its speed.
    capacity = windows @ (speeds / np.maximum(windows.sum(axis=0), 1.0))
    by_load = np.argsort(-loads, axis=1, kind="stable")
    result = np.full(loads.shape, -1, dtype=np.intp)
    for layer, rows in enumerate(loads):
        experts = by_load[layer, structure.num_wide :]
        if len(experts):
            result[layer, experts] = _even_classes(rows[experts], capacity, structure.class_size)
    return result


def arcs_of(classes: Classes, structure: ChainedDeclustering) -> Arcs:
    """The replicas as arcs of the circle of groups."""
    return Arcs(
        first=np.maximum(classes, 0),
        length=np.where(classes < 0, len(structure.groups), structure.span),
    )


def _even_classes(rows: Array, capacity: Array, size: int) -> npt.NDArray[np.intp]:
    """rows [experts], largest first; capacity [classes]; at most `size` experts in each class."""
    load, count = [0.0] * len(capacity), [0] * len(capacity)
    speed = capacity.tolist()
    at = np.zeros(len(rows), dtype=np.intp)
    heap = [(0.0, 0, place) for place in range(len(speed))]
    for expert, own in enumerate(rows.tolist()):
        # The lightest is the best up to differences in speed, which the trades below repair.
        best = heap[0][2]
        at[expert] = best
        load[best] += own
        count[best] += 1
        if count[best] < size:
            heapq.heapreplace(heap, (load[best] / speed[best], count[best], best))
        else:
            heapq.heappop(heap)
    loads = np.array(load)
    near = NEAR * float(rows.sum() / capacity.sum())
    for _ in range(MAX_SWAPS):
        if not _swap(rows, capacity, at, loads, near):
            break
    return at


def _swap(rows: Array, capacity: Array, at: npt.NDArray[np.intp], load: Array, near: float) -> bool:
    """The trade between the highest class and another that leaves the lower height of both.

    One expert for one, or two for two where the classes are small.
    """
    height = load / capacity
    high = int(height.argmax())
    own = (at == high).nonzero()[0]
    best, change = float(height[high]) - near, None
    for low in np.argsort(height, kind="stable").tolist():
        if low == high or height[high] - height[low] <= near:
            break
        others = (at == low).nonzero()[0]
        for mine, theirs in _trades(own, others):
            given = rows[mine].sum(axis=1)[:, None] - rows[theirs].sum(axis=1)
            worse = np.maximum(
                (load[high] - given) / capacity[high], (load[low] + given) / capacity[low]
            )
            place = int(worse.argmin())
            i, k = divmod(place, worse.shape[1])
            if worse[i, k] < best:
                best, change = float(worse[i, k]), (low, mine[i], theirs[k], float(given[i, k]))
        if change is not None:
            break
    if change is None:
        return False
    low, mine_moved, theirs_moved, amount = change
    at[mine_moved], at[theirs_moved] = low, high
    load[high] -= amount
    load[low] += amount
    return True


def _trades(
    own: npt.NDArray[np.intp], others: npt.NDArray[np.intp]
) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    trades = [(own[:, None], others[:, None])]
    pairs = [_pairs(own), _pairs(others)]
    if all(0 < len(p) <= MAX_PAIRS for p in pairs):
        trades.append((pairs[0], pairs[1]))
    return trades


def _pairs(experts: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    first, second = np.triu_indices(len(experts), k=1)
    return np.stack([experts[first], experts[second]], axis=1)
