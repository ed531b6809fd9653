"""The cost model's regression as a scikit-learn estimator. Imported on demand: needs scikit-learn.

For pipelines, model selection and comparisons of scikit-learn (`benchmarks.predictor_error`). The
detector calls the same numerics (`regression.regress`) without it, so that recorded runs can be
analysed where scikit-learn is not installed.
"""

from typing import Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.cost.regression import Prior, regress


class CostRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc] # sklearn has no types
    """Seconds as a non-negative linear function of work: robust, relative errors, with a prior.

    Fitted attributes: `coef_` [features] in seconds per unit, `covariance_` [features, features],
    `spread_` (one sigma of log residuals), `n_features_in_`.

    Args:
        prior: for directions that the data do not determine (`model.PRIOR` for the detector's own
            features). None: equal shares of all features, with one sigma of 1.

    Example:
        >>> import numpy as np
        >>> tokens = np.array([[1.0], [2.0], [3.0], [4.0]])
        >>> CostRegressor().fit(tokens, [0.1, 0.2, 0.3, 0.4]).predict([[10.0]]).round(3).tolist()
        [1.0]
    """

    def __init__(self, *, prior: Prior | None = None) -> None:
        self.prior = prior

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        return tags

    def fit(
        self, X: npt.ArrayLike, y: npt.ArrayLike, *, groups: npt.ArrayLike | None = None
    ) -> Self:
        """Fit to the work [rows, features] and the seconds [rows] of micro-batches or steps.

        Args:
            X: work, finite and not negative.
            y: seconds, above 0.
            groups: [rows] the rank of each row; ranks may differ by a constant factor. None: one
                rank.

        Raises:
            ValueError: values or shapes are invalid.
        """
        work: Array
        seconds: Array
        work, seconds = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        if (work < 0.0).any():
            raise ValueError("Negative values in data passed to CostRegressor: no work is below 0")
        if not (seconds > 0.0).all():
            raise ValueError("expected seconds above 0")
        rank = np.zeros(len(seconds), dtype=np.intp)
        if groups is not None:
            rank = np.unique(np.asarray(groups), return_inverse=True)[1]
            if len(rank) != len(seconds):
                raise ValueError(f"groups: expected {len(seconds)} of them, got {len(rank)}")
        prior = self.prior or _uniform_prior(work.shape[1])
        if len(prior.shares) != work.shape[1]:
            raise ValueError(f"prior: expected one of {work.shape[1]} features, got {prior}")
        found = regress(work, seconds, rank, prior)
        self.coef_, self.covariance_ = found.coefficients, found.covariance
        self.spread_ = found.spread
        return self

    def predict(self, X: npt.ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Expected seconds [rows]; with `return_std` also one sigma of an observation [rows]."""
        check_is_fitted(self)
        work: Array = validate_data(self, X, dtype=np.float64, reset=False)
        expected_s: Array = work @ self.coef_
        if not return_std:
            return expected_s
        of_mean = np.maximum(((work @ self.covariance_) * work).sum(axis=1), 0.0)
        return expected_s, np.sqrt((self.spread_ * expected_s) ** 2 + of_mean)


def _uniform_prior(count: int) -> Prior:
    return Prior(shares=np.full(count, 1.0 / count), spread=np.ones(count), unit=np.arange(count))
