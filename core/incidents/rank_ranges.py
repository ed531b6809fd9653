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


SHOWN_RUNS = 8


def rank_text(ranks: Iterable[int]) -> str:
    """`3`, `0-7 and 23`, or the first runs of numbers and how many ranks more; `none`.

    A sentence about 8,192 ranks is read by people: in a log, in a column beside others.
    """
    return run_text(runs_of(ranks))


def run_text(runs: Runs) -> str:
    """The same of ranks that are known as runs."""
    names = [name for first, last in runs[:SHOWN_RUNS] for name in _names(first, last)]
    if hidden := num_ranks(runs[SHOWN_RUNS:]):
        names.append(f"{hidden:,} more")
    *others, newest = names or ["none"]
    return f"{', '.join(others)} and {newest}" if others else newest


def _names(first: int, last: int) -> list[str]:
    """Two neighbours are two names; three are a run."""
    if last - first < 2:
        return [str(number) for number in range(first, last + 1)]
    return [f"{first}-{last}"]
