"""Thresholds against published tables, closed forms and what the rules promise."""

from dataclasses import replace
from math import exp, inf

import numpy as np
import pytest

from pacekeeper.predictor.stats.cusum_design import (
    autocorrelation,
    gaussian,
    mean_run_length,
    samples_between_alarms,
    threshold,
    whitened_shift,
)


def siegmund(h: float, k: float, mean: float) -> float:
    """ARL of a CUSUM chart in closed form: barrier moved by 1.166 for the overshoot."""
    drift, barrier = mean - k, h + 1.166
    return (exp(-2 * drift * barrier) + 2 * drift * barrier - 1) / (2 * drift**2)


def test_the_published_run_lengths_of_a_chart_come_out() -> None:
    law = gaussian()
    assert mean_run_length(law, k=0.5, clip=inf, h=5.0) == pytest.approx(930.9, rel=0.001)
    slow = mean_run_length(replace(law, at=law.at + 1.0), k=0.5, clip=inf, h=5.0)
    assert slow == pytest.approx(10.4, abs=0.05)


@pytest.mark.parametrize(
    ("shift", "samples", "h", "delay"),
    [
        (0.5, 1e4, 13.11, 49.1),
        (1.0, 1e4, 7.36, 15.1),
        (2.0, 1e4, 3.81, 4.56),
        (3.0, 1e4, 2.47, 2.32),
        (4.0, 1e4, 1.77, 1.46),
        (5.0, 1e4, 1.23, 1.10),
        (0.5, 1e6, 22.31, 85.9),
        (1.0, 1e6, 11.96, 24.3),
        (2.0, 1e6, 6.12, 6.86),
        (3.0, 1e6, 4.00, 3.34),
        (4.0, 1e6, 2.92, 2.08),
        (5.0, 1e6, 2.28, 1.44),
    ],
)
def test_thresholds_and_best_delays_are_those_of_the_table(
    shift: float, samples: float, h: float, delay: float
) -> None:
    found = threshold(gaussian(), k=shift / 2, clip=inf, samples=samples)
    assert found == pytest.approx(h, abs=0.035)
    shifted = replace(gaussian(), at=gaussian().at + shift)
    run_length = mean_run_length(shifted, k=shift / 2, clip=inf, h=found)
    assert max(1.0, run_length) == pytest.approx(delay, rel=0.005)


@pytest.mark.parametrize("mean", [0.0, 0.75, 1.0, 2.0])
def test_run_lengths_are_near_the_closed_form(mean: float) -> None:
    solved = mean_run_length(replace(gaussian(), at=gaussian().at + mean), k=0.5, clip=inf, h=6.0)
    assert solved == pytest.approx(siegmund(6.0, 0.5, mean), rel=0.04)


def test_a_chart_whose_clip_is_its_allowance_never_alarms_and_is_refused() -> None:
    assert mean_run_length(gaussian(), k=1.0, clip=1.0, h=0.5) == inf
    with pytest.raises(ValueError, match="clip"):
        threshold(gaussian(), k=1.0, clip=1.0, samples=1e4)


@pytest.mark.parametrize("samples", [1.0, 1e13])
def test_rates_that_can_not_be_solved_are_refused(samples: float) -> None:
    with pytest.raises(ValueError, match="samples"):
        threshold(gaussian(), k=0.5, clip=8.0, samples=samples)


def test_an_alarm_a_day_of_a_job_is_shared_by_all_samples_of_all_ranks() -> None:
    # 256 ranks x 32 micro-batches per 10 s: 7.1e7 samples a day (research, section 7.2).
    a_day = samples_between_alarms(1.0, num_ranks=256, samples_per_rank_s=3.2)
    assert a_day == pytest.approx(7.08e7, rel=0.001)
    with pytest.raises(ValueError, match="above 0"):
        samples_between_alarms(0.0, num_ranks=4, samples_per_rank_s=1.0)


@pytest.mark.parametrize("wanted", [-0.3, 0.0, 0.2, 0.6])
def test_the_autocorrelation_of_a_history_with_wild_samples_and_gaps(wanted: float) -> None:
    random = np.random.default_rng(5)
    values = random.standard_normal((2_000, 20))
    for i in range(1, len(values)):
        values[i] = wanted * values[i - 1] + np.sqrt(1 - wanted**2) * values[i]
    values[random.random(values.shape) < 0.01] = np.nan
    values[random.random(values.shape) < 0.001] = 50.0
    assert autocorrelation(values) == pytest.approx(wanted, abs=0.03)


def test_no_autocorrelation_is_told_from_too_few_pairs_or_none_at_all() -> None:
    assert autocorrelation(np.ones((50, 4))) == 0.0
    assert autocorrelation(np.random.default_rng(6).standard_normal((2, 3))) == 0.0


def test_what_whitening_leaves_of_a_shift() -> None:
    assert whitened_shift(3.0, 0.0) == 3.0
    assert whitened_shift(1.0, 0.2) == pytest.approx(0.8165, abs=1e-4)
