"""Which host computes how many rows of each expert in this step, from this step's counts. Pure.

All ranks know all counts and derive the same whole numbers, by integers only. The split is exact:
no other one has a smaller largest load_j / capacity_j (linear programme of research 4.2, here a
maximum flow, so whole tokens come out; a failed flow's cut names the ranks that must take more).
Rows stay on the rank they come from as far as that costs no balance.

Shape suffixes: W ranks of the group, E experts, P pairs of an expert and a host of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# At the start, though slow to import: in the first step the other ranks would wait for it, and
# take a rank on a busy node for frozen.
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

CAPACITY_UNIT = 1 << 20  # capacities become whole numbers: sums and ratios are then exact
MAX_ROUNDS = 64  # each proves a larger value by another set of ranks; a few are typical

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPairs:
    """The hosts of one layer's experts as pairs, ordered by expert, then rank position.

    `graph`: see `_Graph`, made once for a layout and used in every step.
    """

    expert_P: Ints
    host_P: Ints
    num_experts: int
    num_ranks: int
    graph: "_Graph"

    @classmethod
    def of(cls, hosts: Sequence[Sequence[int]], num_ranks: int) -> "HostPairs":
        """hosts[expert]: positions in the group. Raises ValueError for an expert without host."""
        for expert, on in enumerate(hosts):
            if not on or len(set(on)) != len(on) or not all(0 <= j < num_ranks for j in on):
                raise ValueError(f"expert {expert}: hosts {list(on)} of {num_ranks} ranks")
        expert_P = np.array([e for e, on in enumerate(hosts) for _ in on], dtype=np.int64)
        host_P = np.array([j for on in hosts for j in sorted(on)], dtype=np.int64)
        return cls(
            expert_P=expert_P,
            host_P=host_P,
            num_experts=len(hosts),
            num_ranks=num_ranks,
            graph=_Graph.of(expert_P, host_P, len(hosts), num_ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSplit:
    """rows_P of each pair; the largest load_j / capacity_j is at least load / capacity of
    `witness`: the experts that live only on those ranks leave no smaller one.
    """

    rows_P: Ints
    witness: tuple[int, ...]


def whole_capacities(speeds: Sequence[float]) -> Ints:
    """Speeds [W] as whole numbers in proportion. Raises ValueError for one not above 0."""
    fastest = max(speeds, default=0.0)
    if not speeds or not min(speeds) > 0.0 or not fastest < float("inf"):
        raise ValueError(f"speeds must be finite and above 0, got {list(speeds)}")
    scaled = [max(1, round(speed / fastest * CAPACITY_UNIT)) for speed in speeds]
    return np.array(scaled, dtype=np.int64)


def split_rows(pairs: HostPairs, counts_WE: Ints, capacity_W: Ints) -> TokenSplit:
    """The best whole rows of each pair. counts_WE: rows of each expert that each rank brings.

    The value is within one row a rank of the exact optimum over fractions.
    """
    rows_E: Ints = counts_WE.sum(axis=0)
    inside = _first_witness(pairs, rows_E, capacity_W)
    for _ in range(MAX_ROUNDS):
        limit_W = _limits(pairs, rows_E, capacity_W, inside)
        local_P = _local_rows(pairs, counts_WE, limit_W)
        rows_P, cut = pairs.graph.completed(local_P, rows_E, limit_W)
        if cut is None:
            return TokenSplit(rows_P=rows_P, witness=tuple(np.flatnonzero(inside).tolist()))
        inside = cut
    raise AssertionError("every round proves a larger value, over finitely many sets of ranks")


def _first_witness(pairs: HostPairs, rows_E: Ints, capacity_W: Ints) -> Flags:
    """All ranks, or the one rank whose own experts, held nowhere else, prove a larger value."""
    is_only_P = (np.bincount(pairs.expert_P) == 1)[pairs.expert_P]
    rows_W = np.zeros(pairs.num_ranks, dtype=np.int64)
    np.add.at(rows_W, pairs.host_P[is_only_P], rows_E[pairs.expert_P[is_only_P]])
    # Whole numbers, ties to the lowest: all ranks must see the same order.
    worst = max(range(pairs.num_ranks), key=lambda j: (int(rows_W[j]) << 32) // int(capacity_W[j]))
    if int(rows_W[worst]) * int(capacity_W.sum()) <= int(rows_E.sum()) * int(capacity_W[worst]):
        return np.ones(pairs.num_ranks, dtype=np.bool_)
    alone = np.zeros(pairs.num_ranks, dtype=np.bool_)
    alone[worst] = True
    return alone


def _limits(pairs: HostPairs, rows_E: Ints, capacity_W: Ints, inside: Flags) -> Ints:
    """Rows each rank may take: its capacity's part of what only ranks `inside` can compute."""
    is_free = np.zeros(pairs.num_experts, dtype=np.bool_)
    is_free[pairs.expert_P[~inside[pairs.host_P]]] = True
    rows, capacity = int(rows_E[~is_free].sum()), int(capacity_W[inside].sum())
    return -(-rows * capacity_W // capacity)


def _local_rows(pairs: HostPairs, counts_WE: Ints, limit_W: Ints) -> Ints:
    """[P] rows that stay where they come from, as far as the limits allow, first experts first."""
    own_P = counts_WE[pairs.host_P, pairs.expert_P]
    order = pairs.graph.by_host_P
    host, own = pairs.host_P[order], own_P[order]
    up_to = np.cumsum(own)
    begins = np.searchsorted(host, np.arange(pairs.num_ranks))
    before = np.concatenate([[0], up_to])[begins]  # rows of the ranks before
    within = np.minimum(up_to - before[host], limit_W[host])
    earlier = np.minimum(up_to - own - before[host], limit_W[host])
    local_P = np.empty_like(own_P)
    local_P[order] = within - earlier
    return local_P


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Graph:
    """source -> expert -> host -> sink, every edge with its way back, as sparse rows.

    The places of edges are fixed, a step only fills in capacities. The way back from a host to an
    expert has the rows placed beforehand, so that the flow can undo them.
    """

    indptr: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]
    place: Ints  # of edges: to experts [E], to hosts [P], to the sink [W], and their ways back
    expert_P: Ints
    host_P: Ints
    by_host_P: Ints  # pairs ordered by host, then expert

    @classmethod
    def of(cls, expert_P: Ints, host_P: Ints, num_experts: int, num_ranks: int) -> "_Graph":
        experts, ranks = np.arange(num_experts) + 1, np.arange(num_ranks) + 1 + num_experts
        sink = num_experts + num_ranks + 1
        forth = np.concatenate([0 * experts, experts[expert_P], ranks])
        there = np.concatenate([experts, ranks[host_P], 0 * ranks + sink])
        tail, head = np.concatenate([forth, there]), np.concatenate([there, forth])
        order = np.lexsort((head, tail))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return cls(
            indptr=np.searchsorted(tail[order], np.arange(sink + 2)).astype(np.int32),
            indices=head[order].astype(np.int32),
            place=place,
            expert_P=expert_P,
            host_P=host_P,
            by_host_P=np.lexsort((expert_P, host_P)),
        )

    def completed(self, placed_P: Ints, rows_E: Ints, limit_W: Ints) -> tuple[Ints, Flags | None]:
        """All rows of the experts on their hosts within the limits, from `placed_P` on; or, where
        that can not be, the ranks [W] whose limits leave rows over.
        """
        num_experts, num_pairs = len(rows_E), len(placed_P)
        left_E, room_W = rows_E.copy(), limit_W.copy()
        np.subtract.at(left_E, self.expert_P, placed_P)
        np.subtract.at(room_W, self.host_P, placed_P)
        forth_P = rows_E[self.expert_P] - placed_P
        capacity = np.empty(len(self.place), dtype=np.int32)
        capacity[self.place] = np.concatenate(
            [left_E, forth_P, room_W, 0 * left_E, placed_P, 0 * room_W]
        )
        size = len(self.indptr) - 1
        graph = csr_array((capacity, self.indices, self.indptr), shape=(size, size))
        result = maximum_flow(graph, 0, size - 1, method="dinic")
        flow = result.flow.data
        assert len(flow) == len(capacity), "every edge has its way back already"
        if result.flow_value == left_E.sum():
            return placed_P + flow[self.place[num_experts : num_experts + num_pairs]], None
        residual = csr_array(
            (capacity - flow, self.indices, self.indptr), shape=(size, size), copy=True
        )
        residual.eliminate_zeros()  # in place: not in our own arrays
        is_reached = np.zeros(size, dtype=np.bool_)
        is_reached[breadth_first_order(residual, 0, return_predecessors=False)] = True
        return placed_P, is_reached[1 + num_experts : -1]
