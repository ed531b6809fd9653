"""Where an expert's hosts stand: in as many failure domains as can be, on ranks little burdened.

Pure. A domain is what fails as one: a node, a rack. Its value is a name only; nothing is ordered by
it, so that whoever has the same ranks in the same domains finds the same hosts.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import lcm
from operator import add
from types import MappingProxyType

DomainOf = Mapping[int, Hashable]
"""The domain of each rank. A rank that is not named is a domain of its own."""

ALONE: DomainOf = MappingProxyType({})


def domain(domain_of: DomainOf, rank: int) -> Hashable:
    """The domain of `rank`."""
    return domain_of.get(rank, (None, rank))


def domains(domain_of: DomainOf, ranks: Iterable[int]) -> set[Hashable]:
    """The domains that `ranks` stand in."""
    return {domain(domain_of, rank) for rank in ranks}


def spread_hosts(
    num_experts: int, replicas: int, ranks: Sequence[int], domain_of: DomainOf, *, turn: int
) -> list[tuple[int, ...]]:
    """Hosts for each expert of one layer, ascending, on min(replicas, domains) distinct domains.

    Domains of equal size get the same number of slots, give or take one, and so do their ranks; a
    smaller one gets more per rank where the spread needs it. Two experts rarely share all hosts.
    `turn` shifts ties, so that layers differ. len(ranks) >= replicas.

    The next host is the rank of the least price: one whole number, in which every criterion
    outweighs all that come after it.
    """
    count = len(ranks)
    members: dict[Hashable, list[int]] = {}
    for place, rank in enumerate(ranks):
        members.setdefault(domain(domain_of, rank), []).append(place)
    own = [members[domain(domain_of, rank)] for rank in ranks]
    # From the last criterion to the first: turns to go, experts met of the same hosts, experts of
    # the rank, those of its domain for each rank of it, and whether its domain is taken.
    met = count
    used = met * (num_experts * replicas + 1)
    used_in = used * (num_experts + 1)
    slots = lcm(*map(len, own))
    is_taken = used_in * (num_experts * slots + 1)
    is_chosen = 2 * is_taken
    paid = [0] * count
    together: dict[int, list[int]] = {}
    result = []
    for expert in range(num_experts):
        start = (expert + turn) % count
        price = [cost + (place - start) % count for place, cost in enumerate(paid)]
        chosen: list[int] = []
        num_taken = 0
        for _ in range(replicas):
            pick = price.index(min(price))
            chosen.append(pick)
            if pick in together:
                price = list(map(add, price, together[pick]))
            price[pick] += is_chosen
            paid[pick] += used
            mates = own[pick]
            if num_taken < len(members):  # else all domains are open again
                num_taken += 1
                for place in mates:
                    price[place] += is_taken
                if num_taken == len(members):
                    price = [cost - is_taken for cost in price]
            more = slots // len(mates) * used_in
            for place in mates:
                price[place] += more
                paid[place] += more
        for place in chosen:
            row = together.setdefault(place, [0] * count)
            for other in chosen:
                row[other] += met
        result.append(tuple(sorted(ranks[place] for place in chosen)))
    return result


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
