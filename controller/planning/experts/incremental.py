"""Candidates that stay near the present hosts of experts, with the price of their copies. Pure.

The present hosts with few changes; layers that stay uneven are planned anew where that pays. And
any plan from scratch, its ranks in the places that need fewest copies.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.local_search import NEAR, evened
from pacekeeper.controller.planning.experts.objective import Draft, Task, distinct_hosts, priced
from pacekeeper.controller.planning.experts.problem import Cluster
from pacekeeper.controller.planning.experts.repair import Needs, mended
from pacekeeper.controller.planning.experts.search import cheapest
from pacekeeper.controller.planning.token_split.min_max import EvenShares, shares_on_ranks

Flags = npt.NDArray[np.bool_]


Array = npt.NDArray[np.float64]


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


COPIED_PART = 0.5  # of all replicas, by a plan from scratch
CHANGED = "present hosts, changed"


def moved_near(draft: Draft, present: Flags, task: Task) -> Draft:
    """The draft with ranks in other places, and the copies in its price."""
    place = nearest_ranks(draft.on_ranks(), present, task.cluster)
    groups = tuple(tuple(sorted(place[list(ranks)].tolist())) for ranks in draft.groups)
    return _with_copies(replace(draft, groups=groups), present, task)


def _with_copies(draft: Draft, present: Flags, task: Task) -> Draft:
    num_copies = int((draft.on_ranks() & ~present).sum())
    price_s = draft.price_s + num_copies * task.prices.move_s
    return replace(draft, num_copies=num_copies, price_s=price_s)


def scratch_s(task: Task, num_layers: int) -> float:
    """What the copies of a plan from scratch cost, roughly: one is made where it may save that."""
    return task.prices.move_s * COPIED_PART * sum(task.cluster.slots) * num_layers


def updated(task: Task, present: Flags, max_copies: int) -> Draft | None:
    """The present hosts after few changes; None where they can not be mended in so many copies."""
    needs = Needs.of(present, task.cluster, task.floors)
    hosts = mended(present, needs, task.cluster, is_strict=task.floors.is_strict)
    if hosts is None:
        return None
    left = max_copies - int((hosts & ~present).sum())
    if left < 0:
        return None
    even = shares_on_ranks(task.loads, hosts, task.speeds, is_exact=False)
    hosts, even = evened(hosts, task, needs.kept_by(hosts, task.cluster), even, left)
    best = _draft(CHANGED, task, hosts, even, present)
    bad = (best.value > (1.0 + NEAR) * task.fluid).nonzero()[0]
    wait_s = task.wait_s(np.where(np.isin(np.arange(len(hosts)), bad), best.value, 0.0))
    if len(bad) == 0 or wait_s <= scratch_s(task, len(bad)):
        return best
    part = cheapest(replace(task, loads=task.loads[bad]), None, saved_s=0.0, adapt=lambda d: d)
    if part is None:
        return best
    hosts[bad] = part.on_ranks()
    even.put(bad, shares_on_ranks(task.loads[bad], hosts[bad], task.speeds))
    anew = _draft(CHANGED, task, hosts, even, present)
    if anew.num_copies <= max_copies and anew.price_s < best.price_s:
        return anew
    return best


def polished(task: Task, draft: Draft) -> Draft:
    """A draft from scratch after the changes that an update would find worth their copies."""
    hosts = draft.on_ranks()
    before = shares_on_ranks(task.loads, hosts, task.speeds)
    if (before.value <= (1.0 + NEAR) * task.fluid).all():
        return draft
    free = replace(task, prices=replace(task.prices, move_s=0.0))
    needs = Needs.of(hosts, task.cluster, task.floors)
    after, even = evened(hosts, free, needs, before, hosts.size)
    changed = _draft(f"{draft.name}, evened", task, after, even, after)
    plain = _draft(draft.name, task, hosts, before, hosts)
    return changed if changed.price_s < plain.price_s else draft


def _draft(name: str, task: Task, hosts: Flags, even: EvenShares, present: Flags) -> Draft:
    """hosts [layers, experts, ranks] and shares, which stay the caller's."""
    draft = Draft(
        name=name,
        groups=tuple((rank,) for rank in range(hosts.shape[2])),
        hosts=hosts.copy(),
        value=even.value.copy(),
        loss=0.0,
        price_s=0.0,
        even=even.of(np.arange(len(hosts))),
    )
    return _with_copies(priced(task, draft, distinct_hosts(draft)), present, task)
