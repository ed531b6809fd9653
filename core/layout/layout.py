"""The layout: which rank holds which block of the model and computes which share of the work.

Pure data with its invariants; `holders` maps a block to ranks. The difference of two layouts:
`core/layout/diff.py`; JSON form: `core/layout/codec.py`; without dead ranks:
`core/layout/shrink.py`.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain
from math import inf, isfinite
from operator import lt
from types import MappingProxyType

from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.replica_spread import (
    NO_DOMAINS,
    DomainOf,
    domain_of_rank,
    level_shares,
    spread_replicas,
)

SHARE_TOLERANCE = 1e-6
NO_SPEEDS: Mapping[int, float] = MappingProxyType({})


class BlockKind(StrEnum):
    """Kinds of state that move or are saved as one unit, with their optimizer state."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM_ROUTER = "norm_router"  # of one layer
    ATTENTION = "attention"  # one virtual shard of one layer
    DENSE_MLP = "dense_mlp"  # one virtual shard of one layer without experts
    EXPERT = "expert"  # one expert of one layer


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """Name of one unit of state. `index` is the virtual shard or the expert, 0 otherwise."""

    kind: BlockKind
    layer: int = 0
    index: int = 0

    def __str__(self) -> str:
        match self.kind:
            case BlockKind.EMBEDDING | BlockKind.HEAD:
                return str(self.kind)
            case BlockKind.NORM_ROUTER:
                return f"layer {self.layer} norm and router"
            case BlockKind.ATTENTION:
                return f"layer {self.layer} attention shard {self.index}"
            case BlockKind.DENSE_MLP:
                return f"layer {self.layer} MLP shard {self.index}"
            case BlockKind.EXPERT:
                return f"layer {self.layer} expert {self.index}"


@dataclass(frozen=True, slots=True, order=True)
class ExpertReplica:
    """A rank that holds a copy of an expert, and its share of the expert's tokens."""

    rank: int
    share: float


