"""Whole things by shares: rows, tokens, shards, layers. Pure."""

from collections.abc import Iterable
from math import inf, isfinite


def apportion(total: int, shares: Iterable[float]) -> tuple[int, ...]:
    """Split `total` whole things by `shares` (largest remainder; ties go to the first).

    Shares count in proportion to their sum. Raises ValueError where there is nothing to share by.
    """
    weights = list(shares)
    whole = sum(weights)
    if total < 0 or not all(isfinite(w) and w >= 0.0 for w in weights) or not 0.0 < whole < inf:
        raise ValueError(f"{total} things can not be split by the shares {weights}")
    exact = [total * (weight / whole) for weight in weights]
    counts = [int(x + 1e-9) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)
