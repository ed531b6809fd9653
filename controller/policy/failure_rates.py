"""How likely a rank is among those that the next loss takes: as told, until losses say more. Pure.

A layout stands until ranks are lost again. So what counts is the part of the ranks that a loss
takes, whenever it comes: on nodes that are taken in groups a quarter of them, of a thousand nodes
that fail one by one a thousandth.
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