@dataclass(frozen=True, slots=True, order=True)
class ShardRun:
    """A rank and the contiguous run [first, end) of virtual shards it holds."""

    rank: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers [first_layer, end_layer) and the ranks that run them.

    One group per data-parallel coordinate, as in all stages; its runs cover all virtual shards.
    """

    first_layer: int
    end_layer: int
    groups: tuple[tuple[ShardRun, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({run.rank for group in self.groups for run in group}))


ReplicaSet = tuple[ExpertReplica, ...]
"""The replicas of one expert, in ascending rank order; shares add up to 1."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which rank holds what and computes which share, under one generation number.

    Attributes:
        experts: `experts[layer][expert]` is the expert's `ReplicaSet`; a dense layer has no
            experts.
        batch_shares: one (rank, share) per data-parallel coordinate, first stage's ranks,
            ascending.
        speeds: ranks, ascending, that get less expert work than their peers (speed 1.0). A trainer
            that splits tokens in every step divides by them; the replicas' shares are then its
            forecast.
        standing_by: standby ranks, ascending: they hold and compute nothing. Those that `speeds`
            does not name get work when others join.

    Raises:
        ValueError: a block has no holder, shares do not add up to 1, or a rank repeats.
    """

    generation: int
    num_virtual_shards: int
    stages: tuple[Stage, ...]
    experts: tuple[tuple[ReplicaSet, ...], ...]
    batch_shares: tuple[tuple[int, float], ...]
    speeds: tuple[tuple[int, float], ...] = ()
    standing_by: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_stages(self)
        _check_standing_by(self)
        _check_speeds(self)
        for layer, layer_experts in enumerate(self.experts):
            stage_ranks = set(self.stage_of(layer).ranks) if layer_experts else set()
            for expert, replicas in enumerate(layer_experts):
                where, ranks = (
                    f"layer {layer} expert {expert}",
                    [replica.rank for replica in replicas],
                )
                _check_shares(where, ranks, [replica.share for replica in replicas])
                strangers = set(ranks) - stage_ranks
                if strangers:
                    raise ValueError(f"{where}: ranks {sorted(strangers)} run other layers")
        ranks = [rank for rank, _ in self.batch_shares]
        _check_shares("batch", ranks, [share for _, share in self.batch_shares])
        if ranks != [group[0].rank for group in self.stages[0].groups]:
            raise ValueError("batch shares must name the first rank of each data-parallel group")

    @property
    def num_layers(self) -> int:
        return len(self.experts)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the layout, ascending. The lowest is the job's leader."""
        return tuple(sorted({*self.working, *self.standing_by}))

    @cached_property
    def working(self) -> tuple[int, ...]:
        """The ranks with work, ascending: all but the standby ranks."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @cached_property
    def num_ranks_by_layer(self) -> tuple[int, ...]:
        """The number of ranks that run each layer."""
        sizes = ([len(one.ranks)] * (one.end_layer - one.first_layer) for one in self.stages)
        return tuple(chain.from_iterable(sizes))

    @cached_property
    def speed_by_rank(self) -> dict[int, float]:
        """The relative speed of each rank: 1.0 where `speeds` does not name it."""
        return dict.fromkeys(self.ranks, 1.0) | dict(self.speeds)

    @cached_property
    def replicas(self) -> frozenset[tuple[int, int, int]]:
        """(layer, expert, rank) of every replica."""
        return frozenset(
            (layer, expert, replica.rank)
            for layer, layer_experts in enumerate(self.experts)
            for expert, replicas in enumerate(layer_experts)
            for replica in replicas
        )

    def stage_of(self, layer: int) -> Stage:
        """The stage that runs `layer`. Raises ValueError for a layer the model lacks."""
        for stage in self.stages:
            if stage.first_layer <= layer < stage.end_layer:
                return stage
        raise ValueError(f"no layer {layer}")

    def holders(self, block: Block) -> tuple[int, ...]:
        """The ranks that hold `block`, ascending. Raises ValueError for a block the model lacks."""
        match block.kind:
            case BlockKind.EMBEDDING:
                return self.stages[0].ranks
            case BlockKind.HEAD:
                return self.stages[-1].ranks
            case BlockKind.EXPERT:
                self.stage_of(block.layer)
                if not 0 <= block.index < len(self.experts[block.layer]):
                    raise ValueError(f"layer {block.layer} has no expert {block.index}")
                return tuple(replica.rank for replica in self.experts[block.layer][block.index])
            case BlockKind.NORM_ROUTER:
                return self.stage_of(block.layer).ranks
            case BlockKind.ATTENTION | BlockKind.DENSE_MLP:
                if not 0 <= block.index < self.num_virtual_shards:
                    raise ValueError(f"layer {block.layer} has no virtual shard {block.index}")
                if block.kind is BlockKind.DENSE_MLP and self.experts[block.layer]:
                    raise ValueError(f"layer {block.layer} has experts instead of a dense MLP")
                runs = (run for group in self.stage_of(block.layer).groups for run in group)
                return tuple(sorted(r.rank for r in runs if r.first <= block.index < r.end))

    def blocks(self) -> Iterator[Block]:
        """Every block of the model, each once, in a fixed order."""
        yield Block(BlockKind.EMBEDDING)
        for layer, layer_experts in enumerate(self.experts):
            yield Block(BlockKind.NORM_ROUTER, layer)
            for shard in range(self.num_virtual_shards):
                yield Block(BlockKind.ATTENTION, layer, shard)
                if not layer_experts:
                    yield Block(BlockKind.DENSE_MLP, layer, shard)
            for expert in range(len(layer_experts)):
                yield Block(BlockKind.EXPERT, layer, expert)
        yield Block(BlockKind.HEAD)

    def experts_on(self, rank: int, layer: int) -> tuple[int, ...]:
        """The experts of `layer` that `rank` holds, ascending."""
        return tuple(
            expert
            for expert, replicas in enumerate(self.experts[layer])
            if any(replica.rank == rank for replica in replicas)
        )

    def shards_on(self, rank: int, layer: int) -> tuple[int, ...]:
        """The virtual shards of `layer` that `rank` holds, ascending."""
        runs = (run for group in self.stage_of(layer).groups for run in group)
        return tuple(n for run in runs if run.rank == rank for n in range(run.first, run.end))

    def place_of(self, rank: int) -> tuple[int, int]:
        """(stage, data-parallel coordinate). Raises ValueError for a rank without work."""
        for number, stage in enumerate(self.stages):
            for coordinate, group in enumerate(stage.groups):
                if any(run.rank == rank for run in group):
                    return number, coordinate
        raise ValueError(f"rank {rank} has no part")

    def batch_rank(self, rank: int) -> int:
        """The rank whose batch share `rank` works on: the first of its data-parallel coordinate.

        Raises ValueError for a rank the layout lacks.
        """
        _, coordinate = self.place_of(rank)
        return self.stages[0].groups[coordinate][0].rank

    def rows_of(self, num_rows: int) -> dict[int, int]:
        """How many of the global batch's `num_rows` rows each data-parallel rank computes."""
        return dict(
            zip(
                (rank for rank, _ in self.batch_shares),
                apportion(num_rows, [share for _, share in self.batch_shares]),
                strict=True,
            )
        )


