"""How noisy healthy ranks are, and how far chance brings them: told by the ranks themselves."""

from math import comb

import numpy as np
import pytest
from scipy.stats import norm, t

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.recorded.noise import (
    LEAST_NOISE,
    LEAST_WANDER,
    MEDIAN_EFFICIENCY,
    MOST_OWN,
    QUARTILE_EFFICIENCY,
    needed_strength,
    noise_of,
    thresholds,
)
from pacekeeper.predictor.recorded.residuals import Residuals
from pacekeeper.predictor.recorded.shift_scan import strongest_shifts

MIDDLE = 0.6745  # half of normal values are within so many sigma


def test_ranks_that_stay_where_chance_brings_them_need_what_theory_asks_for() -> None:
    rng = np.random.default_rng(0)
    assert needed_strength(np.sqrt(rng.gumbel(0.1, 0.04, 64).clip(0.0)), 0.01) == 1.0


def test_ranks_that_come_far_by_themselves_raise_what_accuses_one_of_them() -> None:
    rng = np.random.default_rng(0)
    far = np.sqrt(rng.gumbel(0.4, 0.15, 64).clip(0.0))
    assert needed_strength(far, 0.01) > 1.2
    assert needed_strength(far, 1e-4) > needed_strength(far, 0.01)


def test_suspects_do_not_raise_what_accuses_them() -> None:
    rng = np.random.default_rng(1)
    healthy = np.sqrt(rng.gumbel(0.1, 0.04, 40).clip(0.0))
    assert needed_strength(np.concatenate([healthy, np.full(24, 30.0)]), 0.01) == 1.0


def test_few_ranks_tell_nothing_of_the_tail() -> None:
    assert needed_strength(np.linspace(0.1, 0.99, 15), 0.01) == 1.0
    assert needed_strength(np.linspace(0.1, 0.99, 16), 0.01) > 1.0


def test_efficiencies_are_those_of_a_scale_by_one_quantile_of_normal_values() -> None:
    values = np.abs(np.random.default_rng(2).standard_normal((20_000, 200)))
    for share, expected in ((0.5, MEDIAN_EFFICIENCY), (0.75, QUARTILE_EFFICIENCY)):
        scales = np.quantile(values, share, axis=1)
        relative = float((scales.std() / scales.mean()) ** 2) * 200
        assert 0.5 / relative == pytest.approx(expected, abs=0.03)


def test_the_own_noise_of_a_rank_counts_for_what_its_steps_can_tell() -> None:
    by_step = 0.01 * np.random.default_rng(3).standard_normal((41, 64))
    common = float(
        np.median(noise_of(Residuals.of_steps(by_step), np.zeros(64, dtype=np.intp)).fast)
    )
    # Every change of rank 5 is as large as the next: whatever quantile is asked, its noise is 0.05.
    by_step[:, 5] = 0.05 * np.sqrt(2.0) * MIDDLE * np.arange(41)
    noise = noise_of(Residuals.of_steps(by_step), np.zeros(64, dtype=np.intp))
    weight = 40 * QUARTILE_EFFICIENCY / (8.0 + 40 * QUARTILE_EFFICIENCY)
    expected = np.sqrt((1.0 - weight) * common**2 + weight * 0.05**2)
    assert noise.fast[5] == pytest.approx(expected, rel=0.05)
    assert noise.freedom == pytest.approx(40 * 64 * QUARTILE_EFFICIENCY)


def test_no_clock_is_better_than_the_least_noise() -> None:
    by_step = 1e-5 * np.random.default_rng(4).standard_normal((20, 8))
    noise = noise_of(Residuals.of_steps(by_step), np.zeros(8, dtype=np.intp))
    assert (noise.fast == LEAST_NOISE).all()
    assert (noise.measured < 1e-4).all()


def test_wander_told_by_few_means_counts_for_little() -> None:
    by_step = np.zeros((24, 64))
    by_step[:, 5] = 0.1 * (np.arange(24) // 4 % 2)  # five changes of means over four steps
    weight = 5 * MEDIAN_EFFICIENCY / (8.0 + 5 * MEDIAN_EFFICIENCY)
    own = MOST_OWN * LEAST_WANDER
    expected = np.sqrt(weight * own**2 - LEAST_NOISE**2 / 4)
    wander = noise_of(Residuals.of_steps(by_step), np.zeros(64, dtype=np.intp)).wander
    assert wander[5] == pytest.approx(expected, rel=1e-6)


def test_among_ranks_with_bouts_of_noise_a_little_more_of_it_is_no_fault() -> None:
    rng = np.random.default_rng(5)
    quiet = 0.002 * rng.standard_normal((100, 64))
    bouts = quiet.copy()
    for rank, size in enumerate(np.linspace(0.004, 0.012, 64)):
        first = int(rng.integers(5, 90))
        bouts[first : first + 5, rank] += size

    def named(by_step: Array) -> list[int]:
        by_step = by_step.copy()
        by_step[50:55, 5] = quiet[50:55, 5] + 0.0165
        every = Residuals.of_steps(by_step)
        noise = noise_of(every, np.zeros(64, dtype=np.intp))
        found = strongest_shifts(every, noise, false_alarms=0.01, min_slowdown=1.0)
        return [shift.rank for shift in found]

    assert named(quiet) == [5]
    assert named(bouts) == []


@pytest.mark.parametrize("freedom", [300.0, 5000.0, 1e5])
def test_thresholds_of_more_groups_than_a_float_holds_go_on_where_the_others_end(
    freedom: float,
) -> None:
    asked = [thresholds(100, comb(2048, size), 0.01, freedom) for size in range(120, 900, 5)]
    for values in ([one.fast for one in asked], [one.sure for one in asked]):
        steps = np.diff(values) / values[:-1]
        assert (steps > 0.0).all() and (steps < 0.1).all(), "no edge where the formula changes"
    few = thresholds(100, 8, 0.01, freedom)
    chance = 0.005 / (8 * 100 * 101 / 2)
    assert few.fast == pytest.approx(t.isf(chance, freedom))
    assert few.sure == pytest.approx(norm.isf(chance))
