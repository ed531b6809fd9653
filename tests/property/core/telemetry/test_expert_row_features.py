"""Four sums over the rows of the local experts price any convex cost that bends at the knots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.telemetry.expert_row_features import KNOTS, rows_over

counts = st.lists(st.integers(0, 5000), max_size=20)
slopes = st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6)


def price(rows: int, slope: list[float]) -> float:
    """Of one expert with `rows`: nothing without rows, else flat, then steeper at each knot."""
    if rows == 0:
        return 0.0
    bends = zip(KNOTS, slope[2:], strict=True)
    return slope[0] + slope[1] * rows + sum(more * max(0, rows - knot) for knot, more in bends)


@given(counts, slopes)
def test_the_sums_price_every_mixture_of_experts(rows: list[int], slope: list[float]) -> None:
    active = sum(n > 0 for n in rows)
    told = [active, sum(rows), *rows_over(rows)]
    by_sums = sum(a * b for a, b in zip(told, slope, strict=True))
    assert by_sums == pytest.approx(sum(price(n, slope) for n in rows))


@given(counts, counts)
def test_sums_of_layers_add_up(one: list[int], other: list[int]) -> None:
    parts = zip(rows_over(one), rows_over(other), strict=True)
    assert rows_over(one + other) == tuple(map(sum, parts))
