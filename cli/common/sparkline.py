"""Sparklines: a series as one line of block characters, for terminals."""

import math
from collections.abc import Sequence

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
GAP = " "  # no value


def sparkline(
    values: Sequence[float], *, width: int, between: tuple[float, float] | None = None
) -> str:
    """Draw a series as bars; values that share a character are averaged.

    Args:
        values: the series; NaN for missing values.
        width: maximum number of characters.
        between: values of the lowest and the highest bar; default: those of the series. Pass the
            same pair for lines that are to be compared.

    Returns:
        One line; empty if the series has no finite value.
    """
    if not any(map(math.isfinite, values)):
        return ""
    count = min(width, len(values))
    places = [
        values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)
    ]
    means = [_mean(place) for place in places]
    known = [mean for mean in means if mean is not None]
    low, high = between or (min(known), max(known))
    return "".join(GAP if mean is None else _bar(mean - low, high - low) for mean in means)


def _bar(above: float, spread: float) -> str:
    at = 0 if spread <= 0.0 else int(above / spread * len(BARS))
    return BARS[max(0, min(at, len(BARS) - 1))]


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None
