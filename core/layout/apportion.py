"""Divides whole units (rows, tokens, shards, layers) by shares."""

from collections.abc import Iterable
from math import inf, isfinite


def apportion(total: int, shares: Iterable[float]) -> tuple[int, ...]:
    """Divide `total` whole units in proportion to `shares`, by the largest-remainder method.

    Args:
        total: the number of units, 0 or more.
        shares: finite weights, 0 or more, at least one above 0; only their proportions count.

    Returns:
        One count per share; they add up to `total`. Equal remainders favour the earlier share.

    Raises:
        ValueError: `total` or a share is negative, or no share is above 0.
    """
    weights = list(shares)
    whole = sum(weights)
    if total < 0 or not all(isfinite(w) and w >= 0.0 for w in weights) or not 0.0 < whole < inf:
        raise ValueError(f"{total} units cannot be divided by the shares {weights}")
    exact = [total * (weight / whole) for weight in weights]
    counts = [int(x + 1e-9) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)
