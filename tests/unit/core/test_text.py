"""Durations for people."""

import pytest

from pacekeeper.core.text import format_s


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0 s"),
        (0.00021, "0.21 ms"),
        (0.001234, "1.23 ms"),
        (0.0456, "45.6 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.2345, "1.23 s"),
        (119.0, "119 s"),
        (750.0, "12.5 min"),
        (7199.9, "2 h"),
        (259_200.0, "3 days"),
        (-0.0021, "-2.1 ms"),
        (3.2e8, "3,704 days"),
        (float("nan"), "unknown"),
        (float("inf"), "unknown"),
    ],
)
def test_durations_are_short_and_have_a_unit(duration_s: float, text: str) -> None:
    assert format_s(duration_s) == text
