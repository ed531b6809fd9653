"""Robust linear regression through the origin: slopes of a time against its possible causes."""

import numpy as np

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.stats.robust import HUBER_K, MAD_TO_SIGMA, column_medians, robust_scale

ITERATIONS = 5  # re-weightings (Huber)
NO_SPREAD = 1e-9  # scale below which a column is constant up to rounding
RIDGE = 1e-3  # relative to a regressor's scale: makes collinear regressors identifiable
FAR = 5.0  # sigmas of a regressor beyond which a row is down-weighted in the first round
GROSS = 20.0  # sigmas of the residual beyond which a row is an outlier


def work_slopes(columns: Array, target: Array) -> Array:
    """Slopes of the target against each regressor [regressors].

    Two rounds: an outlier in a regressor (another stage's stall, which is no work of this one) must
    not bias the slopes, while rows with much work are the most informative. Rows far out are
    down-weighted in the first round (Mallows 1975) and count in full in the second if they agree
    with the first.

    Args:
        columns: [rows, regressors].
        target: [rows].
    """
    sigmas = MAD_TO_SIGMA * column_medians(np.abs(columns))
    scale = np.where(sigmas > NO_SPREAD, sigmas, _root_mean_square(columns))
    furthest = (np.abs(columns) / np.maximum(scale, NO_SPREAD)).max(axis=1, initial=0.0)
    near = np.minimum(1.0, (FAR / np.maximum(furthest, FAR)) ** 2)
    rest = np.abs(target - columns @ _huber(columns, target, scale, near))
    agree = rest <= GROSS * max(robust_scale(rest), NO_SPREAD)
    return _huber(columns[agree], target[agree], scale, np.ones(int(agree.sum())))


def shared_slope(peers: Array, own: Array) -> float:
    """Fraction, 0 to 1, of the peers' changes that a rank shares; large common changes weigh most.

    Args:
        peers: [rows] changes of the peers' median.
        own: [rows] changes of the rank.
    """
    column = peers[:, None]
    slope = _huber(column, own, _root_mean_square(column), np.ones(len(column)))[0]
    return float(np.clip(slope, 0.0, 1.0))


def _huber(columns: Array, target: Array, scale: Array, trusted: Array) -> Array:
    """Slopes through the origin with Huber weights; a ridge keeps undetermined directions at 0.

    `scale` [regressors]: units of the columns; `trusted` [rows]: prior weights.
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
