"""Many ranks as few numbers: runs, first and last of each, ascending and apart. Pure.

A job's 8,192 ranks are one run, those of a node one more: what is kept or told of them stays small.
"""

from collections.abc import Collection, Iterable, Iterator

RankRanges = tuple[tuple[int, int], ...]
"""First and last of each run; between two of them at least one number is missing."""


def to_ranges(ranks: Iterable[int]) -> RankRanges:
    """These ranks, in whatever order and however often they are named."""
    return merge_ranges((rank, rank) for rank in ranks)


def iter_ranks(runs: RankRanges) -> Iterator[int]:
    """All of them, ascending."""
    for first, last in runs:
        yield from range(first, last + 1)


def count_ranks(runs: RankRanges) -> int:
    """How many they are."""
    return sum(last - first + 1 for first, last in runs)


def merge_ranges(runs: Iterable[tuple[int, int]]) -> RankRanges:
    """These runs, which may touch or overlap, as few as can be."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def split_ranges(runs: RankRanges, ranks: Collection[int]) -> tuple[RankRanges, RankRanges]:
    """(those of them that are among `ranks`, the others)."""
    wanted = ranks if isinstance(ranks, set | frozenset) else frozenset(ranks)
    inside = [rank for rank in iter_ranks(runs) if rank in wanted]
    if not inside:
        return (), runs
    outside = (rank for rank in iter_ranks(runs) if rank not in wanted)
    return to_ranges(inside), to_ranges(outside)


SHOWN_RANGES = 8


def format_ranks(ranks: Iterable[int]) -> str:
    """`3`, `0-7 and 23`, or the first runs of numbers and how many ranks more; `none`.

    A sentence about 8,192 ranks is read by people: in a log, in a column beside others.
    """
    return format_ranges(to_ranges(ranks))


def format_ranges(runs: RankRanges) -> str:
    """The same of ranks that are known as runs."""
    names = [name for first, last in runs[:SHOWN_RANGES] for name in _names(first, last)]
    if hidden := count_ranks(runs[SHOWN_RANGES:]):
        names.append(f"{hidden:,} more")
    *others, newest = names or ["none"]
    return f"{', '.join(others)} and {newest}" if others else newest


def _names(first: int, last: int) -> list[str]:
    """Two neighbours are two names; three are a run."""
    if last - first < 2:
        return [str(number) for number in range(first, last + 1)]
    return [f"{first}-{last}"]
