"""Robust statistics: constants for normal errors, quantiles of tables with gaps."""

import numpy as np

from pacekeeper.predictor.cost.features import Array

MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation
MEDIAN_ERROR = 1.2533  # standard error of a median, relative to that of a mean
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
