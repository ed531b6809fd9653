"""What the best split over arcs of a circle reaches, in closed form, many placements at once. Pure.

Where every host set is an arc of one circle of places, the best split's largest load_j / speed_j is
the most that lies inside some arc of places, per its speed: what lies inside any set lies inside
its connected pieces, and one of those is at least as dense.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MARGIN = 1.5  # standard deviations of drift that an arc should have room for

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arcs:
    """first, length [layers, experts]: the hosts are so many places of the circle from there on."""

    first: Counts
    length: Counts

    def hosts(self, num_places: int) -> Flags:
        """[layers, experts, places]"""
        offset = (np.arange(num_places) - self.first[..., None]) % num_places
        covered: Flags = offset < self.length[..., None]
        return covered


def drift_deviation(loads: Array, fluid: Array, drift: float) -> Array:
    """How far each load may drift until the next plan, as a standard deviation in rows.

    `drift` is that of an expert with one rank's fair work, relative to it; smaller ones drift as
    much in proportion, larger ones as the root of their load: their tokens come from more sources.
    """
    spread: Array = drift * np.minimum(loads, np.sqrt(loads * fluid[:, None]))
    return spread


def arc_values(
    arcs: Arcs,
    loads: Array,
    speeds: Array,
    *,
    num_ranks: int,
    drift: float = 0.0,
    longest: int | None = None,
) -> Array:
    """[layers] the best split's largest load_j / speed_j, in rows per unit of speed.

    With drift: the largest that MARGIN deviations of what lies inside an arc would make of it; at
    least the fluid. loads [layers, experts]; speeds [places], of `num_ranks` ranks in all. Arcs of
    more than `longest` places are not looked at (default: all).
    """
    num_layers, num = len(loads), len(speeds)
    fluid = loads.sum(axis=1) / speeds.sum()
    layer = np.arange(num_layers)[:, None]
    inside = np.where(arcs.length < num, loads, 0.0)
    at = ((layer * num + arcs.first) * num + arcs.length % num).ravel()
    per_rank = loads.sum(axis=1) / num_ranks
    variance = drift_deviation(inside, per_rank, drift) ** 2
    by_arc = [
        np.bincount(at, weights=weights.ravel(), minlength=num_layers * num * num)
        .reshape(num_layers, num, num)
        .cumsum(axis=2)
        for weights in (inside, variance)
    ]
    rows, var = np.zeros((num_layers, num)), np.zeros((num_layers, num))
    speed = np.zeros(num)
    worst: Array = fluid
    following = (np.arange(num) + 1) % num
    for length in range(1, min(num, num if longest is None else longest + 1)):
        # An arc holds what begins at its first place and ends in time, and the arc one shorter.
        rows = rows[:, following] + by_arc[0][:, :, length]
        var = var[:, following] + by_arc[1][:, :, length]
        speed = speed[following] + speeds
        dense = rows + MARGIN * np.sqrt(var) if drift > 0.0 else rows
        worst = np.maximum(worst, (dense / speed).max(axis=1))
    return worst
