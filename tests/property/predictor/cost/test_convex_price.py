"""The model finds a bent price of experts, learns no fault, follows a drift and knows its error."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.telemetry.expert_row_features import KNOTS
from pacekeeper.predictor.cost.features import BENDS, FEATURES, Array, StepSample
from pacekeeper.predictor.cost.model import CostModel, fit
from pacekeeper.predictor.detector.state import begin, model_of
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import examples, seeds
from support.synthetic_job import DEVICE_CLOCK, SyntheticJob

RANKS, EXPERTS, FEW = 4, 16, 12
TOKENS, FIXED_S, TOKEN_S = 2000.0, 0.01, 2e-5
CONFIG = DetectorConfig()


def price_s(rows: Array, knee: float, row_s: float) -> Array:
    """Of an expert: flat until `knee` rows fill the device, then in proportion to them."""
    return np.where(rows > 0.0, row_s * np.maximum(rows, knee), 0.0)


def work_of(rows: Array, tokens: Array) -> Array:
    """Features of ranks whose experts compute `rows` [ranks, experts]."""
    over = [np.maximum(rows - knot, 0.0).sum(axis=1) for knot in KNOTS]
    ones, none = np.ones(len(rows)), np.zeros(len(rows))
    active = (rows > 0.0).sum(axis=1)
    return np.stack([ones, tokens, none, rows.sum(axis=1), active, none, none, *over], axis=1)


def steps(
    seed: int,
    knee: float,
    row_s: float,
    *,
    noise: float,
    num_steps: int,
    reach: float = 6.0,
    paces: float = 0.0,
) -> list[StepSample]:
    """A job whose experts get from a few rows to `reach` powers of two more, at random.

    `paces`: sigma of the log of the ranks' own healthy paces.
    """
    random, made = np.random.default_rng(seed), []
    pace = np.exp(random.normal(0.0, paces, RANKS))
    for step in range(num_steps):
        rows = np.rint(8.0 * 2.0 ** random.uniform(0.0, reach, (RANKS, EXPERTS)))
        rows *= random.random((RANKS, EXPERTS)) < 0.8  # some get none
        tokens = np.rint(TOKENS * random.uniform(0.8, 1.2, RANKS))
        true_s = FIXED_S + TOKEN_S * tokens + price_s(rows, knee, row_s).sum(axis=1)
        made.append(
            StepSample(
                step=step,
                generation=1,
                ranks=tuple(range(RANKS)),
                features=work_of(rows, tokens),
                observed_s=true_s * pace * np.exp(random.normal(0.0, noise, RANKS)),
            )
        )
    return made


def expert_s(model: CostModel, rows: float) -> float:
    """What one expert with so many rows costs by the model, beyond having any at all."""
    work = work_of(np.array([[rows]]), np.zeros(1))[0]
    work[FEATURES.index("one")] = 0.0
    return float(work @ model.coefficients)


@given(
    seed=st.integers(0, 10_000),
    knee=st.sampled_from([float(knot) for knot in KNOTS[:3]]),
    row_s=st.floats(1e-6, 2e-5),
)
@settings(max_examples=examples(25), deadline=None)
def test_a_knee_in_the_price_of_experts_is_recovered(seed: int, knee: float, row_s: float) -> None:
    model = fit(steps(seed, knee, row_s, noise=0.002, num_steps=150))
    told = [expert_s(model, rows) for rows in (8.0, knee, 2.0 * knee, 400.0)]
    true = [row_s * max(rows, knee) for rows in (8.0, knee, 2.0 * knee, 400.0)]
    whole_s = FIXED_S + TOKEN_S * TOKENS + EXPERTS * row_s * 150.0
    # Of a step, all experts being alike: the least that a step's time can tell about them.
    errors = EXPERTS * np.abs(np.array(told) - np.array(true)) / whole_s
    assert errors.max() < 0.08


@given(seed=st.integers(0, 10_000), noise=st.floats(0.001, 0.2))
@settings(max_examples=examples(25), deadline=None)
def test_the_price_of_experts_is_convex_and_never_falls(seed: int, noise: float) -> None:
    model = fit(steps(seed, 64.0, 1e-5, noise=noise, num_steps=FEW))
    rows = np.arange(1.0, 3000.0, 7.0)
    slopes = np.diff([expert_s(model, n) for n in rows])
    assert slopes.min() >= 0.0 and np.diff(slopes).min() > -1e-12


def test_a_sum_of_rows_alone_could_not_price_them() -> None:
    # Same rows, differently spread: 16 experts with 16 rows each take as long as with 64.
    made = steps(1, 64.0, 2e-5, noise=0.002, num_steps=150)
    bends = [FEATURES.index(name) for name in BENDS]
    blunt = []
    for sample in made:
        features = sample.features.copy()
        features[:, bends] = 0.0
        blunt.append(replace(sample, features=features))
    held_out = steps(2, 64.0, 2e-5, noise=0.0, num_steps=50)

    def error(model: CostModel, *, is_blunt: bool) -> float:
        errors = []
        for sample in held_out:
            features = sample.features.copy()
            features[:, bends] *= not is_blunt
            errors.append(np.abs(np.log(sample.observed_s / model.expected_s(features))))
        return float(np.mean(errors))

    assert error(fit(made), is_blunt=False) < 0.25 * error(fit(blunt), is_blunt=True)


@pytest.mark.parametrize("num_steps", [FEW, 200])
@pytest.mark.parametrize("noise", [0.01, 0.08])
def test_the_interval_holds_95_percent_of_steps_it_has_not_seen(
    num_steps: int, noise: float
) -> None:
    inside: list[bool] = []
    for seed in range(30):
        made = steps(seed, 64.0, 1e-5, noise=noise, num_steps=num_steps + 40, paces=0.02)
        model = fit(made[:num_steps])
        for sample in made[num_steps:]:
            least_s, most_s = model.interval_s(sample.features)
            inside += ((least_s <= sample.observed_s) & (sample.observed_s <= most_s)).tolist()
    assert 0.93 <= np.mean(inside) <= 0.98


def test_the_interval_widens_with_work_unlike_any_seen() -> None:
    model = fit(steps(3, 64.0, 1e-5, noise=0.01, num_steps=60, reach=1.0))
    widths = []
    for factor in (1.0, 1.5, 4.0, 40.0):
        work = work_of(np.full((1, EXPERTS), 12.0 * factor), np.array([TOKENS]))
        least_s, most_s = model.interval_s(work)
        widths.append(float(np.log(most_s / least_s)[0]))
    # Experts were seen with 8 to 16 rows: where their price bends beyond that, nobody knows.
    assert widths == sorted(widths) and widths[0] < 0.1 and widths[2] > 1.0


def test_noise_over_a_long_history_does_not_pull_all_prices_down() -> None:
    made = steps(7, 64.0, 1e-5, noise=0.02, num_steps=250)
    model = fit(made)
    errors = [np.log(s.observed_s / model.expected_s(s.features)) for s in made]
    assert np.mean(errors) == pytest.approx(0.0, abs=0.02)


def level(model: CostModel, job: SyntheticJob) -> float:
    """How far off the expected times are, in the mean over ranks (log), of a noiseless step."""
    kept = job.noise
    job.noise = 0.0
    job._noise[:] = 0.0
    sample = job.next()
    job.noise = kept
    return float(np.log(sample.observed_s / model.expected_s(sample.features)).mean())


def after_a_long_fault(seed: int, slowdown: float) -> CostModel:
    """The model when rank 2 has been slow for longer than the history reaches back."""
    job, evidence, named = SyntheticJob(seed=seed, **DEVICE_CLOCK), begin(), []
    for step in range(60 + CONFIG.history_steps + 84):
        evidence, judgement = update_evidence(
            CONFIG, evidence, job.next({2: slowdown} if step >= 60 else {})
        )
        named += [finding.rank for finding in judgement.findings]
        assert not judgement.recovered
    assert named == [2] and set(evidence.slow) == {2}
    return model_of(evidence)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_fault_of_one_rank_is_never_learnt_however_long(seed: int) -> None:
    mild, severe = after_a_long_fault(seed, 1.15), after_a_long_fault(seed, 2.0)
    assert severe.coefficients == pytest.approx(mild.coefficients)
    assert (severe.sigma, severe.spread) == pytest.approx((mild.sigma, mild.spread))
    job = SyntheticJob(seed=seed, **DEVICE_CLOCK)
    healthy = fit([job.next() for _ in range(CONFIG.history_steps)])
    assert level(severe, job) == pytest.approx(level(healthy, job), abs=0.04)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_slow_drift_of_all_ranks_is_followed_and_accuses_nobody(seed: int) -> None:
    job, evidence = SyntheticJob(seed=seed, **DEVICE_CLOCK), begin()
    for step in range(501):
        sample = job.next()
        drifted = replace(sample, observed_s=sample.observed_s * 1.3 ** (step / 500))
        evidence, judgement = update_evidence(CONFIG, evidence, drifted)
        assert judgement.findings == ()
    assert level(model_of(evidence), job) == pytest.approx(-np.log(1.3), abs=0.05)
