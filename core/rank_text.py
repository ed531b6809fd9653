"""How ranks are named in a sentence: short, however many they are."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

SHOWN_RUNS = 8


def rank_text(ranks: Iterable[int]) -> str:
    """`3`, `0-7 and 23`, or the first runs of numbers and how many ranks more; `none`.

    A sentence about 8,192 ranks is read by people: in a log, in a column beside others.
    """
    runs = list(_runs(sorted(set(ranks))))
    names = [name for first, last in runs[:SHOWN_RUNS] for name in _names(first, last)]
    if hidden := sum(last - first + 1 for first, last in runs[SHOWN_RUNS:]):
        names.append(f"{hidden:,} more")
    *others, newest = names or ["none"]
    return f"{', '.join(others)} and {newest}" if others else newest


def _runs(ordered: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    starts = [i for i, number in enumerate(ordered) if i == 0 or number != ordered[i - 1] + 1]
    for start, end in pairwise([*starts, len(ordered)]):
        yield ordered[start], ordered[end - 1]


def _names(first: int, last: int) -> list[str]:
    """Two neighbours are two names; three are a run."""
    if last - first < 2:
        return [str(number) for number in range(first, last + 1)]
    return [f"{first}-{last}"]
