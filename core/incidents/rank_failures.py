"""The failed ranks of one incident, with reason and time.

Ranks that failed for the same reason at the same time are one value with their numbers as ranges: a
killed job of 8,192 ranks is a few values.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pacekeeper.core.incidents.rank_ranges import (
    RankRanges,
    count_ranks,
    format_ranges,
    merge_ranges,
    split_ranges,
    to_ranges,
)

SAME_MOMENT_S = 1.0  # agents report as often: nobody knows it better
SHOWN_REASONS = 3  # in one sentence
# A reason is said of one rank; of several it reads otherwise.
_OF_SEVERAL = (("its process", "their processes"), ("without it", "without them"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailures:
    """Ranks whose failures have one reason and were reported within a second from `unix_s` on.

    `step`: the job's newest step then. `closed_unix_s`, `closed_step`: when the job continued
    without them, or no longer had to; None: it has not.
    """

    ranks: RankRanges
    reason: str
    step: int
    unix_s: float
    closed_unix_s: float | None = None
    closed_step: int | None = None

    @property
    def is_open(self) -> bool:
        return self.closed_unix_s is None


def add_failures(
    known: tuple[RankFailures, ...], dead: Mapping[int, str], step: int, unix_s: float
) -> tuple[RankFailures, ...]:
    """`known` with newly failed ranks and their reasons, in order of report.

    Args:
        known: the failures so far.
        dead: rank -> reason of the new failures.
        step: the job's newest step.
        unix_s: the time of the report.
    """
    by_reason: dict[str, list[int]] = {}
    for rank, reason in dead.items():
        by_reason.setdefault(reason, []).append(rank)
    after = list(known)
    for reason, ranks in by_reason.items():
        runs = to_ranges(ranks)
        for i, old in enumerate(after):
            if _is_same(old, reason, step, unix_s):
                after[i] = replace(old, ranks=merge_ranges((*old.ranks, *runs)))
                break
        else:
            after.append(RankFailures(ranks=runs, reason=reason, step=step, unix_s=unix_s))
    return tuple(after)


def _is_same(old: RankFailures, reason: str, step: int, unix_s: float) -> bool:
    is_now = abs(unix_s - old.unix_s) < SAME_MOMENT_S
    return old.is_open and is_now and (old.reason, old.step) == (reason, step)


def close_failures(
    known: tuple[RankFailures, ...], ranks: Collection[int], unix_s: float, step: int
) -> tuple[RankFailures, ...]:
    """`known` with the failures of `ranks` closed; other ranks of the same failure stay open."""
    after: list[RankFailures] = []
    for old in known:
        over, left = split_ranges(old.ranks, ranks) if old.is_open else ((), old.ranks)
        if over:
            after.append(replace(old, ranks=over, closed_unix_s=unix_s, closed_step=step))
        if left:
            after.append(replace(old, ranks=left))
    return tuple(after)


def failed_ranks(deaths: Iterable[RankFailures]) -> RankRanges:
    """All failed ranks."""
    return merge_ranges(run for one in deaths for run in one.ranks)


def open_failed_ranks(deaths: Iterable[RankFailures]) -> RankRanges:
    """The failed ranks that the job has not continued without."""
    return failed_ranks(one for one in deaths if one.is_open)


def describe_failures(deaths: Iterable[RankFailures]) -> str:
    """One sentence: the failed ranks by reason; beyond a few reasons only the number of ranks."""
    by_reason: dict[str, RankRanges] = {}
    for one in deaths:
        by_reason[one.reason] = merge_ranges((*by_reason.get(one.reason, ()), *one.ranks))
    told = [
        describe_failure(runs, reason) for reason, runs in list(by_reason.items())[:SHOWN_REASONS]
    ]
    others = list(by_reason.values())[SHOWN_REASONS:]
    if count := sum(map(count_ranks, others)):
        told.append(f"{count:,} more of {len(others)} other reasons")
    return "; ".join(told)


def describe_failure(runs: RankRanges, reason: str) -> str:
    """`rank 3 is dead: its process ended by signal 9`, or the same of several."""
    if count_ranks(runs) == 1:
        return f"rank {format_ranges(runs)} is dead: {reason}"
    return f"ranks {format_ranges(runs)} are dead: {plural_reason(reason)}"


def plural_reason(reason: str) -> str:
    """The reason of one rank's failure, rephrased for several ranks."""
    for one, several in _OF_SEVERAL:
        reason = reason.replace(one, several)
    return reason


def ranks_label(runs: RankRanges) -> str:
    """`rank 3`, or `ranks 0-7 and 23`."""
    return f"rank{'s' if count_ranks(runs) > 1 else ''} {format_ranges(runs)}"


def nodes_label(names: Sequence[str], count: int) -> str:
    """`gpu-0 and gpu-1`, or the first of `count` nodes by name and how many more; may be empty."""
    if count <= len(names):
        *others, newest = names or ("",)
        return f"{', '.join(others)} and {newest}" if others else newest
    return f"{', '.join(names)} and {count - len(names):,} more nodes"
