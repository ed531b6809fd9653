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
class Cuts:
    """ends: the layer after each stage; value = sum + (num_microbatches - 1) * slowest."""

    ends: tuple[int, ...]
    value: float
    slowest: float


def best_cuts(costs: Sequence[Array], num_microbatches: int) -> Cuts | None:
    """The best cuts for costs[stage][first layer, layer after the last]; None where nothing fits.

    Costs grow with the range; infinite: it does not fit. Every stage gets a layer.
    """
    num_layers = costs[0].shape[0] - 1
    if len(costs) > num_layers:
        return None
    bounds = np.unique(np.concatenate([cost[np.isfinite(cost)] for cost in costs]))
    low, high = 0, len(bounds)
    while low < high:
        middle = (low + high) // 2
        if _reaches_the_end(costs, float(bounds[middle])):
            high = middle
        else:
            low = middle + 1
    if low == len(bounds):
        return None
    cheapest = _least_sum(costs, np.inf)
    assert cheapest is not None, "what fits under a bound fits without one"
    repeats = num_microbatches - 1
    best: Cuts | None = None
    for bound in bounds[low : low + MAX_BOUNDS].tolist():
        if best is not None and cheapest[0] + repeats * bound >= best.value:
            break
        found = _least_sum(costs, bound)
        assert found is not None, "bounds above one that is met are met"
        total, ends = found
        slowest = _slowest(costs, ends)
        value = total + repeats * slowest
        if best is None or value < best.value:
            best = Cuts(ends=ends, value=value, slowest=slowest)
    return best


def _reaches_the_end(costs: Sequence[Array], bound: float) -> bool:
    """Each stage takes as many layers as it may and leaves one for each that follows."""
    num_layers = costs[0].shape[0] - 1
    at = 0
    for stage, cost in enumerate(costs):
        last = num_layers - (len(costs) - 1 - stage)
        row = cost[at, at + 1 : last + 1]
        taken = int(np.searchsorted(row, bound, side="right"))
        if taken == 0:
            return False
        at += taken
    return bool(at == num_layers)


def _least_sum(costs: Sequence[Array], bound: float) -> tuple[float, tuple[int, ...]] | None:
    num_layers = costs[0].shape[0] - 1
    reached: Array = np.full(num_layers + 1, np.inf)
    reached[0] = 0.0
    came_from = []
    for cost in costs:
        through = reached[:, None] + np.where(cost <= bound, cost, np.inf)
        came_from.append(through.argmin(axis=0))
        reached = through.min(axis=0)
    if not np.isfinite(reached[-1]):
        return None
    ends, at = [], num_layers
    for before in reversed(came_from):
        ends.append(at)
        at = int(before[at])
    return float(reached[num_layers]), tuple(reversed(ends))


def _slowest(costs: Sequence[Array], ends: Sequence[int]) -> float:
    firsts = (0, *ends[:-1])
    return max(
        float(cost[first, end]) for cost, first, end in zip(costs, firsts, ends, strict=True)
    )
