"""Many ranks as few numbers: runs, first and last of each, ascending and apart. Pure.

A job's 8,192 ranks are one run, those of a node one more: what is kept or told of them stays small.
"""

from collections.abc import Collection, Iterable, Iterator

Runs = tuple[tuple[int, int], ...]
"""First and last of each run; between two of them at least one number is missing."""


def runs_of(ranks: Iterable[int]) -> Runs:
    """These ranks, in whatever order and however often they are named."""
    return joined((rank, rank) for rank in ranks)


def ranks_of(runs: Runs) -> Iterator[int]:
    """All of them, ascending."""
    for first, last in runs:
        yield from range(first, last + 1)


def num_ranks(runs: Runs) -> int:
    """How many they are."""
    return sum(last - first + 1 for first, last in runs)


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """These runs, which may touch or overlap, as few as can be."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def divided(runs: Runs, ranks: Collection[int]) -> tuple[Runs, Runs]:
    """(those of them that are among `ranks`, the others)."""
    wanted = ranks if isinstance(ranks, set | frozenset) else frozenset(ranks)
    inside = [rank for rank in ranks_of(runs) if rank in wanted]
    if not inside:
        return (), runs
    outside = (rank for rank in ranks_of(runs) if rank not in wanted)
    return runs_of(inside), runs_of(outside)
