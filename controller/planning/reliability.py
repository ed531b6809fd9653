"""Survival of node losses: every expert of every layer needs a living replica.

A *cut set* is a set of nodes that holds all replicas of some expert; the model is lost when a cut
set fails, of whatever layer. Only minimal cut sets over all layers count, so layers that share them
add no risk (research 1.5). Enters the price (`loss_probability`) and the certificate (`survival`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import comb, expm1, log1p, prod

import numpy as np

FEW = 3  # losses that have a closed form, whatever the cut sets
DENSE_NODES = 16  # up to here all sets of failed nodes are looked at, as bits of one index
MAX_BRANCHES = 20_000  # of the exact probability of loss; beyond it is bounded
SETS_AT_ONCE = 4  # that take as long as a branch itself
NODES_AT_ONCE = 32  # of all sets together, likewise: sets of hundreds of nodes are slow to part
NEGLIGIBLE = 1e-30  # a probability of loss: no plan's price tells it from a smaller one

CutSet = frozenset[int]


class _TooManyBranches(Exception):
    """The exact count would take too long."""


def minimal_cut_sets(replicas: Iterable[Iterable[int]]) -> tuple[CutSet, ...]:
    """Minimal sets of nodes whose loss takes all replicas of some expert, smallest first.

    Args:
        replicas: nodes of each expert, all layers together.

    Raises:
        ValueError: an expert without a replica.
    """
    distinct = sorted({frozenset(on) for on in replicas}, key=lambda s: (len(s), sorted(s)))
    if distinct and not distinct[0]:
        raise ValueError("an expert without replica is lost already")
    return _least(distinct)


def _least(by_size: Sequence[CutSet]) -> tuple[CutSet, ...]:
    """Without those that contain another; `by_size`: distinct, smallest first."""
    kept: list[CutSet] = []
    known: set[CutSet] = set()
    with_node: dict[int, list[CutSet]] = {}
    for found in by_size:
        # Whichever are fewer: all that are kept, or those that begin with one of its nodes.
        others = kept
        if len(kept) > len(found):
            others = [s for node in found for s in with_node.get(node, ())]
        if found in known or any(len(s) < len(found) and s <= found for s in others):
            continue
        kept.append(found)
        known.add(found)
        with_node.setdefault(min(found), []).append(found)
    return tuple(kept)


def survival(
    cut_sets: Sequence[CutSet], num_nodes: int, *, max_losses: int | None = None
) -> tuple[float, ...]:
    """Exact part of all equally likely losses of k nodes that is survived.

    Args:
        cut_sets: sets of nodes 0 .. num_nodes - 1.
        num_nodes: nodes in all.
        max_losses: default: all nodes.

    Returns:
        For k = 0, 1, .. `max_losses`. With more than DENSE_NODES nodes it ends at FEW losses, for
        which a closed form exists.

    Raises:
        ValueError: a cut set with an unknown node.
    """
    if any(not 0 <= node < num_nodes for cut_set in cut_sets for node in cut_set):
        raise ValueError(f"cut sets must be of nodes 0 to {num_nodes - 1}")
    cut_sets = minimal_cut_sets(cut_sets)
    most = num_nodes if max_losses is None else min(max_losses, num_nodes)
    if most <= FEW or num_nodes > DENSE_NODES:
        return tuple(_few_survived(cut_sets, num_nodes, k) for k in range(min(most, FEW) + 1))
    counts = _num_survived(cut_sets, num_nodes)
    return tuple(counts[k] / comb(num_nodes, k) for k in range(most + 1))


def survival_bound(num_nodes: int, num_losses: int, least_replicas: int) -> float:
    """Upper bound on the part of losses survived if the rarest expert is on `least_replicas` nodes.

    1 - C(N - r, k - r) / C(N, k), with N nodes, k losses and r = `least_replicas`: the losses that
    take that expert's nodes (research 1.6). r is at most the slots of all nodes / experts of a
    layer.
    """
    if num_losses < least_replicas:
        return 1.0
    taken = comb(num_nodes - least_replicas, num_losses - least_replicas)
    return 1.0 - taken / comb(num_nodes, num_losses)


def loss_probability(cut_sets: Sequence[CutSet], probabilities: Mapping[int, float]) -> float:
    """Probability that some cut set fails, with independent failures of nodes.

    Exact, also where it is tiny: only positive terms are added (conditioning on the most shared
    node). Where that takes too long or the result is NEGLIGIBLE: the sum over all cut sets, an
    upper bound.

    Args:
        cut_sets: minimal cut sets.
        probabilities: failure probability of each node.

    Raises:
        ValueError: a node without probability, or one outside 0 to 1.
    """
    missing = {node for cut_set in cut_sets for node in cut_set} - set(probabilities)
    if missing:
        raise ValueError(f"nodes {sorted(missing)} have no failure probability")
    if any(not 0.0 <= p <= 1.0 for p in probabilities.values()):
        raise ValueError("failure probabilities must lie in 0 to 1")
    bound = min(1.0, union_bound(cut_sets, probabilities))
    if bound < NEGLIGIBLE:
        return bound
    try:
        return _loss(frozenset(cut_sets), probabilities, {}, _Budget())
    except _TooManyBranches:
        return bound


def union_bound(cut_sets: Iterable[CutSet], probabilities: Mapping[int, float]) -> float:
    """The expected number of cut sets that fail: at least the probability that any does."""
    return sum(prod(probabilities[node] for node in cut_set) for cut_set in cut_sets)


class _Budget:
    """How many branches may still be opened; those of many or large cut sets count for more."""

    def __init__(self) -> None:
        self.left = MAX_BRANCHES

    def spend(self, cut_sets: Collection[CutSet]) -> None:
        num_nodes = sum(map(len, cut_sets))
        self.left -= 1 + max(len(cut_sets) // SETS_AT_ONCE, num_nodes // NODES_AT_ONCE)
        if self.left < 0:
            raise _TooManyBranches


def _num_survived(cut_sets: Iterable[CutSet], num_nodes: int) -> list[int]:
    """How many sets of k failed nodes are survived, by k = 0 .. num_nodes."""
    lost = np.zeros(1 << num_nodes, dtype=np.bool_)
    lost[[sum(1 << node for node in cut_set) for cut_set in cut_sets]] = True
    size = np.zeros(1 << num_nodes, dtype=np.intp)
    for node in range(num_nodes):  # what contains a lost set is lost
        halves = lost.reshape(-1, 2, 1 << node)
        halves[:, 1] |= halves[:, 0]
        size.reshape(-1, 2, 1 << node)[:, 1] += 1
    counts: list[int] = np.bincount(size[~lost], minlength=num_nodes + 1).tolist()
    return counts


def _loss(
    cut_sets: frozenset[CutSet],
    probabilities: Mapping[int, float],
    memo: dict[frozenset[CutSet], float],
    budget: _Budget,
) -> float:
    if not cut_sets:
        return 0.0
    if cut_sets in memo:
        return memo[cut_sets]
    log_survived = 0.0
    for part in _parts(cut_sets):
        if len(part) == 1:
            lost = prod(probabilities[node] for node in next(iter(part)))
        else:
            budget.spend(part)
            node = _most_shared(part)
            lives, fails = _branches(part, node)
            p = probabilities[node]
            lost = (1.0 - p) * _loss(lives, probabilities, memo, budget)
            lost += p * _loss(fails, probabilities, memo, budget)
        if lost >= 1.0:
            memo[cut_sets] = 1.0
            return 1.0
        log_survived += log1p(-lost)
    memo[cut_sets] = -expm1(log_survived)
    return memo[cut_sets]


def _parts(cut_sets: frozenset[CutSet]) -> list[frozenset[CutSet]]:
    """The cut sets in groups that share no node."""
    parts: list[tuple[set[int], set[CutSet]]] = []
    for cut_set in sorted(cut_sets, key=sorted):
        nodes, members = set(cut_set), {cut_set}
        apart = []
        for other in parts:
            if other[0].isdisjoint(cut_set):
                apart.append(other)
            else:
                nodes |= other[0]
                members |= other[1]
        parts = [*apart, (nodes, members)]
    return [frozenset(members) for _, members in parts]


def _most_shared(cut_sets: frozenset[CutSet]) -> int:
    number: dict[int, int] = {}
    for cut_set in cut_sets:
        for node in cut_set:
            number[node] = number.get(node, 0) + 1
    return min(number, key=lambda node: (-number[node], node))


def _branches(
    cut_sets: frozenset[CutSet], node: int
) -> tuple[frozenset[CutSet], frozenset[CutSet]]:
    """The cut sets that are left where `node` lives, and where it fails."""
    assert frozenset((node,)) not in cut_sets, "no other of these sets would hold this node"
    lives = frozenset(cut_set for cut_set in cut_sets if node not in cut_set)
    left = {cut_set - {node} for cut_set in cut_sets}
    return lives, frozenset(_least(sorted(left, key=lambda s: (len(s), sorted(s)))))


def _few_survived(cut_sets: Sequence[CutSet], num_nodes: int, num_losses: int) -> float:
    """At most FEW losses, exactly: sets of nodes none of which, no two and no three kill."""
    by_size: dict[int, list[CutSet]] = {size: [] for size in range(1, FEW + 1)}
    for cut_set in cut_sets:
        by_size.setdefault(len(cut_set), []).append(cut_set)
    harmless = num_nodes - len(by_size[1])
    match num_losses:
        case 0:
            return 1.0
        case 1:
            survived = harmless
        case 2:
            survived = comb(harmless, 2) - len(by_size[2])
        case _:
            survived = comb(harmless, 3) - _num_with_pair(by_size[2], harmless) - len(by_size[3])
    return survived / comb(num_nodes, num_losses)


def _num_with_pair(pairs: Iterable[CutSet], num_nodes: int) -> int:
    """How many sets of three nodes hold one of these pairs.

    Each pair with each third node, less those counted twice: two pairs with a node in common (three
    such in a triangle, which is counted three times and taken away as often: once is right).
    """
    partners: dict[int, set[int]] = {}
    for one, other in map(sorted, pairs):
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
    degrees = [len(others) for others in partners.values()]
    triangles = sum(
        len(partners[one] & partners[other]) for one, others in partners.items() for other in others
    )
    return sum(degrees) * (num_nodes - 2) // 2 - sum(comb(d, 2) for d in degrees) + triangles // 6


MAX_EVENT_SETS = 64  # beyond, the sum over cut sets


def loss_with_racks(
    cut_sets: Sequence[CutSet],
    node_failure: Mapping[int, float],
    rack_of: Mapping[int, int],
    rack_failure: Mapping[int, float],
) -> float:
    """Probability that some cut set fails, where whole racks may fail as well, independently.

    Args:
        cut_sets: minimal cut sets of nodes.
        node_failure: probability of each node.
        rack_of: rack of each node.
        rack_failure: probability that a rack fails as a whole; racks not named never do.

    Returns:
        Exact for few cut sets over few racks; otherwise the expected number of cut sets that fail,
        an upper bound.
    """
    bound = sum(_probability(k, node_failure, rack_of, rack_failure) for k in cut_sets)
    events = _event_sets(cut_sets, rack_of, rack_failure)
    if events is None:
        return min(1.0, bound)
    number = _events(rack_of)
    risk = {**node_failure, **{number[rack]: p for rack, p in rack_failure.items()}}
    return min(1.0, bound, loss_probability(events, risk))


def _probability(
    cut_set: CutSet,
    node_failure: Mapping[int, float],
    rack_of: Mapping[int, int],
    rack_failure: Mapping[int, float],
) -> float:
    """Probability that one cut set fails; racks are independent of each other."""
    lost = 1.0
    for rack, nodes in _by_rack(cut_set, rack_of).items():
        each = prod(node_failure[node] for node in nodes)
        whole = rack_failure.get(rack, 0.0)
        lost *= whole + (1.0 - whole) * each
    return lost


def _event_sets(
    cut_sets: Iterable[CutSet], rack_of: Mapping[int, int], rack_failure: Mapping[int, float]
) -> tuple[CutSet, ...] | None:
    """The least sets of failing nodes and racks that take a whole cut set; None: too many."""
    found: set[CutSet] = set()
    number = _events(rack_of)
    for cut_set in cut_sets:
        ways = [CutSet()]
        for rack, nodes in _by_rack(cut_set, rack_of).items():
            choices = [CutSet(nodes)]
            if rack_failure.get(rack, 0.0) > 0.0:
                choices.append(CutSet((number[rack],)))
            ways = [way | choice for way in ways for choice in choices]
            if len(ways) > MAX_EVENT_SETS:
                return None
        found.update(ways)
        if len(found) > MAX_EVENT_SETS:
            return None
    return minimal_cut_sets(found)


def _events(rack_of: Mapping[int, int]) -> dict[int, int]:
    """For the failure of each whole rack a number that is no node's."""
    racks = sorted(set(rack_of.values()))
    return {rack: at for at, rack in enumerate(racks, 1 + max(rack_of, default=0))}


def _by_rack(cut_set: CutSet, rack_of: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node in sorted(cut_set):
        found.setdefault(rack_of[node], []).append(node)
    return found