def even_layout(
    *,
    ranks: Iterable[int],
    num_layers: int,
    num_experts: int,
    replicas: int,
    domain_of: DomainOf = NO_DOMAINS,
    num_virtual_shards: int = 1,
    num_stages: int = 1,
    tensor_size: int = 1,
    generation: int = 1,
) -> Layout:
    """The layout a job starts with: equal work on every rank.

    The `num_stages` groups of a pipeline lie in as few failure domains (nodes) as possible: a node
    that fails takes whole pipelines with it, and the others hold the same state. The replicas of an
    expert lie in as many domains as possible, those of a stage's layers in the same few sets of
    domains (`spread_replicas`). Ranks of domains of equal size get the same number of slots, give
    or take one.

    Args:
        ranks: all ranks of the job.
        num_layers: layers of the model.
        num_experts: experts per layer; 0: a dense model.
        replicas: replicas of each expert.
        domain_of: the failure domain of each rank; default: every rank is its own.
        num_virtual_shards: tensor shards of a layer that can move separately.
        num_stages: pipeline stages.
        tensor_size: ranks of a tensor group.
        generation: the number of the layout.

    Raises:
        ValueError: there are too few ranks, layers or shards, or ranks are left over.
    """
    stages = _even_stages(
        _by_domain(ranks, domain_of), num_layers, num_virtual_shards, num_stages, tensor_size
    )
    fewest = min(len(stage.ranks) for stage in stages)
    if not 1 <= replicas <= fewest:
        raise ValueError(f"{replicas} replicas of an expert need as many ranks, got {fewest}")
    layers = []
    for stage in stages:
        for layer in range(stage.first_layer, stage.end_layer):
            placed = spread_replicas(num_experts, replicas, stage.ranks, domain_of, turn=layer)
            shares = level_shares(placed, {}, 1.0)
            layers.append(
                tuple(tuple(ExpertReplica(r, share) for r, share in on.items()) for on in shares)
            )
    first = [group[0].rank for group in stages[0].groups]
    return Layout(
        generation=generation,
        num_virtual_shards=num_virtual_shards,
        stages=stages,
        experts=tuple(layers),
        batch_shares=tuple((rank, 1.0 / len(first)) for rank in first),
    )


def shard_runs(
    ranks: Sequence[int], num_shards: int, speeds: Mapping[int, float] = NO_SPEEDS
) -> tuple[ShardRun, ...]:
    """The runs of a tensor group: at least one shard per rank, the rest by speed.

    Args:
        ranks: the ranks of the group, in the order of their runs.
        num_shards: the virtual shards to distribute.
        speeds: relative speed by rank; 1.0 for ranks that it does not name.

    Raises:
        ValueError: there are more ranks than shards.
    """
    if not 1 <= len(ranks) <= num_shards:
        raise ValueError(f"{num_shards} virtual shards do not make runs for {len(ranks)} ranks")
    more = apportion(num_shards - len(ranks), [speeds.get(rank, 1.0) for rank in ranks])
    ends = list(accumulate(1 + count for count in more))
    return tuple(map(ShardRun, ranks, [0, *ends[:-1]], ends))


def _by_domain(ranks: Iterable[int], domain_of: DomainOf) -> tuple[int, ...]:
    """Ascending, with the ranks of one domain next to each other."""
    order = sorted(ranks)
    first: dict[Hashable, int] = {}
    for rank in order:
        first.setdefault(domain_of_rank(domain_of, rank), rank)
    return tuple(sorted(order, key=lambda rank: (first[domain_of_rank(domain_of, rank)], rank)))


