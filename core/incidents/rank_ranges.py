"""Sets of ranks as ranges: (first, last) pairs, ascending and not adjacent.

The 8,192 ranks of a job are one range, those of a node one more: stored and sent values stay small.
"""

from collections.abc import Collection, Iterable, Iterator

RankRanges = tuple[tuple[int, int], ...]
"""First and last of each run; between two of them at least one number is missing."""


def to_ranges(ranks: Iterable[int]) -> RankRanges:
    """The ranges of `ranks`, given in any order and possibly repeated."""
    return merge_ranges((rank, rank) for rank in ranks)


def iter_ranks(runs: RankRanges) -> Iterator[int]:
    """All ranks of the ranges, ascending."""
    for first, last in runs:
        yield from range(first, last + 1)


def count_ranks(runs: RankRanges) -> int:
    """The number of ranks."""
    return sum(last - first + 1 for first, last in runs)


def merge_ranges(runs: Iterable[tuple[int, int]]) -> RankRanges:
    """Ranges that may touch or overlap, merged."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def split_ranges(runs: RankRanges, ranks: Collection[int]) -> tuple[RankRanges, RankRanges]:
    """(the part of `runs` that is in `ranks`, the rest)."""
    wanted = ranks if isinstance(ranks, set | frozenset) else frozenset(ranks)
    inside = [rank for rank in iter_ranks(runs) if rank in wanted]
    if not inside:
        return (), runs
    outside = (rank for rank in iter_ranks(runs) if rank not in wanted)
    return to_ranges(inside), to_ranges(outside)


SHOWN_RANGES = 8


def format_ranks(ranks: Iterable[int]) -> str:
    """`3`, `0-7 and 23`, or the first ranges and the number of further ranks; `none`."""
    return format_ranges(to_ranges(ranks))


def format_ranges(runs: RankRanges) -> str:
    """As `format_ranks`, for ranges."""
    names = [name for first, last in runs[:SHOWN_RANGES] for name in _names(first, last)]
    if hidden := count_ranks(runs[SHOWN_RANGES:]):
        names.append(f"{hidden:,} more")
    *others, newest = names or ["none"]
    return f"{', '.join(others)} and {newest}" if others else newest


def _names(first: int, last: int) -> list[str]:
    """Two adjacent ranks are two names; three are a range."""
    if last - first < 2:
        return [str(number) for number in range(first, last + 1)]
    return [f"{first}-{last}"]
