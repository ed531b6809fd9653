"""Probability that a rank is among those that the next failure takes, estimated from the job's own.

A layout stays until ranks fail again, so the fraction of ranks that a failure takes matters, not
the time between failures: a quarter where nodes are pre-empted in groups, a thousandth where
single nodes of a thousand fail. From the second failure on it is the mean of the newest 32, in
which the setting counts as two more; it never falls below the setting. Not stored. Pure.
"""

from collections.abc import Collection, Sequence

FEWEST = 2  # one loss is no habit
TOLD_COUNTS = 2.0  # what the settings say counts as much as so many losses
KEPT = 32  # of the newest losses


def after_change(
    parts: tuple[float, ...], before: Collection[int], after: Collection[int]
) -> tuple[float, ...]:
    """`parts`: of the ranks that each loss so far took. Ranks that are `after` may be new ones."""
    lost = set(before).difference(after)
    return (*parts, len(lost) / len(before))[-KEPT:] if lost else parts


def likelihood(told: float, parts: Sequence[float]) -> float:
    """That a rank is lost with the next loss; never below what the settings say."""
    if len(parts) < FEWEST:
        return told
    return max(told, (TOLD_COUNTS * told + sum(parts)) / (TOLD_COUNTS + len(parts)))
