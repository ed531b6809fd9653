"""Replicas where slots are scarce: large experts as arcs around a circle of ranks. Pure.

All ranks stand in one circle. The largest experts lie as arcs around it, each beginning where the
one before ends, as long as their load asks; the small ones sit on single ranks (or on the least
arcs the floor allows) so that what is left of each rank fits its pieces of the arcs. Rows then
drift along the circle from arc to arc.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.intp]


MARGIN = 1.5  # standard deviations of drift that an arc should have room for


Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arcs:
    """first, length [layers, experts]: replicas lie on `length` places of the circle."""

    first: Counts
    length: Counts

    def replicas(self, num_places: int) -> Flags:
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


# Numbers of arcs tried for a layer: few, and parts of the most that fit.
FEW, NUM_PARTS, NUM_PARTS_OF_MANY, MANY_PLACES = (1, 2, 4), 8, 2, 128
LONGEST = 24  # places of the arcs that tell them apart; of the FINALISTS best, all are looked at
FINALISTS = 4


def circle_arcs(
    loads: Array, speeds: Array, slots: Counts, *, min_length: int, drift: float, num_ranks: int
) -> tuple[Arcs, Array] | None:
    """The arcs with the least value under drift, and that value [layers]; None if none was found.

    loads [layers, experts] rows; speeds, slots [places]. No arc is shorter than `min_length`.
    """
    found = [_best_arcs(rows, speeds, slots, min_length, drift, num_ranks) for rows in loads]
    if any(arcs is None for arcs in found):
        return None
    best = _together([arcs for arcs in found if arcs is not None])
    return best, arc_values(best, loads, speeds, num_ranks=num_ranks, drift=drift)


def _together(arcs: Sequence[Arcs]) -> Arcs:
    return Arcs(
        first=np.concatenate([a.first for a in arcs]),
        length=np.concatenate([a.length for a in arcs]),
    )


def _best_arcs(
    rows: Array, speeds: Array, slots: Counts, min_length: int, drift: float, num_ranks: int
) -> Arcs | None:
    spare = int(slots.sum()) - min_length * len(rows)
    if spare < 0 or min_length > len(speeds):
        return None
    most = min(len(rows), max(spare, 1))
    num_parts = NUM_PARTS if len(speeds) <= MANY_PLACES else NUM_PARTS_OF_MANY
    parts = np.arange(1, num_parts + 1) * most // num_parts
    choices = np.unique(np.clip(np.concatenate([FEW, parts]), 1, most))
    laid = [
        _lay(rows, speeds, slots, num_arcs, is_mixed=is_mixed, min_length=min_length)
        for num_arcs in choices.tolist()
        for is_mixed in (False, True)
    ]
    tried = [arcs for arcs in laid if arcs is not None]
    if not tried or rows.sum() == 0.0:
        return tried[0] if tried else None
    for num_left, longest in ((FINALISTS, LONGEST), (1, None)):
        values = arc_values(
            _together(tried),
            np.broadcast_to(rows, (len(tried), len(rows))),
            speeds,
            num_ranks=num_ranks,
            drift=drift,
            longest=longest,
        )
        order = np.argsort((values / values.min()).round(9), kind="stable")[:num_left]
        tried = [tried[i] for i in order.tolist()]
    return tried[0]


def _lay(
    loads: Array,
    speeds: Array,
    slots: Counts,
    num_arcs: int,
    *,
    is_mixed: bool,
    min_length: int,
) -> Arcs | None:
    """`num_arcs` arcs one after the other around the circle, the small experts in what is left.

    `is_mixed`: large and small arcs in turn. None where the slots do not suffice for this choice.
    """
    num, fluid = len(speeds), float(loads.sum() / speeds.sum())
    by_load = np.argsort(-loads, kind="stable")
    long = by_load[:num_arcs]
    if is_mixed:
        half = -(-num_arcs // 2)
        mixed = np.empty_like(long)
        mixed[::2], mixed[1::2] = long[:half], long[half:][::-1]
        long = mixed
    # What the floor takes is taken; every further slot is one more step of some arc.
    num_steps = int(slots.sum()) - min_length * (len(loads) - num_arcs) - num_arcs
    steps = _apportioned(loads[long], num_steps, least=max(1, min_length - 1), most=num - 1)
    if steps is None:
        return None
    first, length = np.zeros(len(loads), dtype=np.intp), np.ones(len(loads), dtype=np.intp)
    left, room, place = slots.copy(), fluid * speeds, 0
    link = 0.5 * (speeds + np.roll(speeds, -1))
    for expert, num_links in zip(long.tolist(), steps.tolist(), strict=True):
        links = (place + np.arange(num_links)) % num
        on = (place + np.arange(min(num_links + 1, num))) % num
        first[expert], length[expert] = on[0], len(on)
        left[on] -= 1
        piece = 0.5 * loads[expert] * link[links] / link[links].sum()
        np.subtract.at(room, links, piece)
        np.subtract.at(room, (links + 1) % num, piece)
        place += num_links
    if (left < 0).any():
        return None
    small = by_load[num_arcs:].tolist()
    if min_length == 1:
        places = _packed(loads, small, room, left)
        if places is None:
            return None
        first[small] = places
    elif not _pack_arcs(loads, small, room / speeds, left, min_length, first, length):
        return None
    return Arcs(first=first[None], length=length[None])


def _apportioned(loads: Array, total: int, *, least: int, most: int) -> Counts | None:
    """Steps in proportion to loads, between `least` and `most` each; None where too few."""
    steps = np.full(len(loads), least, dtype=np.intp)
    left = min(total, most * len(loads)) - int(steps.sum())
    if left < 0 or least > most:
        return None
    heap = [(-load / (least + 0.5), i) for i, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    while left > 0 and heap:
        _, i = heap[0]
        steps[i] += 1
        left -= 1
        if steps[i] < most:
            heapq.heapreplace(heap, (-float(loads[i]) / (steps[i] + 0.5), i))
        else:
            heapq.heappop(heap)
    return steps


def _packed(loads: Array, small: list[int], room: Array, left: Counts) -> list[int] | None:
    """A place for each small expert, largest first, always where most room is."""
    heap = [(-r, place) for place, r in enumerate(room.tolist()) if left[place] > 0]
    heapq.heapify(heap)
    free = left.tolist()
    places = []
    for expert in small:
        if not heap:
            return None
        height, place = heap[0]
        places.append(place)
        free[place] -= 1
        if free[place] > 0:
            heapq.heapreplace(heap, (height + float(loads[expert]), place))
        else:
            heapq.heappop(heap)
    return places


def _pack_arcs(
    loads: Array,
    small: list[int],
    room: Array,
    left: Counts,
    min_length: int,
    first: Counts,
    length: Counts,
) -> bool:
    """The same with arcs of the least length; False where no free arc is left."""
    offsets = np.arange(min_length)
    window = (np.arange(len(room))[:, None] + offsets) % len(room)
    for expert in small:
        is_free = (left[window] > 0).all(axis=1)
        if not is_free.any():
            return False
        place = int(np.where(is_free, room[window].min(axis=1), -np.inf).argmax())
        first[expert], length[expert] = place, min_length
        left[window[place]] -= 1
        room[window[place]] -= loads[expert] / min_length
    return True
