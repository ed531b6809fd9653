"""The cost model's regression keeps scikit-learn's conventions, and is the detector's own."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from pacekeeper.predictor.cost.estimator import CostRegressor
from pacekeeper.predictor.cost.model import PRIOR, fit
from pacekeeper.predictor.cost.regression import Prior
from support.synthetic_job import DEVICE_CLOCK, SyntheticJob


@parametrize_with_checks([CostRegressor()])  # type: ignore[untyped-decorator]
def test_it_keeps_the_conventions(
    estimator: CostRegressor,
    check: Callable[[CostRegressor], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # some checks leave files at first
    check(estimator)


def quiet_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    job = SyntheticJob(seed=3, **DEVICE_CLOCK)
    steps = [job.next() for _ in range(20)]
    return (
        np.concatenate([step.features for step in steps]),
        np.concatenate([step.observed_s for step in steps]),
        np.concatenate([step.ranks for step in steps]),
    )


def test_the_detector_fits_with_the_same_numerics() -> None:
    job = SyntheticJob(seed=4, num_ranks=2, noise=0.01)  # too few for a common part
    steps = [job.next() for _ in range(12)]
    model = fit(steps)
    estimator = CostRegressor(prior=PRIOR).fit(
        np.concatenate([step.features for step in steps]),
        np.concatenate([step.observed_s for step in steps]),
        groups=np.concatenate([step.ranks for step in steps]),
    )
    assert estimator.coef_ == pytest.approx(model.coefficients, rel=1e-6)


def test_most_observations_lie_within_two_of_its_standard_deviations() -> None:
    X, y, ranks = quiet_rows()
    estimator = CostRegressor(prior=PRIOR).fit(X[::2], y[::2], groups=ranks[::2])
    expected_s, std_s = estimator.predict(X[1::2], return_std=True)
    assert (std_s > 0.0).all()
    assert 0.85 <= np.mean(np.abs(y[1::2] - expected_s) <= 2.0 * std_s) <= 1.0


def test_parameters_survive_clones_and_pipelines() -> None:
    X, y, _ = quiet_rows()
    estimator = CostRegressor(prior=PRIOR)
    assert clone(estimator).fit(X, y).coef_ == pytest.approx(estimator.fit(X, y).coef_)
    assert estimator.set_params(prior=None).get_params() == {"prior": None}
    chained = make_pipeline(FunctionTransformer(np.sqrt), CostRegressor())
    assert cross_val_score(chained, X[:, 1:2], np.sqrt(X[:, 1]) * 0.01, cv=3).min() > 0.99


def test_a_prior_of_another_width_and_times_that_are_none_are_refused() -> None:
    one = Prior(shares=np.ones(1), spread=np.ones(1), unit=np.arange(1))
    with pytest.raises(ValueError, match="prior"):
        CostRegressor(prior=one).fit([[1.0, 2.0], [2.0, 3.0]], [1.0, 2.0])
    with pytest.raises(ValueError, match="above 0"):
        CostRegressor().fit([[1.0], [2.0]], [1.0, 0.0])
    with pytest.raises(ValueError, match="groups"):
        CostRegressor().fit([[1.0], [2.0]], [1.0, 2.0], groups=[0])
