"""Makes histories of faults by a rule and a seed: nodes that stop, nodes that become slow.

The rules are those of ResiHP's evaluation (research 4.1-4.3): one fault each period, of one kind or
of two in turn; or the same at random times, as logs of clusters have them. How slow "weak",
"medium" and "severe" are is not published in numbers, so the speed is always the caller's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle
from math import inf, log

import numpy as np

from pacekeeper.simulator.cluster.history import (
    Change,
    History,
    NodesJoined,
    NodesLost,
    SpeedChanged,
    in_order,
)

Z_90 = 1.2815515655446004  # 90 % of a normal distribution lie below so many of its spreads


class FaultKind(StrEnum):
    STOP = "stop"
    SLOW = "slow"
    RACK = "rack"  # all nodes of a rack stop at once


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """One fault every `every_s`, kinds in turn, each of a healthy node drawn evenly.

    `slow_speed`: of a slow node; `mended_after_s`: until it is healthy, or joins again; inf: never.
    `nodes_per_rack`: racks hold so many nodes, in the order of their numbers; one fails of those
    whose nodes are all healthy. `is_random`: the times between faults are drawn (exponential,
    `every_s` in the mean).
    `mended_late_s`: repairs are drawn (log-normal): half of them end within `mended_after_s`, nine
    of ten within this. Raises ValueError for numbers that are none of these.
    """

    kinds: tuple[FaultKind, ...]
    every_s: float
    slow_speed: float = 0.5
    mended_after_s: float = inf
    mended_late_s: float | None = None
    is_random: bool = False
    nodes_per_rack: int = 1

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ValueError("kinds: expected at least one")
        if not (self.every_s > 0.0 and self.mended_after_s > 0.0):
            raise ValueError("every_s, mended_after_s: expected values above 0")
        if self.mended_late_s is not None and not self.mended_after_s < self.mended_late_s < inf:
            raise ValueError("mended_late_s: expected above mended_after_s, and finite")
        if self.nodes_per_rack < 1:
            raise ValueError(f"nodes_per_rack: expected at least 1, got {self.nodes_per_rack}")
        if not 0.0 < self.slow_speed < 1.0:
            raise ValueError(f"slow_speed: expected above 0 and below 1, got {self.slow_speed}")


def drawn_history(rule: FaultRule, *, num_nodes: int, duration_s: float, seed: int) -> History:
    """All nodes from 0 s on, and faults at every_s, 2 every_s, ... (or drawn times) before the end.

    Where no node (or whole rack) is healthy any more a fault hits nobody, and a node that is mended
    at just this moment is not hit. The same seed gives the same history.
    """
    draw = np.random.default_rng(seed)
    healthy = set(range(num_nodes))
    mended: list[tuple[float, int]] = []
    changes: list[Change] = [NodesJoined(at_s=0.0, nodes=tuple(range(num_nodes)))]
    for at_s, kind in zip(_times(rule, duration_s, draw), cycle(rule.kinds), strict=False):
        healthy |= {node for when_s, node in mended if when_s < at_s}
        mended = [(when_s, node) for when_s, node in mended if when_s >= at_s]
        size = rule.nodes_per_rack if kind is FaultKind.RACK else 1
        firsts = _firsts(healthy, size, num_nodes)
        if not firsts:
            continue
        first = firsts[int(draw.integers(len(firsts)))]
        nodes = tuple(range(first, min(first + size, num_nodes)))
        healthy -= set(nodes)
        back_s = at_s + _mending_s(rule, draw)
        mended += ((back_s, node) for node in nodes)
        match kind:
            case FaultKind.STOP | FaultKind.RACK:
                changes.append(NodesLost(at_s=at_s, nodes=nodes))
                back: Change = NodesJoined(at_s=back_s, nodes=nodes)
            case FaultKind.SLOW:
                changes.append(SpeedChanged(at_s=at_s, node=nodes[0], speed=rule.slow_speed))
                back = SpeedChanged(at_s=back_s, node=nodes[0], speed=1.0)
        if back_s < duration_s:
            changes.append(back)
    return History(
        name="+".join(rule.kinds),
        num_nodes=num_nodes,
        duration_s=duration_s,
        changes=in_order(changes),
    )


def _firsts(healthy: set[int], size: int, num_nodes: int) -> list[int]:
    """The first node of each rack of `size` nodes that are all healthy."""
    if size == 1:
        return sorted(healthy)
    firsts = range(0, num_nodes, size)
    return [at for at in firsts if healthy.issuperset(range(at, min(at + size, num_nodes)))]


def _times(rule: FaultRule, duration_s: float, draw: np.random.Generator) -> Iterator[float]:
    """When faults happen."""
    number, at_s = 1, 0.0
    while True:
        at_s = at_s + draw.exponential(rule.every_s) if rule.is_random else number * rule.every_s
        number += 1
        if at_s >= duration_s:
            return
        yield float(at_s)


def _mending_s(rule: FaultRule, draw: np.random.Generator) -> float:
    """Of one fault."""
    if rule.mended_late_s is None:
        return rule.mended_after_s
    spread = log(rule.mended_late_s / rule.mended_after_s) / Z_90
    return float(rule.mended_after_s * np.exp(spread * draw.standard_normal()))
