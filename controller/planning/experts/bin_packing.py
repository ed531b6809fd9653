"""Replicas for scarce slots: in each group of ranks the smallest experts and a large one. Pure.

All layers use the same groups of ranks, so their cut sets are these few. The groups are filled one
after the other up to one target: experts that fit whole, the smallest first, and in the last slot a
piece of the largest that is left (research 4.9b, here over groups and for all layers). Equal groups
of two slots all become even where experts are at most groups + 1: those that are left are never too
small, on average, for the groups that are left, so that the smallest with the largest fill one.
With more slots that is likely, not certain: the first target that all experts fit is taken.
"""

from bisect import insort

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.ring_arcs import MARGIN, drift_deviation
from pacekeeper.controller.planning.token_split.min_max import MinMaxSplit

AIMS = (1.0, 1.002, 1.005, 1.01, 1.02, 1.05)  # over the fluid: the first that all experts fit
NOTHING = 1e-9  # of a group: less is no load

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


def greedy_fill(loads: Array, speeds: Array, slots: Counts) -> tuple[Flags, MinMaxSplit] | None:
    """Fill groups of ranks with the smallest experts and a piece of the largest.

    Args:
        loads: [layers, experts] rows.
        speeds: [groups].
        slots: [groups].

    Returns:
        Replica groups [layers, experts, groups] and their shares; None where not all experts fit.
    """
    pieces = np.zeros((*loads.shape, len(speeds)))
    fluid = loads.sum(axis=1) / speeds.sum()
    # In a layer that nobody used yet all experts are equal: each needs its replicas and shares.
    told = np.where(loads.any(axis=1, keepdims=True), loads, 1.0)
    for layer, rows in enumerate(told):
        for aim in AIMS:
            found = _layer(rows, aim * rows.sum() / speeds.sum() * speeds, slots)
            if found is not None:
                pieces[layer] = found
                break
        else:
            return None
    replicas = pieces > 0.0
    shares = pieces / pieces.sum(axis=2, keepdims=True)
    value = (np.einsum("le,ler->lr", loads, shares) / speeds).max(axis=1)
    return replicas, MinMaxSplit(
        shares=shares,
        value=value,
        bound=fluid,
        inside=np.ones((len(loads), len(speeds)), dtype=np.bool_),
    )


def _layer(rows: Array, room: Array, slots: Counts) -> Array | None:
    """Rows [experts, groups] within the room [groups]; None where some are left over."""
    pieces = np.zeros((len(rows), len(room)))
    least = float(room.max()) * NOTHING  # an expert without load needs a replica too
    left = sorted((max(float(own), least), expert) for expert, own in enumerate(rows))
    for group in np.argsort(room, kind="stable").tolist():
        free, space = int(slots[group]), float(room[group]) * (1.0 + len(rows) * NOTHING)
        while left and free > 1 and left[0][0] <= space:
            own, expert = left.pop(0)
            pieces[expert, group] += own
            free, space = free - 1, space - own
        while left and free > 0 and space > least:
            own, expert = left.pop()
            piece = min(own, space)
            pieces[expert, group] += piece
            free, space = free - 1, space - piece
            if own - piece > least:
                insort(left, (own - piece, expert))
    return None if left else pieces


def values_with_drift(
    replicas: Flags, loads: Array, speeds: Array, value: Array, *, num_ranks: int, drift: float
) -> Array:
    """[layers] at least `value`; with drift what it makes of the likely stuck sets of groups.

    Those are single groups, and the groups of each expert: what lies inside them, with MARGIN
    deviations. Other sets are not looked at.
    """
    if drift == 0.0:
        return value
    variance = drift_deviation(loads, loads.sum(axis=1) / num_ranks, drift) ** 2
    result = value.copy()
    for layer, on in enumerate(replicas):
        sets = np.unique(np.vstack([np.eye(len(speeds), dtype=np.bool_), on]), axis=0)
        outside = on.astype(np.float32) @ (~sets).T.astype(np.float32) > 0.0
        inside = (~outside).T.astype(np.float64)
        rows = inside @ loads[layer] + MARGIN * np.sqrt(inside @ variance[layer])
        is_part = ~sets.all(axis=1)
        dense = (rows / (sets @ speeds))[is_part]
        result[layer] = max(float(result[layer]), float(dense.max(initial=0.0)))
    return result
