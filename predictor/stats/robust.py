"""Robust statistics: constants for normal errors, medians of tables with gaps. Pure."""

import numpy as np

from pacekeeper.predictor.cost.features import Array

MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation
MEDIAN_ERROR = 1.2533  # standard error of a median, in those of a mean
HUBER_K = 1.345  # Huber's bend with 95 % efficiency


def column_medians(values: Array, axis: int = 0) -> Array:
    """Medians of what is finite along an axis; NaN where nothing is."""
    if not values.shape[axis]:
        return np.full(np.delete(values.shape, axis), np.nan)
    ascending = np.sort(values, axis=axis)  # NaN last
    count = np.isfinite(values).sum(axis=axis, keepdims=True)
    low = np.take_along_axis(ascending, np.maximum((count - 1) // 2, 0), axis=axis)
    high = np.take_along_axis(ascending, np.minimum(count // 2, values.shape[axis] - 1), axis=axis)
    middle: Array = np.squeeze(0.5 * (low + high), axis=axis)
    return middle


def robust_scale(values: Array) -> float:
    """One sigma around 0 by the median of absolute values; 0.0 where there are none."""
    values = np.abs(values[np.isfinite(values)])
    return MAD_TO_SIGMA * float(np.median(values)) if len(values) else 0.0
