"""The dumb twin of `spread_hosts`: every rank is weighed anew for every host."""

from collections.abc import Sequence

from pacekeeper.core.spread import DomainOf, domain


def spread_twin(
    num_experts: int, replicas: int, ranks: Sequence[int], domain_of: DomainOf, *, turn: int
) -> list[tuple[int, ...]]:
    at = [domain(domain_of, rank) for rank in ranks]
    size = {name: at.count(name) for name in at}
    used = [0] * len(ranks)
    used_in = dict.fromkeys(at, 0)
    result: list[tuple[int, ...]] = []
    hosted: list[set[int]] = []
    for expert in range(num_experts):
        chosen: list[int] = []
        for _ in range(replicas):
            taken = {at[i] for i in chosen}
            is_wide = len(taken) == len(size)
            pick = min(
                (i for i in range(len(ranks)) if i not in chosen),
                key=lambda i: (
                    not is_wide and at[i] in taken,
                    used_in[at[i]] / size[at[i]],
                    used[i],
                    sum(len({i, j} & on) == 2 for on in hosted for j in chosen),
                    (i - expert - turn) % len(ranks),
                ),
            )
            chosen.append(pick)
            used[pick] += 1
            used_in[at[pick]] += 1
        hosted.append(set(chosen))
        result.append(tuple(sorted(ranks[i] for i in chosen)))
    return result
