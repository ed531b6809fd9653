"""Who sends how many rows to whom, once it is known who computes how many. Pure.

Nearest first: rows stay on their own rank, then on its node, then go anywhere. Within each of
these, rows that are left and room that is left are laid side by side in rank order; where two
stretches overlap, that many rows travel. Sender and receiver reach the same numbers by themselves.

Shape suffixes: W ranks of the group, E experts, P pairs of an expert and a host of it, Q those of
the pairs whose host this rank is, N nodes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.trainer.toy.parallel.token_balancing import Ints, ReplicaIndex


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """What one rank sends and receives: sent_P rows to each pair, and received_WQ rows from each
    rank for each expert it holds, ascending.
    """

    sent_P: Ints
    received_WQ: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Neighbourhood:
    """Ranks that may exchange rows in one pass: those with the same number in node_W.

    `order_W`, `start_W`: ranks node by node, and where each one's node begins there; `order_P`,
    `start_P`: the same of pairs, expert by expert.
    """

    node_W: Ints
    order_W: Ints
    start_W: Ints
    order_P: Ints
    start_P: Ints

    @classmethod
    def of(cls, pairs: ReplicaIndex, nodes: Sequence[Hashable]) -> "Neighbourhood":
        """nodes [W]: any names. Raises ValueError for another number of ranks."""
        if len(nodes) != pairs.num_ranks:
            raise ValueError(f"{len(nodes)} nodes for {pairs.num_ranks} ranks")
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        node_W = np.array([numbers[node] for node in nodes], dtype=np.int64)
        order_W = np.argsort(node_W, kind="stable")
        num_nodes = len(numbers)
        key_P = pairs.expert_P * num_nodes + node_W[pairs.host_P]
        order_P = np.argsort(key_P, kind="stable")
        return cls(
            node_W=node_W,
            order_W=order_W,
            start_W=np.searchsorted(node_W[order_W], node_W[order_W]),
            order_P=order_P,
            start_P=np.searchsorted(key_P[order_P], key_P[order_P]),
        )


def neighbourhoods(pairs: ReplicaIndex, nodes: Sequence[Hashable]) -> tuple[Neighbourhood, ...]:
    """The passes after the own rank: the node (where that is less than all), then all ranks."""
    everyone = Neighbourhood.of(pairs, [0] * pairs.num_ranks)
    if len(set(nodes)) in (1, pairs.num_ranks):
        return (everyone,)
    return (Neighbourhood.of(pairs, nodes), everyone)


def exchange(
    pairs: ReplicaIndex,
    counts_WE: Ints,
    rows_P: Ints,
    own: int,
    passes: Sequence[Neighbourhood],
) -> Exchange:
    """Seen from rank position `own`; `passes` end with one of all ranks (`neighbourhoods`)."""
    at_host_P = counts_WE[pairs.host_P, pairs.expert_P]
    local_P = np.minimum(rows_P, at_host_P)
    left_WE, room_P = counts_WE.copy(), rows_P - local_P
    left_WE[pairs.host_P, pairs.expert_P] -= local_P
    mine = np.flatnonzero(pairs.host_P == own)
    sent_P = np.where(pairs.host_P == own, local_P, 0)
    received_WQ = np.zeros((pairs.num_ranks, len(mine)), dtype=np.int64)
    received_WQ[own] = local_P[mine]
    for near in passes:
        begin_WE, end_WE, begin_P, end_P = _stretches(pairs, near, left_WE, room_P)
        is_near_W = near.node_W == near.node_W[own]
        from_own = np.minimum(end_WE[own, pairs.expert_P], end_P)
        from_own -= np.maximum(begin_WE[own, pairs.expert_P], begin_P)
        sent_P += np.maximum(np.where(is_near_W[pairs.host_P], from_own, 0), 0)
        expert_Q = pairs.expert_P[mine]
        to_own = np.minimum(end_WE[:, expert_Q], end_P[mine])
        to_own -= np.maximum(begin_WE[:, expert_Q], begin_P[mine])
        received_WQ += np.maximum(np.where(is_near_W[:, None], to_own, 0), 0)
        left_WE -= end_WE - begin_WE
        room_P -= end_P - begin_P
    assert not left_WE.any() and not room_P.any(), "rows of all pairs are all rows"
    return Exchange(sent_P=sent_P, received_WQ=received_WQ)


def _stretches(
    pairs: ReplicaIndex, near: Neighbourhood, left_WE: Ints, room_P: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Begin and end of what each rank brings [W, E] and each pair takes [P], by expert and node,
    cut off where either side has no more.
    """
    sorted_WE = left_WE[near.order_W]
    before = np.cumsum(sorted_WE, axis=0) - sorted_WE
    begin_WE, begin_P = np.empty_like(left_WE), np.empty_like(room_P)
    begin_WE[near.order_W] = before - before[near.start_W]
    sorted_P = room_P[near.order_P]
    before = np.cumsum(sorted_P) - sorted_P
    begin_P[near.order_P] = before - before[near.start_P]
    first_N = np.unique(near.start_W)  # a node has at least one rank
    brought_NE = np.add.reduceat(sorted_WE, first_N, axis=0)
    node_P = near.node_W[pairs.host_P]
    key_P, size = node_P * pairs.num_experts + pairs.expert_P, brought_NE.size
    taken_NE = np.bincount(key_P, room_P, size).astype(np.int64).reshape(brought_NE.shape)
    matched_NE = np.minimum(brought_NE, taken_NE)
    limit_WE, limit_P = matched_NE[near.node_W], matched_NE[node_P, pairs.expert_P]
    return (
        np.minimum(begin_WE, limit_WE),
        np.minimum(begin_WE + left_WE, limit_WE),
        np.minimum(begin_P, limit_P),
        np.minimum(begin_P + room_P, limit_P),
    )
