"""Features of the distribution of token rows over a rank's local experts: sums with knots.

A grouped product costs the same until an expert's rows fill the device, then grows with the rows.
With n_e rows at expert e, the sum of g(n_e) for a convex, piecewise linear g with knots KNOTS needs
only the number of active experts, the sum of n_e, and for each knot the sum of max(0, n_e - knot).
Sums are additive over layers, micro-batches and steps. The knots are fixed, a factor of 4 apart,
because the trainer does not know those of the fit; the fit decides which of them matter.
"""

from collections.abc import Sequence

# Row counts at which g may bend: a factor of 4 apart, from a processor's tile to the last regime
# change seen on accelerators (research: 3 to 5 regimes up to 2,048 rows).
KNOTS = (16, 64, 256, 1024)
NO_ROWS_OVER = (0,) * len(KNOTS)


def rows_over(counts: Sequence[int]) -> tuple[int, ...]:
    """For each knot, the rows beyond it, summed over experts that computed `counts` rows."""
    return tuple(sum(n - knot for n in counts if n > knot) for knot in KNOTS)
