"""Which losses a placement survives: each expert of each layer needs a living host. Pure.

Only host sets count. A *kill set* is the nodes (or other units that fail at once) that hold all
copies of some expert; the model is lost where the failed nodes contain one, of whatever layer. So
the kill sets of all layers are united: layers that share them cost nothing more (research 1.5).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, expm1, log1p, prod, sqrt

import numpy as np
import numpy.typing as npt

FEW = 3  # losses that have a closed form, whatever the kill sets
DENSE_NODES = 16  # up to here all sets of failed nodes are looked at, as bits of one index
MAX_BRANCHES = 20_000  # of the exact count; beyond it is sampled
SETS_AT_ONCE = 4  # that take as long as a branch itself
NODES_AT_ONCE = 32  # of all sets together, likewise: sets of hundreds of nodes are slow to part
NEGLIGIBLE = 1e-30  # a probability of loss: no plan's price tells it from a smaller one
NUM_SAMPLES = 4096  # orders in which nodes fail: one order serves every number of losses
SAMPLES_AT_ONCE = 256
SEED_STRIDE = 0x632BE59BD9B4E019  # odd: another stretch of the counter for every seed
SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

KillSet = frozenset[int]
Counts = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """By number of lost nodes 0, 1, ..: the part of equally likely losses that is survived.

    `standard_error` is 0 where the part is exact.
    """

    by_losses: tuple[float, ...]
    standard_error: tuple[float, ...]

    @property
    def is_exact(self) -> bool:
        return not any(self.standard_error)


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
    killers: Sequence[KillSet], num_nodes: int, *, max_losses: int | None = None, seed: int = 0
) -> Survival:
    """The part of all losses of k nodes that is survived, for k = 0 .. max_losses (default all).

    Exact where counting is feasible; else exact for at most FEW losses and sampled above, from the
    same NUM_SAMPLES orders of failing for every k (`seed` chooses them). Raises ValueError for a
    kill set with a node that is not one of 0 .. num_nodes - 1.
    """
    if any(not 0 <= node < num_nodes for killer in killers for node in killer):
        raise ValueError(f"kill sets must be of nodes 0 to {num_nodes - 1}")
    killers = kill_sets(killers)
    most = num_nodes if max_losses is None else min(max_losses, num_nodes)
    if most <= FEW:
        few = tuple(_few_survived(killers, num_nodes, k) for k in range(most + 1))
        return Survival(by_losses=few, standard_error=(0.0,) * len(few))
    try:
        counts = _num_survived(killers, num_nodes)
    except _TooManyBranches:
        return _sampled(killers, num_nodes, most, seed)
    parts = tuple(counts[k] / comb(num_nodes, k) for k in range(most + 1))
    return Survival(by_losses=parts, standard_error=(0.0,) * len(parts))


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


def _num_survived(killers: Sequence[KillSet], num_nodes: int) -> Counts:
    """How many sets of k failed nodes are survived, by k = 0 .. num_nodes."""
    if num_nodes <= DENSE_NODES:
        return _num_survived_dense(killers, num_nodes)
    touched = frozenset[int]().union(*killers)
    counts = _count(frozenset(killers), {}, _Budget())
    return _times(counts, _choices(num_nodes - len(touched)))


def _num_survived_dense(killers: Iterable[KillSet], num_nodes: int) -> Counts:
    lost = np.zeros(1 << num_nodes, dtype=np.bool_)
    lost[[sum(1 << node for node in killer) for killer in killers]] = True
    size = np.zeros(1 << num_nodes, dtype=np.intp)
    for node in range(num_nodes):  # what contains a lost set is lost
        halves = lost.reshape(-1, 2, 1 << node)
        halves[:, 1] |= halves[:, 0]
        size.reshape(-1, 2, 1 << node)[:, 1] += 1
    counts: Counts = np.bincount(size[~lost], minlength=num_nodes + 1).tolist()
    return counts


def _count(
    killers: frozenset[KillSet], memo: dict[frozenset[KillSet], Counts], budget: _Budget
) -> Counts:
    """The same over the nodes of these kill sets only; parts without a common node multiply."""
    if not killers:
        return [1]
    if killers in memo:
        return memo[killers]
    counts = [1]
    for part in _parts(killers):
        nodes = frozenset[int]().union(*part)
        if len(part) == 1:
            inside = _choices(len(nodes))
            inside[-1] = 0
        else:
            budget.spend(part)
            node = _most_shared(part)
            lives, fails = _branches(part, node)
            alive = _times(
                _count(lives, memo, budget), _choices(len(nodes) - 1 - _num_nodes(lives))
            )
            inside = alive + [0] * (len(nodes) + 1 - len(alive))
            failed = _times(
                _count(fails, memo, budget), _choices(len(nodes) - 1 - _num_nodes(fails))
            )
            inside = [a + b for a, b in zip(inside, [0, *failed], strict=True)]
        counts = _times(counts, inside)
    memo[killers] = counts
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


def _num_nodes(killers: frozenset[KillSet]) -> int:
    return len(frozenset[int]().union(*killers))


def _choices(num_nodes: int) -> Counts:
    return [comb(num_nodes, k) for k in range(num_nodes + 1)]


def _times(one: Counts, other: Counts) -> Counts:
    product = [0] * (len(one) + len(other) - 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            product[i + j] += a * b
    return product


def _sampled(killers: Sequence[KillSet], num_nodes: int, most: int, seed: int) -> Survival:
    """From orders in which nodes fail: the model is lost at the first whole kill set."""
    lost_at = np.full(NUM_SAMPLES, num_nodes + 1)
    by_size: dict[int, list[list[int]]] = {}
    for killer in killers:
        by_size.setdefault(len(killer), []).append(sorted(killer))
    for first in range(0, NUM_SAMPLES, SAMPLES_AT_ONCE):
        here = slice(first, first + SAMPLES_AT_ONCE)
        turn = _failing_orders(np.arange(NUM_SAMPLES)[here], num_nodes, seed)
        for same_size in by_size.values():
            members = np.array(same_size)
            last = turn[:, members[:, 0]]
            for column in members.T[1:]:
                np.maximum(last, turn[:, column], out=last)
            lost_at[here] = np.minimum(lost_at[here], last.min(axis=1) + 1)
    parts, errors = [], []
    for k in range(most + 1):
        if k <= FEW:
            parts.append(_few_survived(killers, num_nodes, k))
            errors.append(0.0)
            continue
        part = float((lost_at > k).mean())
        # A part of all or none may be wrong by a few samples too (Laplace's rule).
        smooth = (part * NUM_SAMPLES + 1.0) / (NUM_SAMPLES + 2.0)
        parts.append(part)
        errors.append(sqrt(smooth * (1.0 - smooth) / NUM_SAMPLES))
    return Survival(by_losses=tuple(parts), standard_error=tuple(errors))


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


def _failing_orders(
    samples: npt.NDArray[np.intp], num_nodes: int, seed: int
) -> npt.NDArray[np.intp]:
    """[samples, nodes]: when each node fails, 0 first: a permutation from a counted hash."""
    place = samples[:, None] * num_nodes + np.arange(1, num_nodes + 1)
    counter: npt.NDArray[np.uint64] = place.astype(np.uint64)
    step, first, second = map(np.uint64, SPLITMIX)
    mixed: npt.NDArray[np.uint64] = (counter + np.uint64(seed * SEED_STRIDE % 2**64)) * step
    mixed = (mixed ^ (mixed >> np.uint64(30))) * first
    mixed = (mixed ^ (mixed >> np.uint64(27))) * second
    keys: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    turns: npt.NDArray[np.intp] = keys.argsort(axis=1).argsort(axis=1)
    return turns


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
