"""Where an expert's hosts stand: in as many failure domains as can be, on ranks little burdened.

Pure. A domain is what fails as one: a node, a rack. Its value is a name only; nothing is ordered by
it, so that whoever has the same ranks in the same domains finds the same hosts.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
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
    """
    at = [domain(domain_of, rank) for rank in ranks]
    size = {name: at.count(name) for name in at}
    used = [0] * len(ranks)
    used_in = dict.fromkeys(at, 0)
    together = [[0] * len(ranks) for _ in ranks]
    result = []
    for expert in range(num_experts):
        chosen: list[int] = []
        for _ in range(replicas):
            taken = {at[i] for i in chosen}
            is_wide = len(taken) == len(size)
            start = (expert + turn) % len(ranks)
            pick = min(
                (i for i in range(len(ranks)) if i not in chosen),
                key=lambda i: (
                    not is_wide and at[i] in taken,
                    used_in[at[i]] / size[at[i]],
                    used[i],
                    sum(together[i][j] for j in chosen),
                    (i - start) % len(ranks),
                ),
            )
            chosen.append(pick)
            used[pick] += 1
            used_in[at[pick]] += 1
        for i in chosen:
            for j in chosen:
                together[i][j] += 1
        result.append(tuple(sorted(ranks[i] for i in chosen)))
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
