"""Levels of a series: exact against brute force, edges kept, spikes drawn in, noise measured."""

from itertools import combinations

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.stats.change_points import (
    LONGEST_LEVEL,
    SMALLER_THIRD,
    WALK,
    block_means,
    common_lasting_noise,
    lasting_noise,
    levels,
    noise,
    slope,
    without_spikes,
)
from support.examples import seeds


def cost(values: Array, cuts: tuple[int, ...], sigma: float, penalty: float) -> float:
    parts = np.split(values, cuts)
    return sum(float(((p - p.mean()) ** 2).sum()) for p in parts) / sigma**2 + penalty * len(cuts)


@pytest.mark.parametrize("seed", seeds(20))
def test_no_other_cuts_explain_a_series_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = np.repeat(random.normal(0, 2, 3), (4, 3, 4)) + random.normal(0, 1, 11)
    found = levels(values, sigma=1.0, penalty=3.0)
    cuts = tuple(level.begin for level in found[1:])
    best = min(
        cost(values, other, 1.0, 3.0)
        for number in range(4)
        for other in combinations(range(1, values.size), number)
    )
    assert cost(values, cuts, 1.0, 3.0) <= best + 1e-9


def test_levels_cover_the_series_with_their_means() -> None:
    values = np.array([1.0] * 20 + [2.0] * 30)
    found = levels(values, sigma=0.1, penalty=18.0)
    assert [(one.begin, one.end, one.mean) for one in found] == [(0, 20, 1.0), (20, 50, 2.0)]
    assert levels(np.zeros(0), sigma=1.0, penalty=1.0) == ()


def test_a_very_long_level_is_cut_in_pieces_of_the_same_height() -> None:
    found = levels(np.ones(3 * LONGEST_LEVEL), sigma=0.1, penalty=18.0)
    assert max(one.num_blocks for one in found) <= LONGEST_LEVEL
    assert {one.mean for one in found} == {1.0}


def test_a_spike_is_drawn_in_and_an_edge_stays() -> None:
    values = np.array([1.0] * 50 + [1.5] * 50)
    values[20] = 30.0
    clean = without_spikes(values, resolution=0.0)
    assert clean[20] < 1.05
    assert np.delete(clean, 20).tolist() == np.delete(values, 20).tolist()


@pytest.mark.parametrize("half", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_values", [59, 100, 204])
@pytest.mark.parametrize("slowdown", [1.1, 1.3, 3.0])
def test_values_that_alternate_stay_to_both_ends(
    half: int, num_values: int, slowdown: float
) -> None:
    is_slow = np.arange(num_values) // half % 2 == 1
    values = np.where(is_slow, slowdown, 1.0)
    assert without_spikes(values, resolution=0.0).tolist() == values.tolist()


def test_what_the_clock_rounds_is_no_spike() -> None:
    """35 units and every tenth step 36: clipping the 36 would lose a tenth of a unit."""
    values = np.full(100, 35.0)
    values[::10] = 36.0
    assert without_spikes(values, resolution=1.0).tolist() == values.tolist()


def test_noise_is_blind_to_levels_and_slopes() -> None:
    clean = np.random.default_rng(0).normal(0, 0.01, 2000)
    ramp_and_jump = clean + np.linspace(0, 3, 2000) + np.repeat([0.0, 1.0], 1000)
    assert noise(clean) == pytest.approx(0.01, rel=0.15)
    assert noise(ramp_and_jump) == pytest.approx(0.01, rel=0.15)
    assert noise(np.array([1.0, 2.0])) == 0.0


def test_noise_that_lasts_counts_more() -> None:
    """Neighbours that err alike: their differences alone would call the series steady."""
    steady = np.random.default_rng(0).normal(0, 0.01, 2000)
    lasting = np.convolve(steady, np.ones(8) / np.sqrt(8), "valid")
    differences = np.median(np.abs(np.diff(lasting))) * 1.4826 / np.sqrt(2)
    assert noise(lasting) > 2.0 * differences


def test_a_fault_that_comes_and_goes_is_no_noise() -> None:
    steady = np.random.default_rng(0).normal(0, 0.01, 400)
    lengths = np.random.default_rng(1).integers(3, 9, 80)
    is_slow = np.repeat(np.arange(80) % 2 == 1, lengths)[:400]
    assert lasting_noise(steady + 0.3 * is_slow) > 0.1
    assert noise(steady + 0.3 * is_slow) < 0.03
    assert noise(steady + 0.3 * is_slow, lasting=0.05) == 0.05


def test_edges_every_few_blocks_are_no_noise() -> None:
    steady = np.random.default_rng(0).normal(0, 0.01, 400)
    often = np.repeat(np.arange(400) % 2 == 1, np.resize([1, 2, 2], 400))[:400]
    assert noise(steady + 0.3 * often) > 0.1
    assert noise(steady + 0.3 * often, quantile=SMALLER_THIRD) < 0.05
    assert noise(steady, quantile=SMALLER_THIRD) == pytest.approx(0.01, rel=0.15)


def test_a_random_walk_counts_in_full() -> None:
    walk = np.cumsum(np.random.default_rng(0).normal(0, 0.01, 20_000))
    assert lasting_noise(walk) == pytest.approx(WALK * 0.01 / np.sqrt(2.0), rel=0.1)


def test_noise_of_replicates_is_theirs_together() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(0, 0.01, (9, 400))
    rows[0, 100:150] += 0.3
    rows[1, :40] = np.nan
    assert common_lasting_noise(rows) == pytest.approx(0.01, rel=0.15)
    assert common_lasting_noise(rows[:, :8]) < 0.03
    assert common_lasting_noise(np.full((2, 400), np.nan)) == 0.0


def test_a_slope_is_seen_and_an_edge_or_a_box_is_none() -> None:
    ramp = np.linspace(0.0, 1.0, 101)
    assert slope(ramp) == pytest.approx(0.01)
    box = np.zeros(100)
    box[30:60] = 1.0
    assert slope(box) == 0.0
    assert slope(np.repeat([0.0, 1.0], 50)) == 0.0
    assert slope(np.zeros(3)) == 0.0


def test_means_of_blocks_leave_out_what_is_unknown() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 7.0])
    means = block_means(values, 2)
    assert means[:2].tolist() == [2.0, 5.0] and means[2] == 7.0  # the odd one joins the last
    assert np.isnan(block_means(np.array([np.nan, np.nan]), 2)).all()
