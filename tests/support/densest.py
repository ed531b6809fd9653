"""The least a split can reach over given hosts, by looking at every set of ranks."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

import numpy as np
import numpy.typing as npt


def least_split(
    loads: Sequence[float], hosts: Iterable[Iterable[int]], speeds: Sequence[float]
) -> float:
    """max over sets of ranks of (rows that only they can take) / (their speed)."""
    num = len(speeds)
    masks = [sum(1 << rank for rank in on) for on in hosts]
    rows = np.bincount(masks, weights=np.array(loads, dtype=float), minlength=1 << num)
    speed = np.zeros(1 << num)
    for rank in range(num):
        for table, own in ((rows, None), (speed, speeds[rank])):
            halves = table.reshape(-1, 2, 1 << rank)
            halves[:, 1] += halves[:, 0] if own is None else own
    return float((rows[1:] / speed[1:]).max())


def least_of_all_hosts(
    loads: Sequence[float], slots: Sequence[int], speeds: Sequence[float], floor: int
) -> float | None:
    """The same over all hosts that fit the slots; None where none keeps the floor."""
    experts = range(len(loads))
    columns = [list(combinations(experts, min(s, len(loads)))) for s in slots]
    best = None
    for chosen in product(*columns):
        hosts = [[r for r, held in enumerate(chosen) if e in held] for e in experts]
        if min(map(len, hosts)) < floor:
            continue
        value = least_split(loads, hosts, speeds)
        best = value if best is None else min(best, value)
    return best


def ranks_of(flags: npt.NDArray[np.bool_]) -> list[list[int]]:
    """Hosts [experts, ranks] as lists of ranks."""
    return [np.flatnonzero(row).tolist() for row in flags]
