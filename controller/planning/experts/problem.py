"""Input of the expert planner: cluster, floors and prices, validated on construction."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

import numpy as np
import numpy.typing as npt

LEAST_ROWS = 1e-9  # less is no load
MOST_ROWS = 1e100  # more, and sums of squares are beyond what a float holds
MOST_APART = 1e9  # speeds, relative to each other: beyond it no split is found any more


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks by position 0 .. n-1; `nodes` and `racks` are labels.

    A node fails when any of its ranks fails, and takes all of them along.

    Attributes:
        speeds: relative, above 0, at most MOST_APART from each other.
        slots: experts of each layer that a rank can hold.
        failure_probability: of each rank, before the next plan.
        nodes: node of each rank.
        racks: rack of each rank.
        rack_failure: probability that a rack fails as a whole; racks not named never do.

    Raises:
        ValueError: lengths differ or a number is out of range.
    """

    speeds: tuple[float, ...]
    slots: tuple[int, ...]
    failure_probability: tuple[float, ...]
    nodes: tuple[int, ...]
    racks: tuple[int, ...]
    rack_failure: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        others = (self.slots, self.failure_probability, self.nodes, self.racks)
        if not self.speeds or any(len(other) != len(self.speeds) for other in others):
            raise ValueError("one speed, slots, probability, node and rack for each rank")
        if not all(isfinite(speed) and speed > 0.0 for speed in self.speeds):
            raise ValueError("speeds must be finite and above 0: leave out who does nothing")
        if max(self.speeds) > MOST_APART * min(self.speeds):
            raise ValueError(
                f"speeds {min(self.speeds):g} and {max(self.speeds):g} are more than"
                f" {MOST_APART:g} apart: leave out who does next to nothing"
            )
        if min(self.slots) < 1:
            raise ValueError("every rank needs a slot")
        odds = (*self.failure_probability, *self.rack_failure.values())
        if not all(0.0 <= p <= 1.0 for p in odds):
            raise ValueError("failure probabilities must lie in 0 to 1")
        if not set(self.rack_failure) <= set(self.racks):
            raise ValueError("rack failures must be of racks of these ranks")
        rack_of: dict[int, int] = {}
        for node, rack in zip(self.nodes, self.racks, strict=True):
            if rack_of.setdefault(node, rack) != rack:
                raise ValueError(f"node {node} stands in two racks")

    @property
    def num_ranks(self) -> int:
        return len(self.speeds)

    @cached_property
    def node_failure(self) -> dict[int, float]:
        """Failure probability of each node: 1 - product over its ranks of (1 - p)."""
        lives: dict[int, float] = {}
        for node, p in zip(self.nodes, self.failure_probability, strict=True):
            lives[node] = lives.get(node, 1.0) * (1.0 - p)
        return {node: 1.0 - alive for node, alive in lives.items()}

    @cached_property
    def rack_of(self) -> dict[int, int]:
        """The rack of each node."""
        return dict(zip(self.nodes, self.racks, strict=True))


def alike(
    num_ranks: int,
    slots: int,
    *,
    failure_probability: float = 0.01,
    ranks_per_node: int = 1,
    nodes_per_rack: int = 0,
    speeds: tuple[float, ...] | None = None,
) -> Cluster:
    """Cluster of ranks that differ in speed only, numbered node by node.

    Args:
        num_ranks: ranks in all.
        slots: experts of each layer that a rank holds.
        failure_probability: of each rank.
        ranks_per_node: at least 1.
        nodes_per_rack: 0: every node is its own rack.
        speeds: [ranks]; default 1.0.

    Raises:
        ValueError: fewer than one rank in a node.
    """
    if ranks_per_node < 1 or nodes_per_rack < 0:
        raise ValueError("a node has at least one rank")
    nodes = tuple(rank // ranks_per_node for rank in range(num_ranks))
    return Cluster(
        speeds=(1.0,) * num_ranks if speeds is None else speeds,
        slots=(slots,) * num_ranks,
        failure_probability=(failure_probability,) * num_ranks,
        nodes=nodes,
        racks=tuple(node // nodes_per_rack for node in nodes) if nodes_per_rack else nodes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Least number of distinct ranks, nodes and racks of every expert.

    `nodes` also counts as a floor of ranks. Without `is_strict` an expert that cannot reach the
    floors without taking another expert below them keeps its present spread.
    """

    ranks: int = 1
    nodes: int = 1
    racks: int = 1
    is_strict: bool = True

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 1 <= self.racks <= self.nodes:
            raise ValueError("floors: at least 1 rank and rack, and as many nodes as racks")

    @property
    def replicas(self) -> int:
        """The fewest ranks of an expert."""
        return max(self.ranks, self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Factors that convert balance, survival and moves into seconds (research 4.5).

    Attributes:
        step_s: experts of all layers in one step, perfectly balanced.
        num_steps: steps until the next plan.
        restart_s: restart and lost work where an expert has no living replica rank.
        move_s: copy of one replica.
        hold_s: one replica held until the next plan.
        even: a layer so little above the fluid limit, relative to it, costs nothing.
    """

    step_s: float = 1.0
    num_steps: int = 1000
    restart_s: float = 600.0
    move_s: float = 0.05
    hold_s: float = 0.0
    even: float = 5e-4

    def __post_init__(self) -> None:
        if (
            min(self.step_s, self.num_steps, self.restart_s, self.move_s, self.hold_s, self.even)
            < 0.0
        ):
            raise ValueError("prices must not be negative")


def as_loads(loads: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[layers, experts] rows. Raises ValueError for another shape, and for loads that are none."""
    rows = np.array(loads, dtype=np.float64)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"loads must be layers x experts, got shape {rows.shape}")
    if not np.isfinite(rows).all() or (rows < 0.0).any():
        raise ValueError("loads must be finite and not negative")
    if rows.max() > MOST_ROWS:
        raise ValueError(f"loads must be at most {MOST_ROWS:g}, got {rows.max():g}")
    rows[rows < LEAST_ROWS] = 0.0
    return rows
