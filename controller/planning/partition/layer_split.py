"""Layers to stages, exactly: the least sum of stages plus the rest at the slowest one's pace. Pure.

A pipeline of M micro-batches takes the sum of its stages once and M - 1 times its slowest. For a
bound on the slowest the least sum is a shortest path over cuts; the least bound is a bisection. The
bounds above it are tried upwards until they alone cost more than the best plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_BOUNDS = 64  # tried above the least; more change the sum by less than a stage's layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundaries:
    """ends: the layer after each stage; value = sum + (num_microbatches - 1) * slowest."""

    ends: tuple[int, ...]
    value: float
    slowest: float


def best_stage_boundaries(costs: Sequence[Array], num_microbatches: int) -> StageBoundaries | None:
    """Optimal stage boundaries; every stage gets a layer.

    Args:
        costs: costs[stage][first layer, layer after the last] in seconds; grows with the range,
            infinite where it does not fit.
        num_microbatches: of a step.

    Returns:
        The boundaries; None where nothing fits.
    """
    num_layers = costs[0].shape[0] - 1
    if len(costs) > num_layers:
        return None
    bounds = np.unique(np.concatenate([cost[np.isfinite(cost)] for cost in costs]))
    stacked: Array = np.stack(costs)
    low, high = 0, len(bounds)
    while low < high:
        middle = (low + high) // 2
        if _reaches_the_end(stacked, float(bounds[middle])):
            high = middle
        else:
            low = middle + 1
    if low == len(bounds):
        return None
    tried = bounds[low : low + MAX_BOUNDS].tolist()
    bands = _bands(costs, tried[-1])
    cheapest = _least_sum(bands, tried[-1])
    repeats = num_microbatches - 1
    best: StageBoundaries | None = None
    for bound in tried:
        if best is not None and cheapest[0] + repeats * bound >= best.value:
            break
        total, ends = _least_sum(bands, bound)
        slowest = _slowest(costs, ends)
        value = total + repeats * slowest
        if best is None or value < best.value:
            best = StageBoundaries(ends=ends, value=value, slowest=slowest)
    return best


def _bands(costs: Sequence[Array], bound: float) -> Array:
    """[stages, layers of a stage - 1, layer after its last]: few layers fit under a low bound."""
    most = max(int((cost <= bound).sum(axis=1).max()) for cost in costs)
    ends = np.arange(costs[0].shape[0])
    first = ends[None, :] - np.arange(1, most + 1)[:, None]
    found: Array = np.stack([cost[np.maximum(first, 0), ends[None, :]] for cost in costs])
    return np.where(first >= 0, found, np.inf)


def _reaches_the_end(costs: Array, bound: float) -> bool:
    """Every end is followed: the farthest may leave a stage a layer that is beyond its bound."""
    farthest = (costs <= bound).sum(axis=2)  # [stage, first layer]: the layers it may take
    size = costs.shape[1]
    reached = np.zeros(size, dtype=bool)
    reached[0] = True
    for taken in farthest:
        firsts = np.flatnonzero(reached & (taken > 0))
        begun = np.bincount(firsts + 1, minlength=size + 1)
        ended = np.bincount(firsts + taken[firsts] + 1, minlength=size + 1)
        reached = np.cumsum(begun - ended)[:size] > 0
    return bool(reached[-1])


def _least_sum(bands: Array, bound: float) -> tuple[float, tuple[int, ...]]:
    """A shortest path over cuts, of stages that take the bound at most. It has to be reachable."""
    _, most, size = bands.shape
    ends = np.arange(size)
    before = np.maximum(ends[None, :] - np.arange(1, most + 1)[:, None], 0)
    reached: Array = np.full(size, np.inf)
    reached[0] = 0.0
    taken = []
    for band in np.where(bands <= bound, bands, np.inf):
        through = band + reached[before]
        best = through.argmin(axis=0)
        taken.append(best)
        reached = through[best, ends]
    assert np.isfinite(reached[-1]), "a bound that the end is reached under"
    cuts, at = [], size - 1
    for lengths in reversed(taken):
        cuts.append(at)
        at -= int(lengths[at]) + 1
    return float(reached[-1]), tuple(reversed(cuts))


def _slowest(costs: Sequence[Array], ends: Sequence[int]) -> float:
    firsts = (0, *ends[:-1])
    return max(
        float(cost[first, end]) for cost, first, end in zip(costs, firsts, ends, strict=True)
    )
