"""What no hosts in so many slots can beat. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np


def least_value(
    loads: Sequence[float], speeds: Mapping[int, float], *, num_slots: int, min_hosts: Sequence[int]
) -> float:
    """No hosts in so many slots have a lower value (largest load_j / speed_j); it may be out of
    reach.

    The fluid; more where the slots do not suffice: at value v an expert needs so many of the
    fastest ranks that their speeds add up to load / v, and `min_hosts[expert]` at least.
    """
    fastest = np.cumsum(sorted(speeds.values(), reverse=True))
    rows, floor = np.array(loads, dtype=np.float64), np.array(min_hosts)
    fluid = float(rows.sum() / fastest[-1])

    def fits(value: float) -> bool:
        needed = 1 + np.searchsorted(fastest, rows / value * (1.0 - 1e-9))
        return bool(np.maximum(np.where(rows > 0.0, needed, 0), floor).sum() <= num_slots)

    if fluid == 0.0 or fits(fluid):
        return fluid
    low, high = fluid, max(fluid, float(rows.max() / fastest[0]))
    while high > low * (1.0 + 1e-6):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low
