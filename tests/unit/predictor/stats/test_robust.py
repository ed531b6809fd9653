"""A scale is told by the middle of its deviations or by their tail, whichever is larger."""

import numpy as np
import pytest

from pacekeeper.predictor.stats.robust import ratio_interval, tailed_scale


def test_normal_deviations_have_their_sigma_by_any_tail() -> None:
    deviations = np.abs(np.random.default_rng(0).normal(0.0, [0.01, 0.02], (40_000, 2)))
    for tail in (0.75, 0.9, 0.95):
        assert tailed_scale(deviations, tail) == pytest.approx([0.01, 0.02], rel=0.02)


def test_the_larger_of_middle_and_tail_counts() -> None:
    few_far = np.where(np.arange(100) < 20, 10.0, 1.0)
    many_far = np.where(np.arange(100) < 60, 1.0, 0.0)
    assert float(tailed_scale(few_far, 0.9)) == pytest.approx(10.0 / 1.6449, rel=1e-4)
    assert float(tailed_scale(many_far, 0.9)) == pytest.approx(1.4826, rel=1e-4)


def test_gaps_are_left_out_and_nothing_has_no_scale() -> None:
    deviations = np.array([[1.0, np.nan], [np.nan, np.nan], [1.0, np.nan]])
    assert tailed_scale(deviations, 0.75) == pytest.approx([1.4826, 0.0], rel=1e-4)
    assert float(tailed_scale(np.zeros(0), 0.75)) == 0.0


def test_an_interval_is_as_wide_on_both_sides_of_its_ratio() -> None:
    ratio, low, high = ratio_interval(np.log(1.5), 0.1)
    assert (ratio, ratio / low, high / ratio) == pytest.approx((1.5, np.exp(0.196), np.exp(0.196)))
