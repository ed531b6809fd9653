"""Where an expert's hosts stand: in as many failure domains as can be, on ranks little burdened.

Pure. A domain is what fails as one: a node, a rack. Its value is a name only; nothing is ordered by
it, so that whoever has the same ranks in the same domains finds the same hosts.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import gcd
from types import MappingProxyType

DomainOf = Mapping[int, Hashable]
"""The domain of each rank. A rank that is not named is a domain of its own."""

NO_DOMAINS: DomainOf = MappingProxyType({})


def domain_of_rank(domain_of: DomainOf, rank: int) -> Hashable:
    """The domain of `rank`."""
    return domain_of.get(rank, (None, rank))


def domains_of_ranks(domain_of: DomainOf, ranks: Iterable[int]) -> set[Hashable]:
    """The domains that `ranks` stand in."""
    return {domain_of_rank(domain_of, rank) for rank in ranks}


def number_domains(domain_of: DomainOf, ranks: Iterable[int]) -> dict[int, int]:
    """The domain of each of `ranks` as a number from 0, in the order they come."""
    number: dict[Hashable, int] = {}
    return {rank: number.setdefault(domain_of_rank(domain_of, rank), len(number)) for rank in ranks}


def spread_replicas(
    num_experts: int, replicas: int, ranks: Sequence[int], domain_of: DomainOf, *, turn: int
) -> list[tuple[int, ...]]:
    """Hosts for each expert of one layer, ascending, on min(replicas, domains) distinct domains.

    They stand side by side in one circle of ranks, the same for every layer: few sets of domains
    hold all copies of an expert, however many layers there are. Where experts are no fewer than
    ranks all places are taken, and neighbours share experts, so that work can flow all around; with
    fewer, host sets are disjoint as long as they can be. Domains of equal size get the same number
    of slots, give or take one, and so do their ranks; a smaller one gets more per rank where the
    spread needs it. `turn`, the number of the layer, shifts who gets one more. len(ranks) >=
    replicas.
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
    """Domains so large a part of all that every expert has to stand there, and the others.

    members: the ranks of each domain; largest first afterwards.
    """
    others = sorted(members, key=len, reverse=True)
    crowded: list[list[int]] = []
    width = min(replicas, len(others))
    while others and len(others[0]) * (width - len(crowded)) > sum(map(len, others)):
        crowded.append(others.pop(0))
    return crowded, others


def _circle(members: Sequence[Sequence[int]]) -> list[int]:
    """All ranks once, those of one domain as far apart as the largest allows; largest first.

    Domains are laid one after the other around a circle of so many ranks as the largest has, as
    often as that goes; who comes to lie at the same place stands side by side (McNaughton's rule).
    For domains of equal size: the first rank of each, then the second of each.
    """
    ranks = [rank for of_domain in members for rank in of_domain]
    if not ranks:
        return []
    width = len(ranks) // len(members[0])
    order = sorted(range(len(ranks)), key=lambda i: (i * width % len(ranks), i))
    return [ranks[i] for i in order]


def level_shares(
    hosts: Sequence[Collection[int]], taken: Mapping[int, float], level: float
) -> list[dict[int, float]]:
    """Shares of each expert's hosts (rank -> share, ascending), all loads taken for equal.

    `taken`: what a rank computes of other experts. What it lacks to `level` it divides equally
    among these; where nobody lacks anything, an expert's hosts get equal shares.
    """
    num_on: dict[int, int] = {}
    for on in hosts:
        for rank in on:
            num_on[rank] = num_on.get(rank, 0) + 1
    result = []
    for on in hosts:
        room = {r: max(0.0, level - taken.get(r, 0.0)) / num_on[r] for r in sorted(on)}
        total = sum(room.values())
        result.append({r: w / total if total > 0.0 else 1.0 / len(room) for r, w in room.items()})
    return result
