"""Probability that a rank is among those that the next failure takes, estimated from the job's own.

A layout stays until ranks fail again, so the fraction of ranks that a failure takes matters, not
the time between failures: a quarter where nodes are pre-empted in groups, a thousandth where
single nodes of a thousand fail. From the second failure on it is the mean of the newest 32, in
which the setting counts as two more; it never falls below the setting. Not stored. Pure.
"""

from collections.abc import Collection, Sequence

MIN_LOSSES = 2  # fewer give no estimate
PRIOR_WEIGHT = 2.0  # the configured probability counts as so many losses
KEPT = 32  # of the newest losses


def add_loss(
    parts: tuple[float, ...], before: Collection[int], after: Collection[int]
) -> tuple[float, ...]:
    """Add the fraction of ranks lost in a change of layout to those of earlier losses.

    Args:
        parts: The fraction of the ranks that each loss so far took.
        before: The ranks before the change.
        after: The ranks after it, which may include new ones.
    """
    lost = set(before).difference(after)
    return (*parts, len(lost) / len(before))[-KEPT:] if lost else parts


def failure_probability(configured: float, parts: Sequence[float]) -> float:
    """Estimate the probability that a rank is among those that the next failure takes.

    Args:
        configured: The configured probability, a lower bound of the estimate.
        parts: The fraction of the ranks that each loss so far took.
    """
    if len(parts) < MIN_LOSSES:
        return configured
    mean = (PRIOR_WEIGHT * configured + sum(parts)) / (PRIOR_WEIGHT + len(parts))
    return max(configured, mean)
