"""Who keeps a copy of whose snapshot: another rank, in another failure domain where that can be.

Pure. All ranks of the layout stand in one circle, those of a domain side by side, and each rank's
keeper is so many places on as the largest domain is wide.
"""

from collections.abc import Collection, Hashable

from pacekeeper.core.layout.replica_spread import ALONE, DomainOf, domain


def keepers(ranks: Collection[int], domain_of: DomainOf = ALONE) -> dict[int, int]:
    """The keeper of each rank: each keeps one. Empty where nobody else is there.

    Where no domain has more than half of the ranks, every keeper is in another one. Where one has,
    as many of its ranks as can be have theirs elsewhere, and all ranks of the others have.
    """
    in_domain: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks):
        in_domain.setdefault(domain(domain_of, rank), []).append(rank)
    circle = [rank for members in in_domain.values() for rank in members]
    if len(circle) < 2:
        return {}
    widest = max(map(len, in_domain.values()))
    step = widest if widest < len(circle) else 1
    return {rank: circle[(i + step) % len(circle)] for i, rank in enumerate(circle)}
