"""The common cost model: neither a slow rank, nor a noisy host, nor a single layout bends it."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import StepSample
from pacekeeper.predictor.cost.model import CostModel, fit, log_ratios
from support.examples import seeds
from support.synthetic_job import CPU_CLOCK, DEVICE_CLOCK, SyntheticJob

WARMUP = 12


def warmed_up(job: SyntheticJob, slow: dict[int, float] | None = None) -> CostModel:
    return fit([job.next(slow) for _ in range(WARMUP)])


def quiet(job: SyntheticJob) -> StepSample:
    """The next step without any noise."""
    job.noise = job.common = job.outliers = 0.0
    job._noise[:] = 0.0
    return job.next()


def level_errors(model: CostModel, sample: StepSample) -> np.ndarray:
    return np.abs(np.log(sample.observed_s / model.expected_s(sample.features)))


@pytest.mark.parametrize("seed", seeds(6))
def test_a_fit_predicts_the_layout_it_saw(seed: int) -> None:
    job = SyntheticJob(seed=seed, **DEVICE_CLOCK)
    assert level_errors(warmed_up(job), quiet(job)).max() < 0.04


@pytest.mark.parametrize("seed", seeds(6))
def test_a_rank_slow_from_the_start_is_its_own_multiplier_and_bends_nothing(seed: int) -> None:
    job = SyntheticJob(seed=seed, **DEVICE_CLOCK)
    model = warmed_up(job, {2: 1.6})
    assert model.multipliers[2] == pytest.approx(1.6, rel=0.06)
    # A few per cent may pass for a rank's own pace (RANK_SPREAD); a slow one is 10 % and more.
    assert all(model.multipliers[rank] == pytest.approx(1.0, abs=0.05) for rank in (0, 1, 3))
    assert level_errors(model, quiet(job)).max() < 0.06


@pytest.mark.parametrize("seed", seeds(6))
def test_noise_that_all_ranks_share_is_no_noise_of_a_rank(seed: int) -> None:
    shared = SyntheticJob(seed=seed, noise=0.02, common=0.3)
    alone = SyntheticJob(seed=seed, noise=0.02)
    assert warmed_up(shared).sigma == pytest.approx(warmed_up(alone).sigma, rel=0.5)


@pytest.mark.parametrize("seed", seeds(6))
def test_what_a_new_layout_is_mispriced_by_lies_within_the_models_doubt(seed: int) -> None:
    job = SyntheticJob(seed=seed, **CPU_CLOCK)
    model = warmed_up(job)
    for _ in range(5):
        job.shuffle()
        sample = quiet(job)
        beyond = log_ratios(model, sample) - 3.0 * model.doubt(sample.features)
        assert beyond.max() < np.log(1.10)


def test_doubt_is_nothing_where_all_ranks_do_the_same_and_more_where_they_differ() -> None:
    job = SyntheticJob(seed=0, **DEVICE_CLOCK)
    model = warmed_up(job)
    same = np.repeat(job.next().features[:1], 4, axis=0)
    assert model.doubt(same) == pytest.approx(np.zeros(4), abs=1e-12)
    other = same.copy()
    other[1, 1] *= 3.0  # tokens
    assert model.doubt(other)[1] > 0.01
    assert model.doubt(other)[0] == pytest.approx(0.0, abs=1e-12)


def test_no_coefficient_is_negative() -> None:
    for seed in range(10):
        assert (warmed_up(SyntheticJob(seed=seed, **CPU_CLOCK)).coefficients >= 0.0).all()


def test_features_a_job_does_not_have_cost_nothing_and_break_nothing() -> None:
    samples = []
    job = SyntheticJob(seed=1, **DEVICE_CLOCK)
    for _ in range(WARMUP):
        sample = job.next()
        features = sample.features.copy()
        features[:, 2:] = 0.0  # a dense model whose trainer tells tokens only
        samples.append(replace(sample, features=features))
    model = fit(samples)
    assert (model.coefficients[2:] == 0.0).all()
    assert level_errors(model, samples[-1]).max() < 0.25


def test_the_fit_does_not_know_ranks_by_name_or_order() -> None:
    job = SyntheticJob(seed=2, **DEVICE_CLOCK)
    samples = [job.next({1: 1.5}) for _ in range(WARMUP)]
    renamed = [
        replace(
            s,
            ranks=tuple(10 * rank + 3 for rank in s.ranks),
            features=s.features[::-1],
            observed_s=s.observed_s[::-1],
        )
        for s in samples
    ]
    first, second = fit(samples), fit(renamed)
    assert second.coefficients == pytest.approx(first.coefficients, rel=1e-3)
    assert second.multipliers[23] == pytest.approx(first.multipliers[1], rel=1e-3)


def test_a_fault_in_the_middle_of_the_warm_up_does_not_make_the_clock_look_noisy() -> None:
    job = SyntheticJob(seed=3, **DEVICE_CLOCK)
    healthy = fit([job.next() for _ in range(WARMUP)])
    job = SyntheticJob(seed=3, **DEVICE_CLOCK)
    struck = fit([job.next({0: 1.6} if step >= 8 else None) for step in range(WARMUP)])
    assert struck.sigma < 2.0 * healthy.sigma


def test_nothing_can_be_learnt_from_nothing() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fit([])
    sample = SyntheticJob(seed=0).next()
    with pytest.raises(ValueError, match="took any time"):
        fit([replace(sample, observed_s=np.zeros(4))])


def test_one_step_of_one_rank_is_enough_to_begin_with() -> None:
    sample = SyntheticJob(seed=0, num_ranks=1, noise=0.0).next()
    model = fit([sample])
    assert model.expected_s(sample.features) == pytest.approx(sample.observed_s, rel=0.2)


@pytest.mark.parametrize("seed", seeds(6))
def test_noise_that_all_ranks_share_does_not_move_the_coefficients(seed: int) -> None:
    # Both jobs draw the same random numbers; 20 % more or less of all coefficients is a level.
    shared = warmed_up(SyntheticJob(seed=seed, noise=0.005, common=0.3)).coefficients
    alone = warmed_up(SyntheticJob(seed=seed, noise=0.005)).coefficients
    job = SyntheticJob(seed=seed, noise=0.0)
    job.shuffle()
    features = job.next().features
    ratio = np.log((features @ shared) / (features @ alone))
    assert np.abs(ratio - np.median(ratio)).max() < 0.03
