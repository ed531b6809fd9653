"""Which host computes how many rows of each expert in this step, from this step's counts. Pure.

All ranks know all counts and derive the same whole numbers, by integers only. The split is exact:
no other one has a smaller largest load_j / capacity_j (linear programme of research 4.2, here a
maximum flow, so whole tokens come out; a failed flow's cut names the ranks that must take more).
Rows stay on the rank they come from as far as that costs no balance.

Shape suffixes: W ranks of the group, E experts, P pairs of an expert and a host of it; C and F
those pairs and experts that leave a choice: the experts with several hosts.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

# At the start, though slow to import: in the first step the other ranks would wait for it, and
# take a rank on a busy node for frozen.
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


NARROW = 4  # hosts of an expert that tell who stands beside whom: more stand beside everybody


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArcLowerBound:
    """order_W: the ranks from place to place; key_E: the stretch that an expert's hosts need, as
    `first * W + last`; where their arc goes over the end of the row, W * W more than that of the
    stretch they leave free. none_S: True where a stretch would end before it begins.
    """

    order_W: Ints
    key_E: Ints
    none_S: Flags

    @classmethod
    def of(cls, hosts: Sequence[Sequence[int]], num_ranks: int) -> "ArcLowerBound":
        """hosts[expert]: positions in the group. Of two circles the one with shorter arcs."""
        order, (keys, _) = min(
            ((order, _arcs(hosts, order)) for order in (range(num_ranks), _walk(hosts, num_ranks))),
            key=lambda entry: entry[1][1],
        )
        return cls(
            order_W=np.array(order, dtype=np.int64),
            key_E=np.array(keys, dtype=np.int64),
            none_S=np.tri(num_ranks, k=-1, dtype=np.bool_),
        )

    def fullest(self, rows_E: Ints, capacity_W: Ints) -> Flags:
        """[W] the arc with most rows of experts that live only there, per its capacity.

        Sums are of whole numbers below 2^53 and quotients are rounded as IEEE 754 says, so that
        all ranks find the same one.
        """
        num = len(self.order_W)
        tables = np.bincount(self.key_E, rows_E, 2 * num * num).reshape(2, num, num)
        inside = tables[0, ::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
        # What lives outside a stretch: before it, after it, or over the end of the row.
        outside = tables[1].cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
        outside[1:] += inside[0, :-1, None]
        outside[:, :-1] += inside[1:, -1]
        up_to = np.concatenate([[0.0], np.cumsum(capacity_W[self.order_W])])
        capacity = up_to[1:] - up_to[:-1, None]
        capacity[self.none_S] = np.inf
        inside /= capacity
        rest = up_to[-1] - capacity
        rest[0, -1] = np.inf  # outside all ranks
        outside /= rest
        whole = float(rows_E.sum() / up_to[-1])
        best_in, best_out = int(inside.argmax()), int(outside.argmax())
        in_full, out_full = float(inside.flat[best_in]), float(outside.flat[best_out])
        if whole >= max(in_full, out_full):
            return np.ones(num, dtype=np.bool_)
        is_outside = out_full > in_full
        first, last = divmod(best_out if is_outside else best_in, num)
        result = np.full(num, is_outside)
        result[self.order_W[first : last + 1]] = not is_outside
        return result


def _arcs(hosts: Sequence[Sequence[int]], order: Sequence[int]) -> tuple[list[int], int]:
    """The key of each expert's shortest arc, and the length of all arcs together."""
    num = len(order)
    place = {rank: at for at, rank in enumerate(order)}
    keys, length = [], 0
    for on in hosts:
        at = sorted(place[rank] for rank in on)
        gaps = [(later - here - 1, here + 1) for here, later in pairwise(at)]
        widest, free = max(gaps, default=(0, 0))
        if widest > num - 1 - at[-1] + at[0]:
            keys.append(num * num + free * num + free + widest - 1)
            length += num - widest
        else:
            keys.append(at[0] * num + at[-1])
            length += at[-1] - at[0] + 1
    return keys, length


