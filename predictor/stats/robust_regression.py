"""What a time takes of each thing that may explain it: slopes by robust least squares. Pure."""

import numpy as np

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.stats.robust import HUBER_K, MAD_TO_SIGMA, column_medians, robust_scale

ITERATIONS = 5  # of Huber weights
NO_SPREAD = 1e-9  # of what varies: less is rounding
RIDGE = 1e-3  # of a regressor's own spread: keeps collinear ones apart
FAR = 5.0  # sigmas of a regressor beyond which a row says little at first: it may be a hiccup
GROSS = 20.0  # sigmas of the rest beyond which it is one


def work_slopes(columns: Array, target: Array) -> Array:
    """What the target takes of each regressor.

    A hiccup among the regressors (another stage's, which is no work of this one) must not bend the
    slopes, and much work tells most of all: rows that lie far out count for little in a first round
    (Mallows 1975), in full in a second one where they agree with the first.
    """
    sigmas = MAD_TO_SIGMA * column_medians(np.abs(columns))
    scale = np.where(sigmas > NO_SPREAD, sigmas, _root_mean_square(columns))
    furthest = (np.abs(columns) / np.maximum(scale, NO_SPREAD)).max(axis=1, initial=0.0)
    near = np.minimum(1.0, (FAR / np.maximum(furthest, FAR)) ** 2)
    rest = np.abs(target - columns @ _huber(columns, target, scale, near))
    agree = rest <= GROSS * max(robust_scale(rest), NO_SPREAD)
    return _huber(columns[agree], target[agree], scale, np.ones(int(agree.sum())))


def shared_slope(peers: Array, own: Array) -> float:
    """The part of the peers' changes that a rank has, too, 0 to 1; a jump of all tells most."""
    column = peers[:, None]
    slope = _huber(column, own, _root_mean_square(column), np.ones(len(column)))[0]
    return float(np.clip(slope, 0.0, 1.0))


def _huber(columns: Array, target: Array, scale: Array, trusted: Array) -> Array:
    """Slopes through the origin, Huber weights, a ridge that leaves unseen directions at 0.

    scale: of each column; trusted: weights of rows, whatever they tell.
    """
    slopes: Array = np.zeros(columns.shape[1])
    if len(columns) <= columns.shape[1] or not (scale > NO_SPREAD).any():
        return slopes
    scale = np.where(scale > NO_SPREAD, scale, np.inf)
    units = columns / scale
    weights = trusted
    for _ in range(ITERATIONS):
        weighted = units * weights[:, None]
        normal = weighted.T @ units + RIDGE * len(units) * np.eye(units.shape[1])
        slopes = np.linalg.solve(normal, weighted.T @ target).astype(np.float64)
        rest = np.abs(target - units @ slopes)
        spread = max(robust_scale(rest), NO_SPREAD)
        weights = trusted * np.minimum(1.0, HUBER_K * spread / np.maximum(rest, 1e-12))
    per_unit: Array = slopes / scale
    return per_unit


def _root_mean_square(columns: Array) -> Array:
    scale: Array = np.sqrt((columns**2).sum(axis=0) / max(len(columns), 1))
    return scale
