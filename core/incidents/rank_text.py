"""How ranks are named in a sentence: short, however many they are."""

from collections.abc import Iterable

from pacekeeper.core.incidents.rank_ranges import Runs, num_ranks, runs_of

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