def _walk(hosts: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Ranks from an end (one with fewest neighbours) on, always to who shares most experts."""
    shared: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    for on in hosts:
        if len(on) <= NARROW:
            for one, other in combinations(on, 2):
                shared[one][other] = shared[one].get(other, 0) + 1
                shared[other][one] = shared[other].get(one, 0) + 1
    left = dict.fromkeys(sorted(range(num_ranks), key=lambda rank: (len(shared[rank]), rank)))
    row: list[int] = []
    while left:
        beside = shared[row[-1]] if row else {}
        next_ones = [rank for rank in beside if rank in left]
        rank = min(next_ones, key=lambda r: (-beside[r], r)) if next_ones else next(iter(left))
        del left[rank]
        row.append(rank)
    return row


CAPACITY_UNIT = 1 << 20  # capacities become whole numbers: sums and ratios are then exact
MAX_ROUNDS = 64  # each proves a larger value by another set of ranks; a few are typical


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaIndex:
    """The hosts of one layer's experts as pairs, ordered by expert, then rank position.

    `choice`, `row`: made once for a layout and used in every step.
    """

    expert_P: Ints
    host_P: Ints
    first_E: Ints  # where each expert's pairs begin
    num_experts: int
    num_ranks: int
    choice: "_Choice"
    row: ArcLowerBound

    @classmethod
    def of(cls, hosts: Sequence[Sequence[int]], num_ranks: int) -> "ReplicaIndex":
        """hosts[expert]: positions in the group. Raises ValueError for an expert without host."""
        for expert, on in enumerate(hosts):
            if not on or len(set(on)) != len(on) or not all(0 <= j < num_ranks for j in on):
                raise ValueError(f"expert {expert}: hosts {list(on)} of {num_ranks} ranks")
        expert_P = np.array([e for e, on in enumerate(hosts) for _ in on], dtype=np.int64)
        host_P = np.array([j for on in hosts for j in sorted(on)], dtype=np.int64)
        return cls(
            expert_P=expert_P,
            host_P=host_P,
            first_E=np.flatnonzero(np.diff(expert_P, prepend=-1)),
            num_experts=len(hosts),
            num_ranks=num_ranks,
            choice=_Choice.of(expert_P, host_P, num_ranks),
            row=ArcLowerBound.of(hosts, num_ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSplit:
    """rows_P of each pair; the largest load_j / capacity_j is at least load / capacity of
    `witness`: the experts that live only on those ranks leave no smaller one.
    """

    rows_P: Ints
    bottleneck: tuple[int, ...]


def whole_capacities(speeds: Sequence[float]) -> Ints:
    """Speeds [W] as whole numbers in proportion. Raises ValueError for one not above 0."""
    fastest = max(speeds, default=0.0)
    if not speeds or not min(speeds) > 0.0 or not fastest < float("inf"):
        raise ValueError(f"speeds must be finite and above 0, got {list(speeds)}")
    scaled = [max(1, round(speed / fastest * CAPACITY_UNIT)) for speed in speeds]
    return np.array(scaled, dtype=np.int64)


def balance_rows(pairs: ReplicaIndex, counts_WE: Ints, capacity_W: Ints) -> TokenSplit:
    """The best whole rows of each pair. counts_WE: rows of each expert that each rank brings.

    The value is within one row a rank of the exact optimum over fractions.
    """
    choice = pairs.choice
    rows_E: Ints = counts_WE.sum(axis=0)
    own_C = counts_WE[choice.host_C, choice.expert_C]
    fixed_W = choice.fixed_rows(pairs, rows_E)
    inside = pairs.row.fullest(rows_E, capacity_W)
    for _ in range(MAX_ROUNDS):
        # Never below 0: no rank's own experts, held nowhere else, are denser than the witness.
        room_W = _limits(pairs, rows_E, capacity_W, inside) - fixed_W
        rows_C, cut = choice.completed(choice.local_rows(own_C, room_W), rows_E, room_W)
        if cut is None:
            rows_P = rows_E[pairs.expert_P]
            rows_P[choice.pair_C] = rows_C
            return TokenSplit(rows_P=rows_P, bottleneck=tuple(np.flatnonzero(inside).tolist()))
        inside = cut
    raise AssertionError("every round proves a larger value, over finitely many sets of ranks")


def _limits(pairs: ReplicaIndex, rows_E: Ints, capacity_W: Ints, inside: Flags) -> Ints:
    """Rows each rank may take: its capacity's part of what only ranks `inside` can compute."""
    is_free: Flags = np.logical_or.reduceat(~inside[pairs.host_P], pairs.first_E)
    rows, capacity = int(rows_E[~is_free].sum()), int(capacity_W[inside].sum())
    return -(-rows * capacity_W // capacity)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """source -> expert -> host -> sink for the experts with several hosts: the rows of the others
    lie fixed, and a graph without them is a part of the size where slots are scarce.

    `graph`: sparse rows, every edge with its way back; the places of edges are fixed, a step only
    fills in capacities (into a shallow copy: checks of a new one take longer than the flow). The
    way back from a host to an expert has the rows placed beforehand, so that the flow can undo
    them.
    """

    pair_C: Ints
    expert_C: Ints
    number_C: Ints  # of the expert among those with a choice
    host_C: Ints
    by_host_C: Ints  # ordered by host, then expert
    begins_W: Ints  # where each host's begin there
    expert_F: Ints
    only_O: Ints  # the other pairs
    graph: csr_array
    place: Ints  # of edges: to experts [F], to hosts [C], to the sink [W], and their ways back

    @classmethod
    def of(cls, expert_P: Ints, host_P: Ints, num_ranks: int) -> "_Choice":
        has_choice_P = (np.bincount(expert_P) > 1)[expert_P]
        expert_C, host_C = expert_P[has_choice_P], host_P[has_choice_P]
        by_host_C = np.lexsort((expert_C, host_C))
        expert_F, number_C = np.unique(expert_C, return_inverse=True)
        experts, ranks = np.arange(len(expert_F)) + 1, np.arange(num_ranks) + 1 + len(expert_F)
        sink = len(expert_F) + num_ranks + 1
        forth = np.concatenate([0 * experts, experts[number_C], ranks])
        there = np.concatenate([experts, ranks[host_C], 0 * ranks + sink])
        tail, head = np.concatenate([forth, there]), np.concatenate([there, forth])
        order = np.lexsort((head, tail))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        indptr = np.searchsorted(tail[order], np.arange(sink + 2)).astype(np.int32)
        indices, nothing = head[order].astype(np.int32), np.zeros(len(order), dtype=np.int32)
        return cls(
            pair_C=np.flatnonzero(has_choice_P),
            expert_C=expert_C,
            number_C=number_C,
            host_C=host_C,
            by_host_C=by_host_C,
            begins_W=np.searchsorted(host_C[by_host_C], np.arange(num_ranks)),
            expert_F=expert_F,
            only_O=np.flatnonzero(~has_choice_P),
            graph=csr_array((nothing, indices, indptr), shape=(sink + 1, sink + 1)),
            place=place,
        )

    def fixed_rows(self, pairs: ReplicaIndex, rows_E: Ints) -> Ints:
        """[W] rows of the experts that a rank alone holds."""
        fixed_W = np.zeros(pairs.num_ranks, dtype=np.int64)
        np.add.at(fixed_W, pairs.host_P[self.only_O], rows_E[pairs.expert_P[self.only_O]])
        return fixed_W

    def local_rows(self, own_C: Ints, room_W: Ints) -> Ints:
        """[C] of the rows that hosts bring themselves, those that stay there: as far as there is
        room, first experts first.
        """
        host, own = self.host_C[self.by_host_C], own_C[self.by_host_C]
        up_to = np.cumsum(own)
        before = np.concatenate([[0], up_to])[self.begins_W]  # rows of the ranks before
        within = np.minimum(up_to - before[host], room_W[host])
        earlier = np.minimum(up_to - own - before[host], room_W[host])
        local_C = np.empty_like(own_C)
        local_C[self.by_host_C] = within - earlier
        return local_C

    def completed(self, placed_C: Ints, rows_E: Ints, room_W: Ints) -> tuple[Ints, Flags | None]:
        """All rows of the experts on their hosts within the room, from `placed_C` on; or, where
        that can not be, the ranks [W] whose room leaves rows over.
        """
        num_experts, num_pairs = len(self.expert_F), len(placed_C)
        left_F, left_W = rows_E[self.expert_F], room_W.copy()
        np.subtract.at(left_F, self.number_C, placed_C)
        np.subtract.at(left_W, self.host_C, placed_C)
        forth_C = rows_E[self.expert_C] - placed_C
        capacity = np.empty(len(self.place), dtype=np.int32)
        capacity[self.place] = np.concatenate(
            [left_F, forth_C, left_W, 0 * left_F, placed_C, 0 * left_W]
        )
        graph, size = copy(self.graph), self.graph.shape[0]
        graph.data = capacity
        result = maximum_flow(graph, 0, size - 1, method="dinic")
        flow = result.flow.data
        assert len(flow) == len(capacity), "every edge has its way back already"
        if result.flow_value == left_F.sum():
            return placed_C + flow[self.place[num_experts : num_experts + num_pairs]], None
        is_open = capacity > flow
        before = np.concatenate([[0], np.cumsum(is_open)]).astype(np.int32)
        residual = csr_array(
            (capacity[is_open], graph.indices[is_open], before[graph.indptr]), shape=(size, size)
        )
        is_reached = np.zeros(size, dtype=np.bool_)
        is_reached[breadth_first_order(residual, 0, return_predecessors=False)] = True
        return placed_C, is_reached[1 + num_experts : -1]
