"""Which losses a placement survives: each expert of each layer needs a living host. Pure.

Only host sets count. A *kill set* is the nodes (or other units that fail at once) that hold all
copies of some expert; the model is lost where the failed nodes contain one, of whatever layer. So
the kill sets of all layers are united: layers that share them cost nothing more (research 1.5).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import comb, expm1, log1p, prod

import numpy as np

FEW = 3  # losses that have a closed form, whatever the kill sets
DENSE_NODES = 16  # up to here all sets of failed nodes are looked at, as bits of one index
MAX_BRANCHES = 20_000  # of the exact probability of loss; beyond it is bounded
SETS_AT_ONCE = 4  # that take as long as a branch itself
NODES_AT_ONCE = 32  # of all sets together, likewise: sets of hundreds of nodes are slow to part
NEGLIGIBLE = 1e-30  # a probability of loss: no plan's price tells it from a smaller one

KillSet = frozenset[int]


class _TooManyBranches(Exception):
    """The exact count would take too long."""


def kill_sets(hosts: Iterable[Iterable[int]]) -> tuple[KillSet, ...]:
    """The least sets of nodes whose loss takes all copies of some expert, smallest first.

    hosts: the nodes that hold each expert, all layers together. A set that contains another adds
    nothing and is left out. Raises ValueError for an expert without host.
    """
    distinct = sorted({frozenset(on) for on in hosts}, key=lambda s: (len(s), sorted(s)))
    if distinct and not distinct[0]:
        raise ValueError("an expert without host is lost already")
    return _least(distinct)


def _least(by_size: Sequence[KillSet]) -> tuple[KillSet, ...]:
    """Without those that contain another; `by_size`: distinct, smallest first."""
    kept: list[KillSet] = []
    known: set[KillSet] = set()
    with_node: dict[int, list[KillSet]] = {}
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
    killers: Sequence[KillSet], num_nodes: int, *, max_losses: int | None = None
) -> tuple[float, ...]:
    """The part of all equally likely losses of k nodes that is survived, exactly.

    Returns: for k = 0, 1, .. `max_losses` (default: all nodes). With more than DENSE_NODES nodes it
    ends at FEW losses, for which there is a closed form.
    Raises ValueError for a kill set with a node that is not one of 0 .. num_nodes - 1.
    """
    if any(not 0 <= node < num_nodes for killer in killers for node in killer):
        raise ValueError(f"kill sets must be of nodes 0 to {num_nodes - 1}")
    killers = kill_sets(killers)
    most = num_nodes if max_losses is None else min(max_losses, num_nodes)
    if most <= FEW or num_nodes > DENSE_NODES:
        return tuple(_few_survived(killers, num_nodes, k) for k in range(min(most, FEW) + 1))
    counts = _num_survived(killers, num_nodes)
    return tuple(counts[k] / comb(num_nodes, k) for k in range(most + 1))


def survival_bound(num_nodes: int, num_losses: int, least_hosts: int) -> float:
    """No placement whose rarest expert is on `least_hosts` nodes survives a larger part.

    1 - C(N - r, k - r) / C(N, k): the losses that take that expert's nodes (research 1.6). For any
    counts r is at most the slots of all nodes divided by the experts of a layer.
    """
    if num_losses < least_hosts:
        return 1.0
    taken = comb(num_nodes - least_hosts, num_losses - least_hosts)
    return 1.0 - taken / comb(num_nodes, num_losses)


def loss_probability(killers: Sequence[KillSet], probabilities: Mapping[int, float]) -> float:
    """How likely the model is lost where nodes fail independently, each with its probability.

    Exact, also where it is tiny: only positive terms are added. Where that takes too long, or the
    result is NEGLIGIBLE, the sum over all kill sets, which is never below it. Raises ValueError for
    a node without probability.
    """
    missing = {node for killer in killers for node in killer} - set(probabilities)
    if missing:
        raise ValueError(f"nodes {sorted(missing)} have no failure probability")
    if any(not 0.0 <= p <= 1.0 for p in probabilities.values()):
        raise ValueError("failure probabilities must lie in 0 to 1")
    bound = min(1.0, union_bound(killers, probabilities))
    if bound < NEGLIGIBLE:
        return bound
    try:
        return _loss(frozenset(killers), probabilities, {}, _Budget())
    except _TooManyBranches:
        return bound


def union_bound(killers: Iterable[KillSet], probabilities: Mapping[int, float]) -> float:
    """The expected number of kill sets that fail: at least the probability that any does."""
    return sum(prod(probabilities[node] for node in killer) for killer in killers)


class _Budget:
    """How many branches may still be opened; those of many or large kill sets count for more."""

    def __init__(self) -> None:
        self.left = MAX_BRANCHES

    def spend(self, killers: Collection[KillSet]) -> None:
        num_nodes = sum(map(len, killers))
        self.left -= 1 + max(len(killers) // SETS_AT_ONCE, num_nodes // NODES_AT_ONCE)
        if self.left < 0:
            raise _TooManyBranches


def _num_survived(killers: Iterable[KillSet], num_nodes: int) -> list[int]:
    """How many sets of k failed nodes are survived, by k = 0 .. num_nodes."""
    lost = np.zeros(1 << num_nodes, dtype=np.bool_)
    lost[[sum(1 << node for node in killer) for killer in killers]] = True
    size = np.zeros(1 << num_nodes, dtype=np.intp)
    for node in range(num_nodes):  # what contains a lost set is lost
        halves = lost.reshape(-1, 2, 1 << node)
        halves[:, 1] |= halves[:, 0]
        size.reshape(-1, 2, 1 << node)[:, 1] += 1
    counts: list[int] = np.bincount(size[~lost], minlength=num_nodes + 1).tolist()
    return counts


def _loss(
    killers: frozenset[KillSet],
    probabilities: Mapping[int, float],
    memo: dict[frozenset[KillSet], float],
    budget: _Budget,
) -> float:
    if not killers:
        return 0.0
    if killers in memo:
        return memo[killers]
    log_survived = 0.0
    for part in _parts(killers):
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
            memo[killers] = 1.0
            return 1.0
        log_survived += log1p(-lost)
    memo[killers] = -expm1(log_survived)
    return memo[killers]


def _parts(killers: frozenset[KillSet]) -> list[frozenset[KillSet]]:
    """The kill sets in groups that share no node."""
    parts: list[tuple[set[int], set[KillSet]]] = []
    for killer in sorted(killers, key=sorted):
        nodes, members = set(killer), {killer}
        apart = []
        for other in parts:
            if other[0].isdisjoint(killer):
                apart.append(other)
            else:
                nodes |= other[0]
                members |= other[1]
        parts = [*apart, (nodes, members)]
    return [frozenset(members) for _, members in parts]


def _most_shared(killers: frozenset[KillSet]) -> int:
    number: dict[int, int] = {}
    for killer in killers:
        for node in killer:
            number[node] = number.get(node, 0) + 1
    return min(number, key=lambda node: (-number[node], node))


def _branches(
    killers: frozenset[KillSet], node: int
) -> tuple[frozenset[KillSet], frozenset[KillSet]]:
    """The kill sets that are left where `node` lives, and where it fails."""
    assert frozenset((node,)) not in killers, "no other of these sets would hold this node"
    lives = frozenset(killer for killer in killers if node not in killer)
    left = {killer - {node} for killer in killers}
    return lives, frozenset(_least(sorted(left, key=lambda s: (len(s), sorted(s)))))


def _few_survived(killers: Sequence[KillSet], num_nodes: int, num_losses: int) -> float:
    """At most FEW losses, exactly: sets of nodes none of which, no two and no three kill."""
    by_size: dict[int, list[KillSet]] = {size: [] for size in range(1, FEW + 1)}
    for killer in killers:
        by_size.setdefault(len(killer), []).append(killer)
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


def _num_with_pair(pairs: Iterable[KillSet], num_nodes: int) -> int:
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


MAX_EVENT_SETS = 64  # beyond, the sum over kill sets


def loss_with_racks(
    killers: Sequence[KillSet],
    node_failure: Mapping[int, float],
    rack_of: Mapping[int, int],
    rack_failure: Mapping[int, float],
) -> float:
    """The probability that all nodes of some kill set fail: each by itself, and all of a rack
    together, independently. Racks that are not named never fail as a whole.

    Exact for few kill sets over few racks; else the expected number of kill sets that fail, which
    is never below it.
    """
    bound = sum(_probability(k, node_failure, rack_of, rack_failure) for k in killers)
    events = _event_sets(killers, rack_of, rack_failure)
    if events is None:
        return min(1.0, bound)
    number = _events(rack_of)
    risk = {**node_failure, **{number[rack]: p for rack, p in rack_failure.items()}}
    return min(1.0, bound, loss_probability(events, risk))


def _probability(
    killer: KillSet,
    node_failure: Mapping[int, float],
    rack_of: Mapping[int, int],
    rack_failure: Mapping[int, float],
) -> float:
    """Of one kill set: racks are independent of each other."""
    lost = 1.0
    for rack, nodes in _by_rack(killer, rack_of).items():
        each = prod(node_failure[node] for node in nodes)
        whole = rack_failure.get(rack, 0.0)
        lost *= whole + (1.0 - whole) * each
    return lost


def _event_sets(
    killers: Iterable[KillSet], rack_of: Mapping[int, int], rack_failure: Mapping[int, float]
) -> tuple[KillSet, ...] | None:
    """The least sets of failing nodes and racks that take a whole kill set; None: too many."""
    found: set[KillSet] = set()
    number = _events(rack_of)
    for killer in killers:
        ways = [KillSet()]
        for rack, nodes in _by_rack(killer, rack_of).items():
            choices = [KillSet(nodes)]
            if rack_failure.get(rack, 0.0) > 0.0:
                choices.append(KillSet((number[rack],)))
            ways = [way | choice for way in ways for choice in choices]
            if len(ways) > MAX_EVENT_SETS:
                return None
        found.update(ways)
        if len(found) > MAX_EVENT_SETS:
            return None
    return kill_sets(found)


def _events(rack_of: Mapping[int, int]) -> dict[int, int]:
    """For the failure of each whole rack a number that is no node's."""
    racks = sorted(set(rack_of.values()))
    return {rack: at for at, rack in enumerate(racks, 1 + max(rack_of, default=0))}


def _by_rack(killer: KillSet, rack_of: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node in sorted(killer):
        found.setdefault(rack_of[node], []).append(node)
    return found