def _even_stages(
    ranks: Sequence[int], num_layers: int, num_shards: int, num_stages: int, tensor_size: int
) -> tuple[Stage, ...]:
    size = num_stages * tensor_size
    if not ranks or len(ranks) % size:
        raise ValueError(
            f"{num_stages} stages of {tensor_size} ranks each need a multiple of {size} ranks, "
            f"got {len(ranks)}"
        )
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers do not make {num_stages} stages")
    ends = list(accumulate(apportion(num_layers, [1.0] * num_stages)))
    groups = [sorted(ranks[at : at + tensor_size]) for at in range(0, len(ranks), tensor_size)]
    # Coordinates in the order of their first ranks, as batch shares are.
    pipelines = sorted(groups[at : at + num_stages] for at in range(0, len(groups), num_stages))
    return tuple(
        Stage(
            first_layer=first,
            end_layer=end,
            groups=tuple(shard_runs(pipeline[number], num_shards) for pipeline in pipelines),
        )
        for number, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    )


def _check_stages(layout: Layout) -> None:
    if layout.generation < 1:
        raise ValueError("generations count from 1")
    if layout.num_virtual_shards < 1:
        raise ValueError("a layer has at least one virtual shard")
    if not layout.stages:
        raise ValueError("a layout needs at least one stage")
    next_layer = 0
    for stage in layout.stages:
        if stage.first_layer != next_layer or stage.end_layer <= stage.first_layer:
            raise ValueError("stages must cover the layers in order, without gap or overlap")
        next_layer = stage.end_layer
        if not stage.groups:
            raise ValueError(f"the stage of layer {stage.first_layer} has no rank")
        ranks = [run.rank for group in stage.groups for run in group]
        if min(ranks, default=0) < 0:
            raise ValueError(f"ranks count from 0, got {min(ranks)}")
        if len(ranks) != len(set(ranks)):
            raise ValueError("a rank stands in two data-parallel groups of one stage")
        if len(stage.groups) != len(layout.stages[0].groups):
            raise ValueError("a pipeline has one group in every stage: their numbers differ")
        for group in stage.groups:
            covered = 0
            for run in group:
                if run.first != covered or run.end <= run.first:
                    raise ValueError("a group's runs must cover the virtual shards in order")
                covered = run.end
            if covered != layout.num_virtual_shards:
                raise ValueError("a group does not hold all virtual shards")
    if next_layer != layout.num_layers:
        raise ValueError(f"stages cover {next_layer} layers, the model has {layout.num_layers}")


def _check_standing_by(layout: Layout) -> None:
    ranks = layout.standing_by
    if list(ranks) != sorted(set(ranks)) or min(ranks, default=0) < 0:
        raise ValueError(f"standing_by: ranks must ascend from 0, each once, got {list(ranks)}")
    busy = sorted(set(ranks) & set(layout.working))
    if busy:
        raise ValueError(f"standing_by: ranks {busy} have a part")


def _check_speeds(layout: Layout) -> None:
    ranks = [rank for rank, _ in layout.speeds]
    if ranks != sorted(set(ranks)) or not set(ranks) <= set(layout.ranks):
        raise ValueError(f"speeds: must be of ranks of the layout, ascending, got {ranks}")
    if not all(0.0 < speed < inf for _, speed in layout.speeds):
        raise ValueError("speeds: must be finite and above 0")


def _check_shares(what: str, ranks: Sequence[int], shares: Sequence[float]) -> None:
    """Check one share list; the work per item runs in C, as layouts have tens of thousands."""
    if not ranks:
        raise ValueError(f"{what}: it has no holder")
    if not all(map(lt, ranks, ranks[1:])):
        raise ValueError(f"{what}: ranks must ascend, each once, got {ranks}")
    total = sum(shares)
    if not isfinite(total) or min(shares) < 0.0:
        raise ValueError(f"{what}: shares must be finite and not negative")
    if abs(total - 1.0) > SHARE_TOLERANCE:
        raise ValueError(f"{what}: shares must add up to 1")
