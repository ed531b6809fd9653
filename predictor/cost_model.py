"""What a step's work should take: one linear model for all ranks of a role. Pure.

Common coefficients, so that a slow rank can not teach the model its slowness. Robust (Huber
weights, relative error), never negative, and pulled weakly towards a prior where the data can not
tell: in warm-up all ranks have the same share, so "fixed" and "per token" look alike, and only a
prior keeps the model sane when a plan changes the shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.predictor.workload import FEATURES, Array, StepSample

# Shares of the mean time, in the order of FEATURES: mostly work, some fixed cost of kernels.
PRIOR_SHARES = np.array([0.12, 0.38, 0.05, 0.40, 0.05])
PRIOR_WEIGHT = 0.3  # as many observations per row of data (in units of sqrt)
HUBER_K = 1.345  # 95 % efficiency under normal errors
ITERATIONS = 8
MAX_ROWS = 4096  # rows beyond this are thinned evenly: the fit costs the same at any cluster size
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostModel:
    """coefficients [FEATURES] in seconds per unit; sigma: robust scale of log residuals."""

    coefficients: Array
    sigma: float

    def expected_s(self, features: Array) -> Array:
        """Expected compute seconds of each row of features [ranks, FEATURES] -> [ranks]."""
        expected: Array = np.maximum(features @ self.coefficients, 1e-9)
        return expected


def fit(samples: Sequence[StepSample]) -> CostModel:
    """Fit the common model to quiet steps. Raises ValueError for no samples.

    Iteratively re-weighted non-negative least squares of observed / expected around 1.
    """
    from sklearn.linear_model import LinearRegression  # a second to import: not at start-up

    if not samples:
        raise ValueError("a fit needs at least one sample")
    features = np.concatenate([sample.features for sample in samples])
    observed_s = np.concatenate([sample.observed_s for sample in samples])
    usable = observed_s > 0.0
    features, observed_s = features[usable], observed_s[usable]
    if len(observed_s) == 0:
        raise ValueError("no step took any time")
    if len(observed_s) > MAX_ROWS:
        chosen = np.linspace(0, len(observed_s) - 1, MAX_ROWS).astype(int)
        features, observed_s = features[chosen], observed_s[chosen]
    mean_s = float(np.median(observed_s))
    scale = features.mean(axis=0)
    known = scale > 0.0
    scale = np.where(known, scale, 1.0)
    # Unit columns: a coefficient is the share of the typical time its feature explains.
    units = features / scale * mean_s / observed_s[:, None]
    prior = np.where(known, PRIOR_SHARES, 0.0)
    prior = prior / prior.sum()
    strength = PRIOR_WEIGHT * np.sqrt(len(observed_s)) * np.eye(len(FEATURES)) * 0.1
    design = np.concatenate([units, strength])
    target = np.concatenate([np.ones(len(units)), strength @ prior])
    weights = np.ones(len(units))
    shares = prior
    for _ in range(ITERATIONS):
        regression = LinearRegression(fit_intercept=False, positive=True)
        regression.fit(design, target, np.concatenate([weights, np.ones(len(FEATURES))]))
        shares = regression.coef_
        residual = units @ shares - 1.0
        spread = max(1e-6, MAD_TO_SIGMA * float(np.median(np.abs(residual))))
        weights = np.minimum(1.0, HUBER_K * spread / np.maximum(np.abs(residual), 1e-12))
    coefficients = np.where(known, shares, 0.0) * mean_s / scale
    model = CostModel(coefficients=coefficients, sigma=0.0)
    return CostModel(coefficients=coefficients, sigma=_sigma(model, samples))


def log_ratios(model: CostModel, sample: StepSample) -> Array:
    """log(observed / expected) of each rank, less the median over its peers (3 ranks or more).

    What hits all ranks alike - a common throttle, a noisy host - accuses nobody.
    """
    ratio: Array = np.log(np.maximum(sample.observed_s, 1e-9) / model.expected_s(sample.features))
    if len(ratio) >= 3:
        ratio = ratio - np.median(ratio)
    return ratio


def _sigma(model: CostModel, samples: Sequence[StepSample]) -> float:
    """Scale of the residuals around each rank's own median: wide enough for heavy tails."""
    by_rank: dict[int, list[float]] = {}
    for sample in samples:
        for rank, ratio in zip(sample.ranks, log_ratios(model, sample), strict=True):
            by_rank.setdefault(rank, []).append(float(ratio))
    deviations = np.concatenate(
        [np.abs(np.array(ratios) - np.median(ratios)) for ratios in by_rank.values()]
    )
    by_median = MAD_TO_SIGMA * float(np.median(deviations))
    by_tail = float(np.quantile(deviations, 0.95)) / 1.96
    return max(by_median, by_tail)
