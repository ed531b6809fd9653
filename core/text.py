"""Durations for people, and text from other programs as one printable line of bounded length.

For logs, terminals and pages: an agent's or a trainer's text never moves a cursor.
"""

from math import isfinite

MAX_CHARACTERS = 500

_UNITS = ((172_800, 86_400, "days"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"))


def one_line(text: str, most: int = MAX_CHARACTERS) -> str:
    """`text` cut to `most` characters, each unprintable character replaced by a blank."""
    if len(text) <= most and text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " for c in text[:most]).strip()


def format_s(duration_s: float) -> str:
    """A duration with up to three significant digits: 0.21 ms, 45.6 ms, 1.23 s, 12.5 min."""
    if not isfinite(duration_s):
        return "unknown"
    if not duration_s:
        return "0 s"
    rounded_s = abs(float(f"{duration_s:.2e}"))  # 0.9996 s is 1 s, not 1e+03 ms
    units = ((unit_s, unit) for least_s, unit_s, unit in _UNITS if rounded_s >= least_s)
    unit_s, unit = next(units, (1e-3, "ms"))
    value = duration_s / unit_s
    return f"{value:,.0f} {unit}" if abs(value) >= 1000.0 else f"{value:.3g} {unit}"
