"""Divides whole units (rows, tokens, shards, layers) by shares, and rows into micro-batches.

One rule says which rows of a global batch make a micro-batch: the row at place j is in micro-batch
j modulo their number, on any layout. So pipelines and stages that have consecutive places have rows
of a micro-batch that are consecutive, too, equal in number to within one.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf, isfinite
from operator import lt

SHARE_TOLERANCE = 1e-6


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


def consecutive(total: int, shares: Iterable[float]) -> tuple[range, ...]:
    """Return the ranges of `apportion`'s counts, one after the other from 0 to `total`.

    Arguments and errors as of `apportion`.
    """
    counts = apportion(total, shares)
    ends = accumulate(counts)
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def num_micro_batches(most_rows: int, rows_per_microbatch: int) -> int:
    """Return how many micro-batches all pipelines run: as many as the most rows need.

    Args:
        most_rows: rows of a step, of the pipeline and stage with most.
        rows_per_microbatch: the most rows in a micro-batch, at least 1.
    """
    return -(-most_rows // rows_per_microbatch)


def micro_batch_places(places: range, number: int, count: int) -> range:
    """Return those of consecutive `places` of a global batch that are in a micro-batch.

    Args:
        places: that a pipeline computes at a stage.
        number: of the micro-batch, from 0.
        count: of the micro-batches of the step.
    """
    return range(places.start + (number - places.start) % count, places.stop, count)


def micro_batch_rows(places: range, number: int, count: int) -> range:
    """Return the numbers of `micro_batch_places` among all rows of the micro-batch.

    These begin with 0 at the lowest place, in any pipeline.
    """
    own = micro_batch_places(places, number, count)
    first = (own.start - number) // count
    return range(first, first + len(own))


def check_shares(what: tuple[object, ...], ranks: Sequence[int], shares: Sequence[float]) -> None:
    """Check one share list; the work per item runs in C, as layouts have tens of thousands.

    Raises:
        ValueError: begins with the words of `what`: there is no rank, ranks do not ascend, or
            shares are negative or do not add up to 1.
    """
    if not ranks:
        raise ValueError(f"{_text(what)}: it has no holder")
    if not all(map(lt, ranks, ranks[1:])):
        raise ValueError(f"{_text(what)}: ranks must ascend, each once, got {list(ranks)}")
    total = sum(shares)
    if not isfinite(total) or min(shares) < 0.0:
        raise ValueError(f"{_text(what)}: shares must be finite and not negative")
    if abs(total - 1.0) > SHARE_TOLERANCE:
        raise ValueError(f"{_text(what)}: shares must add up to 1")


def _text(what: tuple[object, ...]) -> str:
    return " ".join(map(str, what))
