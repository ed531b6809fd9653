"""The layout: which rank holds which block of the model and computes which share of the work.

Pure data with its invariants; `holders` maps a block to ranks. The layout that a job starts with:
`core/layout/even_layout.py`; the difference of two layouts: `core/layout/diff.py`; JSON form:
`core/layout/codec.py`; without dead ranks: `core/layout/resize/shrink.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from math import inf

from pacekeeper.core.layout.apportion import apportion, check_shares, consecutive
from pacekeeper.core.layout.pipeline_schedule import RUN_SCHEDULES, Schedule


class BlockKind(StrEnum):
    """Kinds of state that move or are saved as one unit, with their optimizer state."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM_ROUTER = "norm_router"  # of one layer
    ATTENTION = "attention"  # one virtual shard of one layer
    DENSE_MLP = "dense_mlp"  # one virtual shard of one layer: all its MLP, or its shared experts
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
            case BlockKind.ATTENTION | BlockKind.DENSE_MLP:
                name = "attention" if self.kind is BlockKind.ATTENTION else "MLP"
                return f"layer {self.layer} {name} shard {self.index}"
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
    """Layers [first_layer, end_layer) of one pipeline, on the ranks of one tensor group.

    Attributes:
        first_layer: the first layer that the group runs.
        end_layer: the layer after the last.
        attention: the group's runs; they cover all attention shards of a layer in order.
        mlp: the runs of the same ranks, in the same order, over the MLP shards of a layer. A rank
            may have an empty run [n, n) of one kind; the engine runs layouts in which every rank
            has an attention shard.

    Raises:
        ValueError: there is no layer or rank, runs do not cover the shards in order, a rank repeats
            or has no shard of either kind.
    """

    first_layer: int
    end_layer: int
    attention: tuple[ShardRun, ...]
    mlp: tuple[ShardRun, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer < self.end_layer:
            raise ValueError(f"layers {self.first_layer} to {self.end_layer - 1}: not a stage")
        ranks = self.group
        if not ranks:
            raise ValueError(f"the stage of layer {self.first_layer} has no rank")
        if min(ranks) < 0:
            raise ValueError(f"ranks count from 0, got {min(ranks)}")
        _check_cover(self.attention)
        if self.mlp is self.attention or self.mlp == self.attention:
            sizes = [run.end - run.first for run in self.attention]
        else:
            _check_cover(self.mlp)
            if ranks != tuple(run.rank for run in self.mlp):
                raise ValueError("attention and MLP runs must name the same ranks in one order")
            both = zip(self.attention, self.mlp, strict=True)
            sizes = [a.end - a.first + m.end - m.first for a, m in both]
        if min(sizes) < 1:
            raise ValueError(f"ranks {list(ranks)} of a group: one of them has no shard")

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks of the tensor group, in the order of their runs."""
        return tuple(run.rank for run in self.attention)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the tensor group, ascending."""
        return tuple(sorted(self.group))

    @property
    def num_layers(self) -> int:
        """How many layers the stage runs."""
        return self.end_layer - self.first_layer

    def runs(self, kind: BlockKind) -> tuple[ShardRun, ...]:
        """The runs of this kind of shards: `ATTENTION` or `DENSE_MLP`."""
        return self.attention if kind is BlockKind.ATTENTION else self.mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The stages of one data-parallel rank and its share of the batch.

    Attributes:
        stages: in the order of their layers.
        batch_share: its share of the rows; with `stage_shares`, after a death or a join only.
        stage_shares: its share of the rows at each stage, where these differ: hidden states go to
            the pipelines that compute the next stage. (): the batch share.

    Raises:
        ValueError: stages do not cover the layers in order, or are not as many as their shares.
    """

    stages: tuple[Stage, ...]
    batch_share: float
    stage_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        next_layer = 0
        for stage in self.stages:
            if stage.first_layer != next_layer:
                raise ValueError("stages must cover the layers in order, without gap or overlap")
            next_layer = stage.end_layer
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage")
        if self.stage_shares and len(self.stage_shares) != len(self.stages):
            raise ValueError(
                f"a pipeline of {len(self.stages)} stages has {len(self.stage_shares)} shares"
            )

    @property
    def leader(self) -> int:
        """The rank that names the pipeline: the first of its first stage."""
        return self.stages[0].attention[0].rank

    def share_at(self, stage: int) -> float:
        """Its share of the rows at a stage."""
        return self.stage_shares[stage] if self.stage_shares else self.batch_share

    @property
    def ends(self) -> tuple[int, ...]:
        """The layer after the last of each stage."""
        return tuple(stage.end_layer for stage in self.stages)


@dataclass(frozen=True, slots=True, order=True)
class StateOwner:
    """The rank that has and updates the optimizer state of a dense block, and one with a copy.

    `mirror`: None only for a block with a single holder.
    """

    owner: int
    mirror: int | None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The owner, then the mirror if there is one."""
        return (self.owner,) if self.mirror is None else (self.owner, self.mirror)


ReplicaSet = tuple[ExpertReplica, ...]
"""The replicas of one expert, in ascending rank order; shares add up to 1."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Layers [first, end) that no pipeline cuts, and the stage of each pipeline that runs them."""

    first: int
    end: int
    stages: tuple[Stage, ...]
    ranks: tuple[int, ...]
    shards: dict[BlockKind, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def holders(self, kind: BlockKind) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each shard of a layer, ascending."""
        if kind not in self.shards:
            found: list[list[int]] = [[] for _ in range(self.stages[0].runs(kind)[-1].end)]
            for stage in self.stages:
                for run in stage.runs(kind):
                    for shard in range(run.first, run.end):
                        found[shard].append(run.rank)
            self.shards[kind] = tuple(tuple(sorted(ranks)) for ranks in found)
        return self.shards[kind]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The blocks that each rank holds and the share it computes, under one generation number.

    Attributes:
        generation: counts the layouts of a job from 1.
        num_attention_shards: the virtual shards of a layer's attention.
        num_mlp_shards: the virtual shards of a layer's dense MLP.
        pipelines: in ascending order of their leaders. Each has its own stages, tensor groups and
            batch share; the shares add up to 1. Stage shares: all pipelines have them, with equal
            cuts, or none; those of a stage add up to 1.
        experts: `experts[layer][expert]` is the expert's `ReplicaSet`, on ranks that run the layer
            in any pipeline; a dense layer has no experts.
        shared_mlp_layers: the layers, ascending, that have a dense MLP beside their experts (shared
            experts). A layer without experts always has one.
        state_owners: the owner and mirror of each of `owned_blocks()`, among its holders; empty:
            every holder of a block has its optimizer state. Every replica of an expert, and every
            holder of norms and routers, has its own.
        speeds: ranks, ascending, that get less expert work than their peers (speed 1.0). A trainer
            that splits tokens in every step divides by them; the replicas' shares are then its
            forecast.
        standing_by: standby ranks, ascending: they hold and compute nothing. Those that `speeds`
            does not name get work when others join.
        schedule: the order of forward and backward passes in the pipelines.

    Raises:
        ValueError: a block has no holder, shares do not add up to 1, or a rank repeats.
    """

    generation: int
    num_attention_shards: int
    num_mlp_shards: int
    pipelines: tuple[Pipeline, ...]
    experts: tuple[tuple[ReplicaSet, ...], ...]
    shared_mlp_layers: tuple[int, ...] = ()
    state_owners: tuple[StateOwner, ...] = ()
    speeds: tuple[tuple[int, float], ...] = ()
    standing_by: tuple[int, ...] = ()
    schedule: Schedule = Schedule.ONE_F_ONE_B

    def __post_init__(self) -> None:
        if self.schedule not in RUN_SCHEDULES:
            raise ValueError(f"schedule: expected one of {RUN_SCHEDULES}, got {self.schedule!r}")
        _check_pipelines(self)
        _check_ranks(self)
        with_experts = {layer for layer, experts in enumerate(self.experts) if experts}
        shared = self.shared_mlp_layers
        if list(shared) != sorted(with_experts.intersection(shared)):
            raise ValueError(f"shared_mlp_layers: must have experts and ascend, got {list(shared)}")
        for span in self._spans:
            there = frozenset(span.ranks)
            for layer in range(span.first, span.end):
                for expert, replicas in enumerate(self.experts[layer]):
                    ranks = [replica.rank for replica in replicas]
                    where = "layer", layer, "expert", expert
                    check_shares(where, ranks, [replica.share for replica in replicas])
                    if not there.issuperset(ranks):
                        strangers = sorted(set(ranks) - there)
                        name = f"layer {layer} expert {expert}"
                        raise ValueError(f"{name}: ranks {strangers} run other layers")
        check_shares(("batch",), *zip(*self.batch_shares, strict=True))
        _check_stage_shares(self)
        if self.state_owners:
            _check_state_owners(self)

    @property
    def num_layers(self) -> int:
        """The layers of the model."""
        return len(self.experts)

    @property
    def model(self) -> tuple[object, ...]:
        """What is equal in all layouts of one model; it determines `blocks()`."""
        shards = self.num_attention_shards, self.num_mlp_shards
        return *shards, self.shared_mlp_layers, tuple(map(len, self.experts))

    @cached_property
    def batch_shares(self) -> tuple[tuple[int, float], ...]:
        """(leader, batch share) of each pipeline."""
        return tuple((pipeline.leader, pipeline.batch_share) for pipeline in self.pipelines)

    @cached_property
    def stage_shares(self) -> tuple[tuple[float, ...], ...]:
        """By stage, the share of the rows of each pipeline; (): the batch shares at each."""
        return tuple(zip(*(pipeline.stage_shares for pipeline in self.pipelines), strict=True))

    @cached_property
    def mesh(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of each pipeline: where layers and shards lie, without any share."""
        return tuple(pipeline.stages for pipeline in self.pipelines)

    @cached_property
    def has_equal_cuts(self) -> bool:
        """Whether all pipelines have the same number of stages, of the same layers."""
        return len({pipeline.ends for pipeline in self.pipelines}) == 1

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the layout, ascending. The lowest is the job's leader."""
        return tuple(sorted({*self.working, *self.standing_by}))

    @cached_property
    def working(self) -> tuple[int, ...]:
        """The ranks with work, ascending: all but the standby ranks."""
        return tuple(sorted(self.places))

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """(stage, pipeline) of each rank with work, in the order of pipelines."""
        return {
            run.rank: (number, at)
            for at, stages in enumerate(self.mesh)
            for number, stage in enumerate(stages)
            for run in stage.attention
        }

    @cached_property
    def num_ranks_by_layer(self) -> tuple[int, ...]:
        """The number of ranks that run each layer."""
        return tuple(len(span.ranks) for span in self._span_by_layer)

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

    @property
    def spans(self) -> tuple[range, ...]:
        """The largest ranges of layers that no pipeline cuts: its stages, where all cuts are equal.

        The layers of a span run on the same ranks, and their shards lie on the same ranks.
        """
        return tuple(range(span.first, span.end) for span in self._spans)

    @cached_property
    def _spans(self) -> tuple[_Span, ...]:
        return _spans(self.pipelines)

    @cached_property
    def _span_by_layer(self) -> tuple[_Span, ...]:
        return tuple(span for span in self._spans for _ in range(span.first, span.end))

    def _span_of(self, layer: int) -> _Span:
        if not 0 <= layer < len(self.experts):
            raise ValueError(f"no layer {layer}")
        return self._span_by_layer[layer]

    def stages_of_layer(self, layer: int) -> tuple[Stage, ...]:
        """The stage of each pipeline that runs `layer`. Raises ValueError: no such layer."""
        return self._span_of(layer).stages

    def ranks_of_layer(self, layer: int) -> tuple[int, ...]:
        """The ranks that run `layer`, ascending. Raises ValueError: no such layer."""
        return self._span_of(layer).ranks

    def has_dense_mlp(self, layer: int) -> bool:
        """Whether `layer` has `DENSE_MLP` blocks."""
        return not self.experts[layer] or layer in self.shared_mlp_layers

    def holders(self, block: Block) -> tuple[int, ...]:
        """The ranks that hold `block`, ascending. Raises ValueError for a block the model lacks."""
        match block.kind:
            case BlockKind.EMBEDDING:
                return self._spans[0].ranks
            case BlockKind.HEAD:
                return self._spans[-1].ranks
            case BlockKind.EXPERT:
                self._span_of(block.layer)
                if not 0 <= block.index < len(self.experts[block.layer]):
                    raise ValueError(f"layer {block.layer} has no expert {block.index}")
                return tuple(replica.rank for replica in self.experts[block.layer][block.index])
            case BlockKind.NORM_ROUTER:
                return self._span_of(block.layer).ranks
            case BlockKind.ATTENTION | BlockKind.DENSE_MLP:
                held = self._span_of(block.layer).holders(block.kind)
                if block.kind is BlockKind.DENSE_MLP and not self.has_dense_mlp(block.layer):
                    raise ValueError(f"layer {block.layer} has experts instead of a dense MLP")
                if not 0 <= block.index < len(held):
                    raise ValueError(f"layer {block.layer} has no virtual shard {block.index}")
                return held[block.index]

    def holds_dense(self, rank: int, block: Block) -> bool:
        """Whether `rank` holds `block`, which is none of an expert; without a list of holders."""
        if rank not in self.places:
            return False
        number, at = self.places[rank]
        stages = self.pipelines[at].stages
        match block.kind:
            case BlockKind.EMBEDDING:
                return number == 0
            case BlockKind.HEAD:
                return number == len(stages) - 1
        stage = stages[number]
        if not stage.first_layer <= block.layer < stage.end_layer:
            return False
        return block.kind is BlockKind.NORM_ROUTER or any(
            run.rank == rank and run.first <= block.index < run.end
            for run in stage.runs(block.kind)
        )

    @cached_property
    def state_owner_by_block(self) -> dict[Block, StateOwner]:
        """The owner and mirror of each of `owned_blocks()`; {}: all holders have all state."""
        if not self.state_owners:
            return {}
        return dict(zip(self.owned_blocks(), self.state_owners, strict=True))

    def state_holders(self, block: Block) -> tuple[int, ...]:
        """The ranks that have the optimizer state of `block`, ascending.

        Raises ValueError for a block the model lacks.
        """
        owner = self.state_owner_by_block.get(block)
        return self.holders(block) if owner is None else tuple(sorted(owner.ranks))

    def blocks(self) -> Iterator[Block]:
        """Every block of the model, each once, in a fixed order."""
        yield Block(BlockKind.EMBEDDING)
        for layer, layer_experts in enumerate(self.experts):
            yield from self._dense_blocks_of(layer)
            for expert in range(len(layer_experts)):
                yield Block(BlockKind.EXPERT, layer, expert)
        yield Block(BlockKind.HEAD)

    def dense_blocks(self) -> Iterator[Block]:
        """The blocks that are not of experts, in the order of `blocks()`."""
        yield Block(BlockKind.EMBEDDING)
        for layer in range(self.num_layers):
            yield from self._dense_blocks_of(layer)
        yield Block(BlockKind.HEAD)

    def owned_blocks(self) -> Iterator[Block]:
        """The blocks whose optimizer state may have an owner, in the order of `blocks()`.

        The dense blocks without norms and routers: these are small, and with their state goes what
        an optimizer keeps of the layer's experts together.
        """
        return (one for one in self.dense_blocks() if one.kind is not BlockKind.NORM_ROUTER)

    def _dense_blocks_of(self, layer: int) -> Iterator[Block]:
        yield Block(BlockKind.NORM_ROUTER, layer)
        num_mlp_shards = self.num_mlp_shards if self.has_dense_mlp(layer) else 0
        for shard in range(max(self.num_attention_shards, num_mlp_shards)):
            if shard < self.num_attention_shards:
                yield Block(BlockKind.ATTENTION, layer, shard)
            if shard < num_mlp_shards:
                yield Block(BlockKind.DENSE_MLP, layer, shard)

    def experts_on(self, rank: int, layer: int) -> tuple[int, ...]:
        """The experts of `layer` that `rank` holds, ascending."""
        return tuple(
            expert
            for expert, replicas in enumerate(self.experts[layer])
            if any(replica.rank == rank for replica in replicas)
        )

    def place_of(self, rank: int) -> tuple[int, int]:
        """(stage, pipeline) of `rank`. Raises ValueError for a rank without work."""
        if rank not in self.places:
            raise ValueError(f"rank {rank} has no part")
        return self.places[rank]

    def batch_share_of(self, rank: int) -> float:
        """The share of the rows that the stage of `rank` computes; 0 for a rank without work."""
        place = self.places.get(rank)
        return self.pipelines[place[1]].share_at(place[0]) if place else 0.0

    def rows_at(self, stage: int, num_rows: int) -> tuple[range, ...]:
        """The places of a global batch of `num_rows` that each pipeline computes at a stage."""
        return consecutive(num_rows, [pipeline.share_at(stage) for pipeline in self.pipelines])

    def most_rows(self, num_rows: int) -> int:
        """The rows of a global batch of `num_rows` in the pipeline and stage that has most."""
        stages = range(len(self.stage_shares) or 1)
        return max(len(rows) for stage in stages for rows in self.rows_at(stage, num_rows))

    def rows_of(self, num_rows: int) -> dict[int, int]:
        """How many of `num_rows` rows each pipeline has by its batch share, by its leader."""
        counts = apportion(num_rows, [share for _, share in self.batch_shares])
        return {rank: n for (rank, _), n in zip(self.batch_shares, counts, strict=True)}


def ranks_by_layer(pipelines: Sequence[Pipeline]) -> list[tuple[int, ...]]:
    """The ranks that run each layer, ascending."""
    spans = _spans(pipelines)
    return [span.ranks for span in spans for _ in range(span.first, span.end)]


def with_batch_shares(
    pipelines: Sequence[Pipeline], shares: Iterable[float]
) -> tuple[Pipeline, ...]:
    """The same pipelines with these batch shares at all stages, in their order."""
    return tuple(
        replace(pipeline, batch_share=share, stage_shares=())
        for pipeline, share in zip(pipelines, shares, strict=True)
    )


def _spans(pipelines: Sequence[Pipeline]) -> tuple[_Span, ...]:
    ends = sorted({end for pipeline in pipelines for end in pipeline.ends})
    spans, at = [], [0] * len(pipelines)
    for first, end in pairwise([0, *ends]):
        stages = tuple(p.stages[n] for p, n in zip(pipelines, at, strict=True))
        ranks = tuple(sorted(run.rank for stage in stages for run in stage.attention))
        spans.append(_Span(first, end, stages, ranks))
        at = [n + (stage.end_layer == end) for n, stage in zip(at, stages, strict=True)]
    return tuple(spans)


def _check_cover(runs: Sequence[ShardRun]) -> None:
    covered = 0
    for run in runs:
        if run.first != covered or run.end < run.first:
            raise ValueError("a group's runs must cover the virtual shards in order")
        covered = run.end


def _check_pipelines(layout: Layout) -> None:
    if layout.generation < 1:
        raise ValueError("generations count from 1")
    shards = layout.num_attention_shards, layout.num_mlp_shards
    if min(shards) < 1:
        raise ValueError("a layer has at least one virtual shard of each kind")
    if not layout.pipelines:
        raise ValueError("a layout needs at least one pipeline")
    for pipeline in layout.pipelines:
        if pipeline.ends[-1] != layout.num_layers:
            covered = pipeline.ends[-1]
            raise ValueError(f"stages cover {covered} layers, the model has {layout.num_layers}")
        for stage in pipeline.stages:
            if (stage.attention[-1].end, stage.mlp[-1].end) != shards:
                raise ValueError("a group does not hold all virtual shards")
    count = sum(len(stage.attention) for stages in layout.mesh for stage in stages)
    if count != len(layout.places):
        raise ValueError("a rank stands in two tensor groups")


def _check_ranks(layout: Layout) -> None:
    ranks = layout.standing_by
    if list(ranks) != sorted(set(ranks)) or min(ranks, default=0) < 0:
        raise ValueError(f"standing_by: ranks must ascend from 0, each once, got {list(ranks)}")
    if busy := sorted(set(ranks) & set(layout.working)):
        raise ValueError(f"standing_by: ranks {busy} have a part")
    ranks = tuple(rank for rank, _ in layout.speeds)
    if list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(layout.ranks):
        raise ValueError(f"speeds: must be of ranks of the layout, ascending, got {list(ranks)}")
    if not all(0.0 < speed < inf for _, speed in layout.speeds):
        raise ValueError("speeds: must be finite and above 0")


def _check_stage_shares(layout: Layout) -> None:
    if len({len(pipeline.stage_shares) for pipeline in layout.pipelines}) > 1:
        raise ValueError("stage_shares: some pipelines have none, or fewer stages")
    if layout.stage_shares and not layout.has_equal_cuts:
        raise ValueError("stage_shares: stages of the pipelines are not of the same layers")
    for stage, shares in enumerate(layout.stage_shares):
        check_shares(("stage", stage), [one.leader for one in layout.pipelines], shares)


def _check_state_owners(layout: Layout) -> None:
    blocks = tuple(layout.owned_blocks())
    if len(blocks) != len(layout.state_owners):
        raise ValueError(
            f"state_owners: {len(blocks)} blocks have {len(layout.state_owners)} owners"
        )
    for block, owner in zip(blocks, layout.state_owners, strict=True):
        if not all(layout.holds_dense(rank, block) for rank in owner.ranks):
            raise ValueError(f"{block}: owner and mirror {list(owner.ranks)} do not both hold it")
        if owner.mirror == owner.owner:
            raise ValueError(f"{block}: rank {owner.owner} is owner and mirror")
        if owner.mirror is None and len(layout.holders(block)) > 1:
            raise ValueError(f"{block}: it has several holders and no mirror")
