"""What the live charts make of the rate of false alarms that was asked for."""

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import FEATURES, StepSample
from pacekeeper.predictor.detector.excursions import Excursions
from pacekeeper.predictor.detector.thresholds import (
    START_STEPS,
    StepNoise,
    Thresholds,
    measured_noise,
    mixed,
    thresholds,
)

KNOWN = StepNoise(sigma=0.02, freedom=1e6)


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


def made(samples: list[StepSample], *, rate: float = 0.1, noise: StepNoise = KNOWN) -> Thresholds:
    return thresholds(rate, samples, noise=noise, excursions=Excursions())


@pytest.mark.parametrize("change", [{"num_ranks": 400}, {"step_s": 0.01}])
def test_more_ranks_and_shorter_steps_take_higher_thresholds(change: dict[str, float]) -> None:
    few, many = heights(made(steps())), heights(made(steps(**change)))  # type: ignore[arg-type]
    assert all(high >= low for low, high in zip(few, many, strict=True))
    assert sum(many) > sum(few)


@pytest.mark.parametrize("parts", [1, 8])
def test_a_job_that_learns_from_few_steps_is_new_for_its_first_steps_only(parts: int) -> None:
    between = [
        thresholds(
            0.1,
            steps(num_steps=num_steps),
            noise=KNOWN,
            excursions=Excursions(num_folds=num_folds),
            parts_per_step=parts,
        ).between
        for num_steps, num_folds in ((13, 13 * parts), (13, START_STEPS * parts), (START_STEPS, 0))
    ]
    assert between[0] < between[1] == between[2]


def test_one_wild_sample_never_crosses_a_chart() -> None:
    for rate in (1e-3, 1e6):
        for rule in made(steps(), rate=rate).rules:
            assert rule.clip - rule.k < rule.h


def test_steps_that_take_no_time_and_absurd_rates_still_give_thresholds() -> None:
    for rate in (1e-12, 1e12):
        assert all(rule.h > 0.0 for rule in made(steps(step_s=0.0), rate=rate).rules)


def test_sigma_measured_on_few_steps_counts_larger() -> None:
    residuals = np.random.default_rng(0).normal(0.0, 0.02, (400, 4))
    weights = [
        made(steps(), noise=measured_noise(0.02, residuals[:count])).weight
        for count in (3, 6, 12, 400)
    ]
    assert weights == sorted(weights)
    assert weights[0] < 0.5 < 0.97 < weights[-1] < 1.0


def test_the_noise_of_other_roles_is_a_prior_and_no_more() -> None:
    own, other = StepNoise(sigma=0.01, freedom=4.0), StepNoise(sigma=0.002, freedom=400.0)
    young, old = mixed(own, [other]), mixed(StepNoise(sigma=0.01, freedom=4e4), [other])
    assert mixed(own, []) == own
    assert 0.002 < young.sigma < 0.006 and young.freedom == 20.0
    assert old.sigma == pytest.approx(0.01, rel=0.001)
    noisy = StepNoise(sigma=0.05, freedom=400.0)
    assert mixed(own, [other, other, noisy]).sigma == young.sigma, "one role alone proves nothing"
    unknown = StepNoise(sigma=0.1, freedom=2.0)
    assert mixed(own, [other, unknown]).sigma == young.sigma, "nor does one that is hardly known"


def test_the_first_steps_of_a_job_may_cost_more_than_its_rate() -> None:
    young, later = heights(made(steps(num_steps=3))), heights(made(steps()))
    assert all(low <= high for low, high in zip(young, later, strict=True))
    assert sum(young) < sum(later)
