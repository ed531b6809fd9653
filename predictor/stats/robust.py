"""Robust statistics: constants for normal errors, medians of tables with gaps. Pure."""

import numpy as np

from pacekeeper.predictor.cost.features import Array

MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation
MEDIAN_ERROR = 1.2533  # standard error of a median, in those of a mean
HUBER_K = 1.345  # Huber's bend with 95 % efficiency


def column_medians(values: Array, axis: int = 0) -> Array:
    """Medians of what is finite along an axis; NaN where nothing is."""
    return column_quantiles(values, 0.5, axis)


def column_quantiles(values: Array, share: float, axis: int = 0) -> Array:
    """Quantiles of what is finite along an axis, linear between values; NaN where nothing is."""
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
    """One sigma around 0 by the median of absolute values; 0.0 where there are none."""
    values = np.abs(values[np.isfinite(values)])
    return MAD_TO_SIGMA * float(np.median(values)) if len(values) else 0.0
