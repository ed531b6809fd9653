"""Places expert replicas: in as many failure domains as possible, on lightly loaded ranks.

A domain fails as one unit, for example a node or a rack. Its value is only a name and is never
ordered by, so that equal ranks in equal domains give equal placements everywhere.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import gcd
from types import MappingProxyType

DomainOf = Mapping[int, Hashable]
"""The domain of each rank. A rank that is not named is a domain of its own."""

NO_DOMAINS: DomainOf = MappingProxyType({})


def domain_of_rank(domain_of: DomainOf, rank: int) -> Hashable:
    """The failure domain of `rank`: its own, if `domain_of` does not name the rank."""
    return domain_of.get(rank, (None, rank))


def domains_of_ranks(domain_of: DomainOf, ranks: Iterable[int]) -> set[Hashable]:
    """The failure domains of `ranks`."""
    return {domain_of_rank(domain_of, rank) for rank in ranks}


def number_domains(domain_of: DomainOf, ranks: Iterable[int]) -> dict[int, int]:
    """The failure domain of each of `ranks` as a number from 0, in the order of `ranks`."""
    number: dict[Hashable, int] = {}
    return {rank: number.setdefault(domain_of_rank(domain_of, rank), len(number)) for rank in ranks}


def spread_replicas(
    num_experts: int, replicas: int, ranks: Sequence[int], domain_of: DomainOf, *, turn: int
) -> list[tuple[int, ...]]:
    """The replica ranks of each expert of one layer, on min(replicas, domains) distinct domains.

    They are neighbours on one circle of ranks that is the same for every layer: few sets of domains
    hold all copies of an expert, however many layers there are. With at least as many experts as
    ranks all positions are used and neighbours share experts, so that work can be balanced all
    around; with fewer experts the sets of ranks are disjoint for as long as possible. Domains of
    equal size get the same number of slots, give or take one, and so do their ranks; a smaller
    domain gets more per rank where the spread requires it.

    Args:
        num_experts: the experts of the layer.
        replicas: replicas of each expert, at most len(ranks).
        ranks: the ranks that run the layer.
        domain_of: the failure domain of each rank.
        turn: the number of the layer; it shifts which ranks get one slot more.

    Returns:
        For each expert its replica ranks, ascending.
    """
    in_domain: dict[Hashable, list[int]] = {}
    for rank in ranks:
        in_domain.setdefault(domain_of_rank(domain_of, rank), []).append(rank)
    crowded, others = _crowded(list(in_domain.values()), replicas)
    circle = _circle(others)
    length = min(replicas - len(crowded), len(circle))
    # After so many experts every place has as many: a shift then keeps that.
    num_even = len(circle) // gcd(length, len(circle)) if circle else 1
    used = dict.fromkeys(ranks, 0)
    result = []
    for expert in range(num_experts):
        dealt = turn * num_experts + expert
        start = dealt * length + expert // num_even
        chosen = [members[dealt % len(members)] for members in crowded]
        chosen += [circle[(start + step) % len(circle)] for step in range(length)]
        while len(chosen) < replicas:  # every domain has one already
            chosen.append(min(set(ranks).difference(chosen), key=lambda rank: (used[rank], rank)))
        for rank in chosen:
            used[rank] += 1
        result.append(tuple(sorted(chosen)))
    return result


def _crowded(members: list[list[int]], replicas: int) -> tuple[list[list[int]], list[list[int]]]:
    """Domains so large that every expert needs a replica there, and the other domains.

    `members`: the ranks of each domain; the result is sorted by size, largest first.
    """
    others = sorted(members, key=len, reverse=True)
    crowded: list[list[int]] = []
    width = min(replicas, len(others))
    while others and len(others[0]) * (width - len(crowded)) > sum(map(len, others)):
        crowded.append(others.pop(0))
    return crowded, others


def _circle(members: Sequence[Sequence[int]]) -> list[int]:
    """All ranks once, those of one domain as far apart as the largest domain allows.

    The domains are laid one after the other around a circle with as many positions as the largest
    has ranks; ranks at the same position become neighbours (McNaughton's rule). Domains of equal
    size give: the first rank of each, then the second of each.
    """
    ranks = [rank for of_domain in members for rank in of_domain]
    if not ranks:
        return []
    width = len(ranks) // len(members[0])
    order = sorted(range(len(ranks)), key=lambda i: (i * width % len(ranks), i))
    return [ranks[i] for i in order]


def level_shares(
    placed: Sequence[Collection[int]], taken: Mapping[int, float], level: float
) -> list[dict[int, float]]:
    """Shares that level the load of ranks, assuming that all experts have equal load.

    Args:
        placed: the replica ranks of each expert.
        taken: the load of each rank from other experts.
        level: the load that every rank is to reach.

    Returns:
        For each expert rank -> share, ascending. A rank divides what it lacks to `level` equally
        among
        its experts here; if no rank of an expert lacks anything, its replicas get equal shares.
    """
    num_on: dict[int, int] = {}
    for on in placed:
        for rank in on:
            num_on[rank] = num_on.get(rank, 0) + 1
    result = []
    for on in placed:
        room = {r: max(0.0, level - taken.get(r, 0.0)) / num_on[r] for r in sorted(on)}
        total = sum(room.values())
        result.append({r: w / total if total > 0.0 else 1.0 / len(room) for r, w in room.items()})
    return result
