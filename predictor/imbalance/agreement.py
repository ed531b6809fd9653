"""How far independent views of the same values agree: what they share is real, the rest is noise.

The views are different devices, so that a slow device, which only one view sees, is no agreement.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from pacekeeper.predictor.cost.features import Array, Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of the views of cells.

    Attributes:
        correlation: of two views of a cell.
        p_value: of the correlation, if the views were independent.
        trust: share of the variance of a cell's mean over its views that is no noise.
        num_views: that were compared.
    """

    correlation: float
    p_value: float
    trust: float
    num_views: int


def agreement(views: Array, finest: Positions, *coarser: Positions) -> Agreement | None:
    """Estimate the part of the values that views share: the covariance of two views.

    Args:
        views: [cells, views].
        finest: the group of each cell [cells], whose mean is subtracted.
        coarser: groupings in its place where it leaves fewer degrees of freedom than it has groups:
            the first that does not, else the last.

    Returns:
        None with fewer than two views, or without degrees of freedom.
    """
    for group in (finest, *coarser):
        num_groups = len(np.unique(group))
        num_free = len(views) - num_groups
        if num_free >= num_groups:
            break
    num_views = views.shape[1]
    num_pairs = num_views * (num_views - 1)
    if num_free < 1 or not num_pairs:
        return None
    centred = centre(views, group)
    squares = float((centred**2).sum())
    shared = (float((centred.sum(axis=1) ** 2).sum()) - squares) / num_free / num_pairs
    noise = max(squares / num_free / num_views - shared, 0.0)
    correlation = shared / (shared + noise) if shared + noise > 0.0 else 0.0
    return Agreement(
        correlation=correlation,
        p_value=float(norm.sf(correlation * np.sqrt(num_free * num_pairs / 2.0))),
        trust=max(shared, 0.0) / max(shared + noise / num_views, 1e-300),
        num_views=num_views,
    )


def centre(values: Array, group: Positions) -> Array:
    """Subtract from values [rows, columns] the means of the row's group [rows]."""
    _, group, size = np.unique(group, return_inverse=True, return_counts=True)
    sums = np.zeros((len(size), values.shape[1]))
    np.add.at(sums, group, values)
    centred: Array = values - (sums / size[:, None])[group]
    return centred
