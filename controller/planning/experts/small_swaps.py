"""Few swaps of slots that even out a layer and keep survival, for few ranks. Pure.

Two ranks trade one expert each, so that an expert of the densest set of ranks gets a replica
outside. The value of every set of ranks stands in one table (2^ranks entries), so a swap costs four
looks. Cut sets count for the whole model: a swap whose replica sets other layers have already is
free.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.ring_arcs import MARGIN, drift_deviation

MAX_RANKS = 12
MAX_SWAPS = 12  # in one layer
LEAST_GAIN = 1e-4  # of the value, for a swap
LEAST_RISK = 1e-12  # of a node: its logarithm counts

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Swap:
    """`expert` leaves rank `source` for `target`, where `guest` leaves for `source`."""

    expert: int
    source: int
    guest: int
    target: int


def with_swaps(
    replicas: Flags, loads: Array, speeds: Array, node_risk: Array, *, even: float
) -> Flags:
    """Replicas [layers, experts, ranks] after swaps in the layers that are not even.

    loads [layers, experts] rows, speeds [ranks], node_risk [ranks]: failure probability of the node
    of each rank. A layer `even` above the fluid, relative to it, is even enough. Every rank keeps
    as many experts, every expert as many replicas; ranks count as nodes of their own, so callers
    check floors again.
    """
    result = replicas.copy()
    num = len(speeds)
    assert num <= MAX_RANKS
    bits = 1 << np.arange(num)
    known = set((result @ bits).ravel().tolist())
    speed = _sums_over_subsets(bits, speeds, num)
    risk = np.exp(_sums_over_subsets(bits, np.log(np.maximum(node_risk, LEAST_RISK)), num)).tolist()
    for layer, rows in enumerate(loads):
        _even_out(result[layer], rows, speed, risk, known, even)
    return result


def table_values(replicas: Flags, loads: Array, speeds: Array, drift: float) -> Array:
    """[layers] the best split's largest load_j / speed_j, with drift as in `arc_values`."""
    num = len(speeds)
    bits = 1 << np.arange(num)
    speed = _sums_over_subsets(bits, speeds, num)[1:]
    fair = loads.sum(axis=1) / num
    values = []
    for on, rows, spread in zip(replicas, loads, drift_deviation(loads, fair, drift), strict=True):
        inside = _sums_over_subsets(on @ bits, rows, num)[1:]
        variance = _sums_over_subsets(on @ bits, spread**2, num)[1:]
        variance[-1] = 0.0  # all ranks together: nothing can be elsewhere
        values.append(((inside + MARGIN * np.sqrt(variance)) / speed).max())
    return np.array(values)


def _sums_over_subsets(masks: npt.NDArray[np.intp], weights: Array, num_ranks: int) -> Array:
    """[2^ranks] for each set of ranks, the sum of the weights whose mask lies inside."""
    table: Array = np.bincount(masks, weights, 1 << num_ranks).astype(np.float64)
    for rank in range(num_ranks):
        halves = table.reshape(-1, 2, 1 << rank)
        halves[:, 1] += halves[:, 0]
    return table


def _even_out(
    replicas: Flags, rows: Array, speed: Array, risk: list[float], known: set[int], even: float
) -> None:
    num = replicas.shape[1]
    bits = 1 << np.arange(num)
    sets = np.arange(1 << num)
    with np.errstate(divide="ignore"):
        per_speed = np.where(speed > 0.0, 1.0 / speed, 0.0)
    inside = _sums_over_subsets(replicas @ bits, rows, num)
    fluid = float(rows.sum() * per_speed[-1])
    for _ in range(MAX_SWAPS):
        density = inside * per_speed
        worst = int(density.argmax())
        if density[worst] <= fluid * (1.0 + even):
            return
        masks = replicas @ bits
        best, chosen = (float(density[worst]) * (1.0 - LEAST_GAIN), 0.0), None
        for swap, added in _swaps(replicas, rows, masks, worst, risk, known).items():
            changed = inside.copy()
            for expert, leaves, joins in (
                (swap.expert, swap.source, swap.target),
                (swap.guest, swap.target, swap.source),
            ):
                old = int(masks[expert])
                new = old & ~(1 << leaves) | (1 << joins)
                changed -= np.where(sets & old == old, rows[expert], 0.0)
                changed += np.where(sets & new == new, rows[expert], 0.0)
            value = max(float((changed * per_speed).max()), fluid * (1.0 + even))
            if (value, added) < best:
                best, chosen, after = (value, added), swap, changed
        if chosen is None:
            return
        inside = after
        replicas[chosen.expert, [chosen.source, chosen.target]] = False, True
        replicas[chosen.guest, [chosen.source, chosen.target]] = True, False
        known.update((replicas[[chosen.expert, chosen.guest]] @ bits).tolist())


def _swaps(
    replicas: Flags,
    rows: Array,
    masks: npt.NDArray[np.intp],
    worst: int,
    risk: list[float],
    known: set[int],
) -> dict[_Swap, float]:
    """Swaps that take an expert out of the set `worst`, with the risk their new replica sets add.

    Of ranks that hold the same experts only the pair that adds least.
    """
    num = replicas.shape[1]
    bits = 1 << np.arange(num)
    column = [replicas[:, rank].tobytes() for rank in range(num)]
    outside = [rank for rank in range(num) if not worst >> rank & 1]
    least: dict[tuple[int, int, bytes, bytes], tuple[float, _Swap]] = {}
    for expert in ((masks & ~worst == 0) & (rows > 0.0)).nonzero()[0].tolist():
        for source in replicas[expert].nonzero()[0].tolist():
            for target in outside:
                guests = (replicas[:, target] & ~replicas[:, source]).nonzero()[0]
                moved = int(masks[expert]) & ~int(bits[source]) | int(bits[target])
                for guest in guests.tolist():
                    back = int(masks[guest]) & ~int(bits[target]) | int(bits[source])
                    added = sum(risk[new] for new in (moved, back) if new not in known)
                    key = (expert, guest, column[source], column[target])
                    swap = _Swap(expert, source, guest, target)
                    if key not in least or added < least[key][0]:
                        least[key] = (added, swap)
    return {swap: added for added, swap in least.values()}
