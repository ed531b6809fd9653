"""Robust non-negative linear regression of times, with a prior; the numerics of the cost model.

Iteratively re-weighted non-negative least squares (`scipy.optimize.nnls`) of observed / expected
around 1, with Huber weights, a ridge towards the prior, and a random effect per rank. Called by
`model.fit` (live and on recorded runs) and by the scikit-learn estimator (`estimator.py`). No
estimator of scikit-learn combines sign constraints, sample weights and a prior, and none gives the
covariance of the interval (ADR 75).
"""

from dataclasses import dataclass

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.stats.robust import HUBER_K, MAD_TO_SIGMA

ITERATIONS = 8  # maximum number of re-weightings
SETTLED = 1e-3  # largest change of a share at convergence
LEAST_EXPECTED = 0.05  # of the typical time: bounds the weight of rows with little work
LEAST_SPREAD = 0.005  # lower bound of the residuals' scale: the model itself is not exact
RANK_SPREAD = 0.02  # one sigma of the levels of healthy ranks, which a rank's steps share


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prior:
    """Prior for directions that the data do not determine.

    Attributes:
        shares: [features] of the typical time.
        spread: [features] one sigma of the shares.
        unit: [features] the column whose mean a column is measured in, for most itself.
    """

    shares: Array
    spread: Array
    unit: Positions

    def of_first(self, count: int) -> "Prior":
        """The prior of the first features only, each measured in itself."""
        return Prior(shares=self.shares[:count], spread=self.spread[:count], unit=np.arange(count))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearFit:
    """Coefficients [features] in seconds per unit, their covariance, relative sigma of rows."""

    coefficients: Array
    covariance: Array
    spread: float


def regress(features: Array, observed_s: Array, rank: Positions, prior: Prior) -> LinearFit:
    """Fit non-negative coefficients such that observed / expected is close to 1.

    Generalised least squares with a random effect per rank: part of the lasting difference between
    ranks is their own level, so that many steps of few ranks carry less information than
    independent rows. Rows are weighted by their expected, not their observed time: noise in the
    regressors would bias all coefficients downwards, the more the longer the history.

    Args:
        features: [rows, features], not negative.
        observed_s: [rows], above 0.
        rank: [rows] rank of each row.
        prior: of the shares.
    """
    from scipy.optimize import nnls  # slow to import: not at start-up

    typical_s = float(np.median(observed_s))
    scale = features.mean(axis=0)[prior.unit]
    known = scale > 0.0
    scale = np.where(known, scale, 1.0)
    # Unit columns: a coefficient is the share of the typical time that its feature explains.
    columns = features / scale * typical_s
    # Renormalize over the features that occur: attention's share is larger in a dense model.
    believed = np.where(known, prior.shares, 0.0)
    part = float(believed.sum()) or 1.0
    believed, doubted = believed / part, prior.spread / part
    shares = believed
    for _ in range(ITERATIONS):
        expected_s = np.maximum(columns @ shares, LEAST_EXPECTED * typical_s)
        units, target = columns / expected_s[:, None], observed_s / expected_s
        residual = target - units @ shares
        spread = max(LEAST_SPREAD, MAD_TO_SIGMA * float(np.median(np.abs(residual))))
        weights = np.minimum(1.0, HUBER_K * spread / np.maximum(np.abs(residual), 1e-12))
        kept, wanted = _partly_demeaned(units, target, rank, spread)
        ridge = spread / doubted * np.eye(len(scale))
        # The R factor (QR) has the same least-squares solution as all rows.
        rows = np.column_stack([kept, wanted]) * np.sqrt(weights)[:, None]
        pulled = np.column_stack([ridge, ridge @ believed])
        least: Array = np.asarray(np.linalg.qr(np.concatenate([rows, pulled]), mode="r"))
        last, (shares, _) = shares, nnls(least[:, :-1], least[:, -1])
        if np.abs(shares - last).max() < SETTLED:
            break
    per_unit = typical_s / scale
    precision = (kept * weights[:, None]).T @ kept / spread**2
    precision += np.diag(1.0 / doubted**2)
    covariance = np.linalg.inv(precision) * np.outer(per_unit, per_unit)
    return LinearFit(
        coefficients=np.where(known, shares, 0.0) * per_unit, covariance=covariance, spread=spread
    )


def _partly_demeaned(
    units: Array, target: Array, rank: Positions, spread: float
) -> tuple[Array, Array]:
    """Rows [rows, features] and targets [rows], whitened for the random effect of a rank."""
    _, group, count = np.unique(rank, return_inverse=True, return_counts=True)
    pace = RANK_SPREAD if len(count) > 1 else 0.0  # no random effect with a single rank
    part = 1.0 - spread / np.sqrt(spread**2 + count * pace**2)
    both = np.column_stack([units, target])
    means = np.zeros((len(count), both.shape[1]))
    np.add.at(means, group, both)
    means *= (part / count)[:, None]
    both -= means[group]
    return both[:, :-1], both[:, -1]
