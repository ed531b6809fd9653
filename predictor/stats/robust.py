"""Robust statistics: constants for normal errors, quantiles of tables with gaps."""

from math import exp
from statistics import NormalDist

import numpy as np

from pacekeeper.predictor.cost.features import Array

MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation
MEDIAN_ERROR = 1.2533  # standard error of a median, relative to that of a mean
SIGMAS_95 = 1.96  # of a two-sided 95 % interval
HUBER_K = 1.345  # Huber's tuning constant for 95 % efficiency


def column_medians(values: Array, axis: int = 0) -> Array:
    """Medians of the finite values along an axis; NaN without any."""
    return column_quantiles(values, 0.5, axis)


def column_quantiles(values: Array, share: float, axis: int = 0) -> Array:
    """Quantiles of the finite values along an axis, linearly interpolated; NaN without any."""
    if not values.shape[axis]:
        return np.full(np.delete(values.shape, axis), np.nan)
    ascending = np.sort(values, axis=axis)  # NaN last
    at = share * np.maximum(np.isfinite(values).sum(axis=axis, keepdims=True) - 1, 0)
    low = np.floor(at).astype(np.intp)
    high = np.ceil(at).astype(np.intp)
    below = np.take_along_axis(ascending, low, axis=axis)
    above = np.take_along_axis(ascending, high, axis=axis)
    found: Array = np.squeeze(below + (at - low) * (above - below), axis=axis)
    return found


def robust_scale(values: Array) -> float:
    """One sigma about 0 from the median absolute value of the finite values; 0.0 without any."""
    values = np.abs(values[np.isfinite(values)])
    return MAD_TO_SIGMA * float(np.median(values)) if len(values) else 0.0


def tailed_scale(deviations: Array, tail: float) -> Array:
    """One sigma of absolute deviations, by their median or by their tail, whichever is larger.

    Noise of shared hosts has heavy tails.

    Args:
        deviations: not negative, NaN where there is none; sigma is along the first axis.
        tail: quantile that the tail is measured at, 0.5 to 1.
    """
    quartile, far = (NormalDist().inv_cdf(0.5 + 0.5 * share) for share in (0.5, tail))
    middle = column_quantiles(deviations, 0.5) / quartile
    scale: Array = np.nan_to_num(np.maximum(middle, column_quantiles(deviations, tail) / far))
    return scale


def ratio_interval(log_ratio: float, error: float) -> tuple[float, float, float]:
    """Return a ratio and its 95 % interval (ratio, low, high); `error`: one sigma of its log."""
    reach = SIGMAS_95 * error
    return exp(log_ratio), exp(log_ratio - reach), exp(log_ratio + reach)
