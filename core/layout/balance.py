"""Gives each item of a list to one of the ranks that may have it, with even loads.

Used for the writers of a checkpoint's pieces and for the owners of optimizer state.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from types import MappingProxyType
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)
NO_LOADS: Mapping[int, int] = MappingProxyType({})


def assign_evenly(
    able: Mapping[Item, tuple[int, ...]],
    sizes: Mapping[Item, int],
    *,
    kept: Mapping[Item, int] | None = None,
    is_allowed: Callable[[Item, int], bool] | None = None,
    loads: Mapping[int, int] = NO_LOADS,
) -> dict[Item, int]:
    """One rank for each item.

    Items stay where they are kept. Others go to their least loaded rank, those with few ranks
    first, then large ones. Then items move to another rank while the busier of the two gains: the
    loads of two ranks that may have the same items differ by at most one item.

    Args:
        able: the ranks that may have each item, in the order that decides between equal items.
        sizes: what each item adds to a rank's load.
        kept: the rank that has an item already, one of those that may.
        is_allowed: whether a rank of `able` may have the item; default: each may. At least one may.
        loads: what ranks have beside the items, which counts.

    Returns:
        item -> rank, of all items.
    """
    chosen = dict(kept or {})
    every = {rank for ranks in set(able.values()) for rank in ranks}
    load = {rank: loads.get(rank, 0) for rank in every}
    for item, rank in chosen.items():
        load[rank] += sizes[item]
    order = sorted(able, key=lambda item: (len(able[item]), -sizes[item]))
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # of ranks, as their loads were
    for item in order:
        if item in chosen:
            continue
        on = able[item]
        if on not in heaps:
            heaps[on] = [(load[rank], rank) for rank in on]
            heapify(heaps[on])
        heap, passed = heaps[on], list[tuple[int, int]]()
        while True:
            found, rank = heap[0]
            if load[rank] != found:  # loads only grow: the truth comes up
                heapreplace(heap, (load[rank], rank))
            elif is_allowed is None or is_allowed(item, rank):
                break
            else:
                passed.append(heappop(heap))
        for entry in passed:
            heappush(heap, entry)
        chosen[item] = rank
        load[rank] += sizes[item]
    if kept:
        _shed(able, sizes, chosen, load, is_allowed)
    is_settled = False
    while not is_settled:  # ends: each turn makes the sum of the squared loads smaller
        is_settled = True
        least = min(load.values(), default=0)  # no turn makes it less
        for item in order:
            size, here = sizes[item], chosen[item]
            if least + size >= load[here]:
                continue
            there = _least_loaded(item, able, load, is_allowed)
            if load[there] + size < load[here]:
                chosen[item] = there
                load[here] -= size
                load[there] += size
                is_settled = False
    return chosen


def _shed(
    able: Mapping[Item, tuple[int, ...]],
    sizes: Mapping[Item, int],
    chosen: dict[Item, int],
    load: dict[int, int],
    is_allowed: Callable[[Item, int], bool] | None,
) -> None:
    """Let the fullest ranks hand items over first: so the fewest of those that were kept move."""
    items: dict[int, list[Item]] = {}
    for item, rank in chosen.items():
        items.setdefault(rank, []).append(item)
    fullest = [(-load[rank], rank) for rank in items]
    heapify(fullest)
    least = min(load.values())
    while fullest:
        _, here = heappop(fullest)
        for item in sorted(items[here], key=lambda item: -sizes[item]):
            if least + sizes[item] >= load[here]:
                continue
            there = _least_loaded(item, able, load, is_allowed)
            if load[there] + sizes[item] < load[here]:
                chosen[item] = there
                load[here] -= sizes[item]
                load[there] += sizes[item]
                items[here].remove(item)
                items.setdefault(there, []).append(item)
                heappush(fullest, (-load[here], here))
                least = min(load.values())
                break


def _least_loaded(
    item: Item,
    able: Mapping[Item, tuple[int, ...]],
    load: Mapping[int, int],
    is_allowed: Callable[[Item, int], bool] | None,
) -> int:
    ranks: Iterable[int] = able[item]
    if is_allowed is not None:
        ranks = (rank for rank in ranks if is_allowed(item, rank))
    return min(ranks, key=lambda rank: (load[rank], rank))
