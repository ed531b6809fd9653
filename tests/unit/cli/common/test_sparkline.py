"""A line of bars says where values are high and low, and where none is known."""

from math import nan

from pacekeeper.cli.common.sparkline import BARS, sparkline

LOW, HIGH = BARS[0], BARS[-1]


def test_the_lowest_and_the_highest_bar_are_the_extremes() -> None:
    assert sparkline([1.0, 3.0, 1.0], width=10) == LOW + HIGH + LOW
    assert sparkline([0.0, 0.5, 1.0], width=10)[1] == BARS[4]


def test_what_shares_a_place_is_its_mean() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0, 0.0, 0.0], width=3) == LOW + HIGH + LOW
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40


def test_equal_values_are_low_and_unknown_ones_a_gap() -> None:
    assert sparkline([2.0, 2.0], width=5) == LOW + LOW
    assert sparkline([1.0, nan, 2.0], width=5) == LOW + " " + HIGH
    assert sparkline([nan], width=5) == sparkline([], width=5) == ""


def test_lines_on_one_scale_can_be_compared() -> None:
    assert sparkline([1.0, 1.1], width=5, between=(1.0, 2.0)) == LOW + LOW
    assert sparkline([0.0, 9.0], width=5, between=(1.0, 2.0)) == LOW + HIGH, "beyond it, its ends"
