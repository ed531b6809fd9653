"""Candidates near the present placement, priced with the replicas they copy.

The present replica ranks after few changes; layers that stay uneven are planned anew where that
pays. Also permutes the ranks of a plan from scratch so that it copies least. Called by `planner`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.local_search import NEAR, local_search
from pacekeeper.controller.planning.experts.objective import (
    CandidatePlacement,
    PlacementProblem,
    distinct_replica_sets,
    price_candidate,
)
from pacekeeper.controller.planning.experts.problem import Cluster
from pacekeeper.controller.planning.experts.repair import SpreadRequirements, repair
from pacekeeper.controller.planning.experts.search import cheapest_placement
from pacekeeper.controller.planning.token_split.min_max import MinMaxSplit, shares_on_ranks

Flags = npt.NDArray[np.bool_]


Array = npt.NDArray[np.float64]


def nearest_ranks(replicas: Flags, present: Flags, cluster: Cluster) -> npt.NDArray[np.intp]:
    """[ranks] for each rank of `replicas` the one in its place. Both [layers, experts, ranks].

    Nodes change places within their rack, or anywhere where every rack is one node.
    """
    from scipy.optimize import linear_sum_assignment  # not at start-up

    num = cluster.num_ranks
    stays = np.matmul(
        replicas.reshape(-1, num).T.astype(np.float32), present.reshape(-1, num).astype(np.float32)
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


COPIED_PART = 0.5  # of all replicas, by a plan from scratch
CHANGED = "present replicas, changed"
SPLIT_GAIN = 1e-4  # of a value: less is rounding


def permute_ranks(
    draft: CandidatePlacement, present: Flags, task: PlacementProblem
) -> CandidatePlacement:
    """Permute equal ranks so that the candidate copies least; price the copies."""
    place = nearest_ranks(draft.on_ranks(), present, task.cluster)
    groups = tuple(tuple(sorted(place[list(ranks)].tolist())) for ranks in draft.groups)
    return _with_copies(replace(draft, groups=groups), present, task)


def _with_copies(
    draft: CandidatePlacement, present: Flags, task: PlacementProblem
) -> CandidatePlacement:
    num_copies = int((draft.on_ranks() & ~present).sum())
    price_s = draft.price_s + num_copies * task.prices.move_s
    return replace(draft, num_copies=num_copies, price_s=price_s)


def replan_copies_s(task: PlacementProblem, num_layers: int) -> float:
    """Estimated cost of the copies of a plan from scratch, in seconds.

    A plan from scratch is searched only where it can save at least that.
    """
    return task.prices.move_s * COPIED_PART * sum(task.cluster.slots) * num_layers


def update_placement(
    task: PlacementProblem, present: Flags, max_copies: int
) -> CandidatePlacement | None:
    """The present placement after few changes: repair, local search, uneven layers planned anew.

    Args:
        task: loads, cluster, floors and prices.
        present: [layers, experts, ranks].
        max_copies: the most replicas to copy.

    Returns:
        The cheapest of these; None where the floors cannot be met within `max_copies`.
    """
    needs = SpreadRequirements.of(present, task.cluster, task.floors)
    replicas = repair(present, needs, task.cluster, is_strict=task.floors.is_strict)
    if replicas is None:
        return None
    left = max_copies - int((replicas & ~present).sum())
    if left < 0:
        return None
    even = shares_on_ranks(task.loads, replicas, task.speeds, is_exact=False)
    replicas, even = local_search(replicas, task, needs.kept_by(replicas, task.cluster), even, left)
    best = _draft(CHANGED, task, replicas, even, present)
    bad = (best.value > (1.0 + NEAR) * task.fluid).nonzero()[0]
    wait_s = task.wait_s(np.where(np.isin(np.arange(len(replicas)), bad), best.value, 0.0))
    if len(bad) == 0 or wait_s <= replan_copies_s(task, len(bad)):
        return best
    part = cheapest_placement(
        replace(task, loads=task.loads[bad]), None, saved_s=0.0, adapt=lambda d: d
    )
    if part is None:
        return best
    replicas[bad] = part.on_ranks()
    even.put(bad, shares_on_ranks(task.loads[bad], replicas[bad], task.speeds))
    anew = _draft(CHANGED, task, replicas, even, present)
    if anew.num_copies <= max_copies and anew.price_s < best.price_s:
        return anew
    return best


def refine(task: PlacementProblem, draft: CandidatePlacement) -> CandidatePlacement:
    """Apply local search to a plan from scratch, with copies free of charge."""
    replicas = draft.on_ranks()
    before = shares_on_ranks(task.loads, replicas, task.speeds)
    if (even := draft.even) and (before.value < (1.0 - SPLIT_GAIN) * even.value).any():
        draft = _draft(draft.name, task, replicas, before, replicas)  # split over groups: rougher
    if (before.value <= (1.0 + NEAR) * task.fluid).all():
        return draft
    free = replace(task, prices=replace(task.prices, move_s=0.0))
    needs = SpreadRequirements.of(replicas, task.cluster, task.floors)
    after, split = local_search(replicas, free, needs, before, replicas.size)
    changed = _draft(f"{draft.name}, evened", task, after, split, after)
    return min(draft, changed, key=lambda one: one.price_s)


def _draft(
    name: str, task: PlacementProblem, replicas: Flags, even: MinMaxSplit, present: Flags
) -> CandidatePlacement:
    """replicas [layers, experts, ranks] and shares, which stay the caller's."""
    draft = CandidatePlacement(
        name=name,
        groups=tuple((rank,) for rank in range(replicas.shape[2])),
        replicas=replicas.copy(),
        value=even.value.copy(),
        loss=0.0,
        price_s=0.0,
        even=even.of(np.arange(len(replicas))),
    )
    return _with_copies(price_candidate(task, draft, distinct_replica_sets(draft)), present, task)
