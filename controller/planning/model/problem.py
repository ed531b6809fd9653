"""Input of the partition planner: model cost, devices, links and the job. Values only.

Compute is counted in forward seconds of one row on one device of speed 1 with all shards; bytes of
state are weights, master weights, moments and gradients together. Values outside the ranges below
indicate wrong units and are rejected.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.core.layout.pipeline_schedule import RUN_SCHEDULES, Schedule

LEAST_S, MOST_S = 1e-15, 1e6  # of anything that takes time, for one row
MOST_BYTES = 1e18
SPEEDS = (1e-6, 1e6)  # of a device that is not dead, and of its link
LEAST_BANDWIDTH = 1e-3  # bytes/s; inf: what is sent takes no time that was measured


def _check_costs(owner: object, names: Iterable[str]) -> None:
    """Times end in _s, all others are bytes."""
    for name in names:
        most = MOST_S if name.endswith("_s") else MOST_BYTES
        if not 0.0 <= getattr(owner, name) <= most:
            raise ValueError(
                f"{type(owner).__name__}.{name}: expected 0 to {most:g}, got {getattr(owner, name)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer's price. Shards cut attention, the MLP and activations; the rest is replicated.

    `expert_s`: all that the layer's experts compute for one row (top-k counted); 0: a dense layer.
    `activation_bytes`: of one row, kept from forward to backward by all shards together;
    `whole_activation_bytes`: the same that each rank of the tensor group keeps. `slot_bytes`: what
    each rank reserves for experts; 0: a part of `expert_bytes`. `dispatch_bytes`: of one row, to
    its experts and back.
    """

    attention_s: float
    mlp_s: float
    attention_bytes: float
    mlp_bytes: float
    activation_bytes: float
    replicated_s: float = 0.0
    replicated_bytes: float = 0.0
    expert_s: float = 0.0
    expert_bytes: float = 0.0
    dispatch_bytes: float = 0.0
    whole_activation_bytes: float = 0.0
    slot_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_costs(self, self.__slots__)
        taken_s = self.attention_s + self.mlp_s + self.replicated_s + self.expert_s
        if taken_s < LEAST_S:
            raise ValueError(f"a layer takes time: expected {LEAST_S:g} s at least, got {taken_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The model to divide.

    num_attention_shards: groups of query heads with their key/value head, which no cut divides.
    num_mlp_shards: equal runs of columns; embedding and head are cut with them. `boundary_bytes`:
    of one row between two layers. `launch_s`: forward time of a layer that no row adds to, on a
    device of speed 1; a slow one takes longer by as much as for rows.
    `head_activation_bytes`: of one row of one micro-batch on each rank of the last stage.
    `gradient_share`: part of the bytes of state that data-parallel ranks exchange in a step;
    `backward_ratio`: backward over forward. Raises ValueError for what can not be.
    """

    layers: tuple[LayerCost, ...]
    num_attention_shards: int
    num_mlp_shards: int
    boundary_bytes: float
    embedding_s: float = 0.0
    embedding_bytes: float = 0.0
    head_s: float = 0.0
    head_bytes: float = 0.0
    head_activation_bytes: float = 0.0
    launch_s: float = 0.0
    gradient_share: float = 2.0 / 18.0
    backward_ratio: float = 2.0

    def __post_init__(self) -> None:
        if not self.layers or min(self.num_attention_shards, self.num_mlp_shards) < 1:
            raise ValueError("a model has layers, and each at least one shard of either kind")
        names = ("boundary_bytes", "embedding_s", "embedding_bytes", "head_s", "head_bytes")
        _check_costs(self, (*names, "head_activation_bytes", "launch_s"))
        if not 0.0 <= self.gradient_share <= 1.0:
            raise ValueError(f"gradient_share: expected 0 to 1, got {self.gradient_share}")
        if not 1e-3 <= self.backward_ratio <= 1e3:
            raise ValueError(f"backward_ratio: expected 0.001 to 1000, got {self.backward_ratio}")

    @property
    def has_experts(self) -> bool:
        return any(layer.expert_s > 0.0 for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one rank.

    Attributes:
        speed: relative; 0: dead.
        link_speed: relative, of its links.
        is_doubted: it failed or was slow before; of equal choices it becomes the standby rank.
    """

    rank: int
    node: int
    memory_bytes: float
    speed: float = 1.0
    link_speed: float = 1.0
    is_doubted: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0 or not self.memory_bytes > 0.0:
            raise ValueError(f"rank {self.rank}: ranks count from 0, devices have memory")
        least, most = SPEEDS
        is_dead = self.speed == 0.0
        if not (is_dead or least <= self.speed <= most) or not least <= self.link_speed <= most:
            raise ValueError(
                f"rank {self.rank}: speed from 0 (dead; else {least:g} to {most:g}), link_speed "
                f"{least:g} to {most:g}, got {self.speed} and {self.link_speed}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bandwidth and latency of one device: inside its node, and to another node."""

    inside_bytes_per_s: float
    between_bytes_per_s: float
    inside_latency_s: float = 5e-6
    between_latency_s: float = 2e-5

    def __post_init__(self) -> None:
        for name in ("inside_bytes_per_s", "between_bytes_per_s"):
            if not getattr(self, name) >= LEAST_BANDWIDTH:
                raise ValueError(
                    f"{name}: expected a bandwidth of {LEAST_BANDWIDTH:g} at least, got "
                    f"{getattr(self, name)}"
                )
        _check_costs(self, ("inside_latency_s", "between_latency_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePrices:
    """Weight of a faster step against the move: steps until the next plan, pause in seconds.

    `bytes_per_s`: of state that a rank receives; 0: as messages to another node.
    """

    num_steps: int = 1000
    pause_s: float = 2.0
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_steps <= 10**12 or not 0.0 <= self.pause_s <= MOST_S:
            raise ValueError(
                f"a plan lasts for 1 to 10^12 steps, its pause 0 to {MOST_S:g} s, got "
                f"{self.num_steps} and {self.pause_s}"
            )


@dataclass(frozen=True, kw_only=True)
class PartitionProblem:
    """Everything that a partition plan depends on.

    Attributes:
        model: cost of the layers.
        devices: one for each rank.
        links: bandwidth and latency.
        baseline: partition of the healthy job, the reference of the fluid limit.
        present: the running partition; None: `baseline`.
        may_change_schedule: a plan may choose any schedule; else it keeps the present one.
        prices: of moves.
        unevenness: largest expert rows / speed of a rank, over that of all ranks together.
        is_whole: every living device gets work; no standby ranks.
        rows_per_microbatch: the most, of a trainer that deals rows by the rule of
            `core/layout/apportion`, also by stage where pipelines share experts; 0: of others, with
            as many micro-batches as in the baseline, more only where they would be larger.

    Raises:
        ValueError: ranks are unknown or repeat.
    """

    model: ModelCost
    devices: tuple[Device, ...]
    links: Links
    baseline: Partition
    present: Partition | None = None
    may_change_schedule: bool = False
    prices: MovePrices = MovePrices()
    unevenness: float = 1.0
    is_whole: bool = False
    rows_per_microbatch: int = 0

    def __post_init__(self) -> None:
        if len(self.device_of) != len(self.devices) or not self.devices:
            raise ValueError("one device for each rank")
        for partition in (self.baseline, self.now):
            unknown = set(partition.ranks) - self.device_of.keys()
            if unknown:
                raise ValueError(f"no device is known of ranks {sorted(unknown)}")
            if partition.rows_per_step != self.baseline.rows_per_step:
                raise ValueError("the rows of a step never depend on the partition")
        if not 1.0 <= self.unevenness < inf:
            raise ValueError("unevenness is 1 or more")

    @property
    def now(self) -> Partition:
        return self.present or self.baseline

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules of plans; the first has the least memory and is the cheapest to price."""
        return RUN_SCHEDULES if self.may_change_schedule else (self.now.schedule,)

    @property
    def rows_per_step(self) -> int:
        return self.baseline.rows_per_step

    @cached_property
    def device_of(self) -> Mapping[int, Device]:
        return {device.rank: device for device in self.devices}

    @cached_property
    def living(self) -> tuple[int, ...]:
        """The ranks of devices that are not dead, ascending."""
        return tuple(sorted(rank for rank, device in self.device_of.items() if device.speed > 0.0))

    @property
    def fluid_ratio(self) -> float:
        """The least step time over the healthy one: devices over the sum of their speeds."""
        total = sum(self.device_of[rank].speed for rank in self.baseline.ranks)
        return len(self.baseline.ranks) / total if total > 0.0 else inf


def healthy(problem: PartitionProblem) -> PartitionProblem:
    """The same with all devices and links as specified, running as the baseline."""
    return replace(
        problem,
        devices=tuple(replace(d, speed=1.0, link_speed=1.0) for d in problem.devices),
        present=None,
    )
