"""Which rank takes the place of which in a new plan, so that few replicas are copied. Pure.

A plan's ranks that are alike - equal speed, slots and risk - may change places without changing
what is proven of it. All layers move together, or their kill sets would part (research 1.5, 4.6):
one assignment of nodes to nodes, and in each of ranks to ranks, that keeps most replicas in place.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.problem import Cluster

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def nearest_ranks(hosts: Flags, present: Flags, cluster: Cluster) -> npt.NDArray[np.intp]:
    """[ranks] for each rank of `hosts` the one that takes its place. Both [layers, experts, ranks].

    Nodes change places within their rack, or anywhere where every rack is one node.
    """
    from scipy.optimize import linear_sum_assignment  # not at start-up

    num = cluster.num_ranks
    stays = np.matmul(
        hosts.reshape(-1, num).T.astype(np.float32), present.reshape(-1, num).astype(np.float32)
    ).astype(np.float64)
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(cluster.nodes):
        ranks_of.setdefault(node, []).append(rank)
    result = np.arange(num)
    for nodes in _alike(ranks_of, cluster):
        gain = np.zeros((len(nodes), len(nodes)))
        within: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for i, node in enumerate(nodes):
            for k, other in enumerate(nodes):
                old, new = _paired(ranks_of[node], ranks_of[other], stays, cluster)
                within[i, k] = old, new
                gain[i, k] = stays[old, new].sum()
        for i, k in zip(*linear_sum_assignment(gain, maximize=True), strict=True):
            old, new = within[int(i), int(k)]
            result[old] = new
    return result


def _kind(rank: int, cluster: Cluster) -> tuple[float, int, float]:
    return cluster.speeds[rank], cluster.slots[rank], cluster.failure_probability[rank]


def _alike(ranks_of: dict[int, list[int]], cluster: Cluster) -> list[list[int]]:
    """Nodes in groups that may change places."""
    has_racks = len(set(cluster.racks)) < len(ranks_of)
    groups: dict[object, list[int]] = {}
    for node, ranks in ranks_of.items():
        kinds = tuple(sorted(_kind(rank, cluster) for rank in ranks))
        rack = cluster.racks[ranks[0]]
        where = (rack if has_racks else None, cluster.rack_failure.get(rack, 0.0))
        groups.setdefault((where, kinds), []).append(node)
    return list(groups.values())


def _paired(
    old: Sequence[int], new: Sequence[int], stays: Array, cluster: Cluster
) -> tuple[list[int], list[int]]:
    """Ranks of one node with those of another of the same kind, most replicas in place."""
    if len(old) == 1:
        return list(old), list(new)
    from scipy.optimize import linear_sum_assignment

    gain = stays[np.ix_(old, new)] + 1.0
    for i, rank in enumerate(old):
        for k, other in enumerate(new):
            if _kind(rank, cluster) != _kind(other, cluster):
                gain[i, k] = -1e12
    rows, columns = linear_sum_assignment(gain, maximize=True)
    return [old[int(i)] for i in rows], [new[int(k)] for k in columns]
