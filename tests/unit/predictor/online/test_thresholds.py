"""What the live charts make of the rate of false alarms that was asked for."""

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import FEATURES, StepSample
from pacekeeper.predictor.online.thresholds import START_STEPS, Thresholds, thresholds
from pacekeeper.predictor.stats.cusum_design import LEAST_HISTORY, gaussian, mean_run_length

QUIET = np.random.default_rng(0).normal(0.0, 0.02, (LEAST_HISTORY // 4 - 1, 4))


def steps(
    num_ranks: int = 4, step_s: float = 1.0, num_steps: int = START_STEPS
) -> list[StepSample]:
    observed_s = np.full(num_ranks, 0.5 * step_s)
    observed_s[-1] = step_s
    return [
        StepSample(
            step=step,
            generation=1,
            ranks=tuple(range(num_ranks)),
            features=np.ones((num_ranks, len(FEATURES))),
            observed_s=observed_s,
        )
        for step in range(num_steps)
    ]


def heights(limits: Thresholds) -> list[float]:
    return [rule.h for rule in limits.rules]


def test_the_charts_together_keep_to_the_rate_asked_for() -> None:
    limits = thresholds(0.1, steps(), sigma=0.02, residuals=QUIET)
    per_sample = sum(
        1.0 / mean_run_length(gaussian(), k=rule.k, clip=rule.clip, h=rule.h)
        for rule in limits.rules
    )
    per_day = per_sample * 4 * 86_400
    assert 0.05 < per_day <= 0.1


@pytest.mark.parametrize("change", [{"num_ranks": 400}, {"step_s": 0.01}])
def test_more_ranks_and_shorter_steps_take_higher_thresholds(change: dict[str, float]) -> None:
    few = heights(thresholds(0.1, steps(), sigma=0.02, residuals=QUIET))
    many = heights(thresholds(0.1, steps(**change), sigma=0.02, residuals=QUIET))  # type: ignore[arg-type]
    assert all(high > low for low, high in zip(few, many, strict=True))


def test_one_wild_sample_never_crosses_a_chart() -> None:
    residuals = np.random.default_rng(1).standard_t(3, (64, 64)) * 0.02
    for given in (QUIET, residuals):
        for rule in thresholds(0.1, steps(64), sigma=0.02, residuals=given).rules:
            assert rule.clip - rule.k < rule.h


def test_steps_that_take_no_time_and_absurd_rates_still_give_thresholds() -> None:
    for rate in (1e-12, 1e12):
        limits = thresholds(rate, steps(step_s=0.0), sigma=0.02, residuals=QUIET)
        assert all(rule.h > 0.0 for rule in limits.rules)


def test_a_short_table_of_residuals_counts_as_normal() -> None:
    wild = np.random.default_rng(2).standard_t(2, (LEAST_HISTORY // 4 - 1, 4))
    ours = thresholds(0.1, steps(), sigma=0.02, residuals=wild)
    assert ours.rules == thresholds(0.1, steps(), sigma=0.02, residuals=QUIET).rules


def test_heavy_tails_are_clipped_before_they_can_accuse() -> None:
    random = np.random.default_rng(3)
    heavy = random.standard_t(3, (32, 1_000)) / 1.134 * 0.02
    normal = thresholds(0.1, steps(1_000), sigma=0.02, residuals=QUIET)
    own = thresholds(0.1, steps(1_000), sigma=0.02, residuals=heavy)
    assert own.rules[0].clip < 0.5 * normal.rules[0].clip
    assert own.weight == pytest.approx(1.0, abs=0.01)


def test_residuals_that_repeat_themselves_weigh_less() -> None:
    random = np.random.default_rng(4)
    values = random.standard_normal((32, 1_000))
    for i in range(1, 32):
        values[i] = 0.4 * values[i - 1] + np.sqrt(1 - 0.16) * values[i]
    limits = thresholds(0.1, steps(1_000), sigma=0.02, residuals=0.02 * values)
    assert limits.weight == pytest.approx(np.sqrt(0.6 / 1.4), rel=0.05)


def test_normal_residuals_keep_the_thresholds_of_the_formula_however_many_there_are() -> None:
    values = np.random.default_rng(5).standard_normal((32, 1_000)) * 0.02
    own = thresholds(0.1, steps(), sigma=0.02, residuals=values)
    assert own.rules == thresholds(0.1, steps(), sigma=0.02, residuals=QUIET).rules


def test_sigma_measured_on_few_steps_counts_larger() -> None:
    weights = [
        thresholds(0.1, steps(), sigma=0.02, residuals=QUIET[:count]).weight
        for count in (3, 6, 12, 400)
    ]
    assert weights == sorted(weights)
    assert weights[0] < 0.5 < 0.97 < weights[-1] < 1.0


def test_the_first_steps_of_a_job_may_cost_more_than_its_rate() -> None:
    young = heights(thresholds(0.1, steps(num_steps=3), sigma=0.02, residuals=QUIET))
    later = heights(thresholds(0.1, steps(), sigma=0.02, residuals=QUIET))
    assert all(low < high for low, high in zip(young, later, strict=True))


def test_only_what_noise_that_lasts_does_not_explain_is_named() -> None:
    quiet, noisy = (
        thresholds(0.1, steps(), sigma=sigma, residuals=QUIET).least for sigma in (0.002, 0.014)
    )
    assert quiet == pytest.approx(0.01) and noisy == pytest.approx(0.07)
