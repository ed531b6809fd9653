"""A regressor named in the settings judges in the linear model's place."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.config.detector import DetectorConfig, parse_cost_model
from pacekeeper.core.errors import ConfigError
from pacekeeper.predictor.cost.model import fit
from pacekeeper.predictor.cost.named_regressor import regressor_factory
from pacekeeper.predictor.detector.state import begin
from pacekeeper.predictor.detector.update import update_evidence
from support.synthetic_job import DEVICE_CLOCK, SyntheticJob

TREES = "sklearn.ensemble.HistGradientBoostingRegressor(max_iter=20, min_samples_leaf=5)"
BAYES = "sklearn.linear_model.BayesianRidge"


class Learnt:
    """Knows what it was fitted to by heart, and nothing else."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self.known = {row.tobytes(): value for row, value in zip(X, y, strict=True)}
        self.mean = float(np.mean(y))

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.array([self.known.get(row.tobytes(), self.mean) for row in X])


class Failing(Learnt):
    """Can be fitted to made-up work only."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> None:
        super().fit(X, y)
        if len(X) != 40:
            raise RuntimeError("no memory")


class Wild(Learnt):
    """Predicts no times."""

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(X)) % 2, np.nan, -1.0)


class NoPredict:
    """Has half of the interface."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> None: ...


class Pairs(Learnt):
    """Predicts two numbers a row."""

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.ones((len(X), 2))


def own(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


@pytest.mark.parametrize(
    "named", [TREES, BAYES, "sklearn.linear_model.HuberRegressor(max_iter=2000)"]
)
def test_it_predicts_and_the_coefficients_stay(named: str) -> None:
    job = SyntheticJob(seed=1, **DEVICE_CLOCK)
    steps = [job.next() for _ in range(60)]
    ours, theirs = fit(steps[:50]), fit(steps[:50], named)
    assert theirs.named is not None and theirs.note == ""
    assert theirs.coefficients == pytest.approx(ours.coefficients)
    observed_s = np.stack([step.observed_s for step in steps[50:]])
    features = np.stack([step.features for step in steps[50:]])
    assert np.abs(np.log(observed_s / theirs.expected_s(features))).mean() < 0.06
    least_s, most_s = theirs.interval_s(features)
    assert 0.8 <= np.mean((least_s <= observed_s) & (observed_s <= most_s)) <= 1.0


@pytest.mark.parametrize("named", [TREES, BAYES])
def test_a_slow_rank_is_named_by_it_and_nobody_else(named: str) -> None:
    job = SyntheticJob(seed=2, **DEVICE_CLOCK)
    config, evidence = DetectorConfig(cost_model=named), begin()
    found = []
    for step in range(40):
        evidence, judgement = update_evidence(
            config, evidence, job.next({2: 1.4} if step >= 25 else None)
        )
        found += [(step, finding.rank) for finding in judgement.findings]
    assert [rank for _, rank in found] == [2]
    assert found[0][0] <= 30


def test_what_it_learnt_by_heart_is_no_quiet_clock() -> None:
    job = SyntheticJob(seed=5, **DEVICE_CLOCK)
    steps = [job.next() for _ in range(40)]
    model = fit(steps, own(Learnt))
    assert (
        np.log(np.stack([s.observed_s / model.expected_s(s.features) for s in steps])).std() < 0.02
    )
    assert model.sigma > 0.5 * fit(steps).sigma
    assert model.spread > 0.5 * fit(steps).spread


def test_beyond_what_it_was_fitted_to_it_doubts() -> None:
    job = SyntheticJob(seed=6, **DEVICE_CLOCK)
    steps = [job.next() for _ in range(40)]
    model = fit(steps, TREES)
    usual = steps[-1].features
    unseen = usual.copy()
    unseen[1] *= 4.0
    assert model.doubt(unseen)[1] > max(2.0 * model.doubt(usual).max(), 0.1)


def test_one_that_fails_leaves_the_linear_model_and_says_so() -> None:
    steps = [SyntheticJob(seed=7, **DEVICE_CLOCK).next() for _ in range(12)]
    model = fit(steps, own(Failing))
    assert model.named is None and "no memory" in model.note
    assert model.expected_s(steps[0].features) == pytest.approx(
        fit(steps).expected_s(steps[0].features)
    )


def test_numbers_that_are_no_times_are_replaced_by_the_linear_models() -> None:
    steps = [SyntheticJob(seed=8, **DEVICE_CLOCK).next() for _ in range(12)]
    model = fit(steps, own(Wild))
    assert model.named is not None
    assert model.expected_s(steps[0].features) == pytest.approx(
        fit(steps).expected_s(steps[0].features)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.at.All", "No module named 'nowhere'"),
        ("sklearn.ensemble.Nobody", "no attribute 'Nobody'"),
        ("sklearn.ensemble.HistGradientBoostingRegressor(trees=3)", "trees"),
        (own(NoPredict), "no attribute 'predict'"),
        (own(Pairs), "shape"),
        ("math.sqrt", "exactly one argument"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        regressor_factory(text)


@pytest.mark.parametrize(
    "text",
    ["Huber", "a.b(1)", "a.b(**c)", "a.b(x=open('f'))", "a.b;c.d", "a().b", "a.b(", "a. b c"],
)
def test_a_text_that_is_no_name_with_literals_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="dotted name"):
        parse_cost_model(text)
    with pytest.raises(ValueError, match="dotted name"):
        replace(DetectorConfig(), cost_model=text)
