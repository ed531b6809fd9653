"""How likely a placement is lost where nodes fail, and racks with all their nodes. Pure.

A kill set is lost where each of its nodes fails, by itself or with its rack. So it stands for as
many sets of independent events as its racks leave choices, and for such sets there is an exact
answer already.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from pacekeeper.controller.planning.reliability import KillSet, kill_sets, loss_probability

MAX_EVENT_SETS = 64  # beyond, the sum over kill sets


def loss_with_racks(
    killers: Sequence[KillSet],
    node_failure: Mapping[int, float],
    rack_of: Mapping[int, int],
    rack_failure: Mapping[int, float],
) -> float:
    """The probability that all nodes of some kill set fail: each by itself, and all of a rack
    together, independently. Racks that are not named never fail as a whole.

    Exact for few kill sets over few racks; else the expected number of kill sets that fail, which
    is never below it.
    """
    bound = sum(_probability(k, node_failure, rack_of, rack_failure) for k in killers)
    events = _event_sets(killers, rack_of, rack_failure)
    if events is None:
        return min(1.0, bound)
    number = _events(rack_of)
    risk = {**node_failure, **{number[rack]: p for rack, p in rack_failure.items()}}
    return min(1.0, bound, loss_probability(events, risk))


def _probability(
    killer: KillSet,
    node_failure: Mapping[int, float],
    rack_of: Mapping[int, int],
    rack_failure: Mapping[int, float],
) -> float:
    """Of one kill set: racks are independent of each other."""
    lost = 1.0
    for rack, nodes in _by_rack(killer, rack_of).items():
        each = prod(node_failure[node] for node in nodes)
        whole = rack_failure.get(rack, 0.0)
        lost *= whole + (1.0 - whole) * each
    return lost


def _event_sets(
    killers: Iterable[KillSet], rack_of: Mapping[int, int], rack_failure: Mapping[int, float]
) -> tuple[KillSet, ...] | None:
    """The least sets of failing nodes and racks that take a whole kill set; None: too many."""
    found: set[KillSet] = set()
    number = _events(rack_of)
    for killer in killers:
        ways = [KillSet()]
        for rack, nodes in _by_rack(killer, rack_of).items():
            choices = [KillSet(nodes)]
            if rack_failure.get(rack, 0.0) > 0.0:
                choices.append(KillSet((number[rack],)))
            ways = [way | choice for way in ways for choice in choices]
            if len(ways) > MAX_EVENT_SETS:
                return None
        found.update(ways)
        if len(found) > MAX_EVENT_SETS:
            return None
    return kill_sets(found)


def _events(rack_of: Mapping[int, int]) -> dict[int, int]:
    """For the failure of each whole rack a number that is no node's."""
    racks = sorted(set(rack_of.values()))
    return {rack: at for at, rack in enumerate(racks, 1 + max(rack_of, default=0))}


def _by_rack(killer: KillSet, rack_of: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node in sorted(killer):
        found.setdefault(rack_of[node], []).append(node)
    return found
