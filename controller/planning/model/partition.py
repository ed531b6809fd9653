"""A partition of the job: layers of stages, shards of ranks, rows of pipelines; and a plan for one.

More general than `core.layout.Layout`: pipelines that share no experts may differ in depth, layers
and micro-batches. `partition.layout_codec` converts between the two where possible.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pacekeeper.core.layout.layout import ShardRun
from pacekeeper.core.layout.pipeline_schedule import RUN_SCHEDULES, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShard:
    """Layers [first_layer, end_layer) of one pipeline, on the ranks of one tensor group.

    `attention` and `mlp` are runs of virtual shards in order; a rank may hold shards of one kind
    only. Norms and router are replicated on every rank.
    """

    first_layer: int
    end_layer: int
    attention: tuple[ShardRun, ...]
    mlp: tuple[ShardRun, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer < self.end_layer:
            raise ValueError("a stage has at least one layer")
        for name, runs in (("attention", self.attention), ("mlp", self.mlp)):
            covered = 0
            for run in runs:
                if run.first != covered or run.end <= run.first:
                    raise ValueError(f"{name} runs must cover the virtual shards in order")
                covered = run.end
            if not runs or len({run.rank for run in runs}) != len(runs):
                raise ValueError(f"{name}: one run for each rank that has one, got {runs}")

    def __hash__(self) -> int:
        """Hash of the fields that usually differ; plans of large jobs look shards up often."""
        first = self.attention[0]
        return hash((self.first_layer, self.end_layer, first.rank, first.end, self.mlp[0].end))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({run.rank for run in (*self.attention, *self.mlp)}))

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One data-parallel rank's stages, and the rows of each of its micro-batches.

    Attributes:
        cells: its stages, in the order of their layers.
        micro_batches: rows of each; 0 where pipelines that share experts have more.
        expert_group: pipelines of the same one share experts, stage by stage; None: no experts.
        stage_batches: [stages] of `micro_batches`, where pipelines compute other shares of the rows
            at each stage; (): `micro_batches` at all.

    Raises:
        ValueError: stages leave out layers, or there are no rows.
    """

    cells: tuple[StageShard, ...]
    micro_batches: tuple[int, ...]
    expert_group: int | None = None
    stage_batches: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        next_layer = 0
        for cell in self.cells:
            if cell.first_layer != next_layer:
                raise ValueError("stages must cover the layers in order, without gap or overlap")
            next_layer = cell.end_layer
        if not self.cells or sum(self.micro_batches) < 1 or min(self.micro_batches) < 0:
            raise ValueError("a pipeline has stages, and micro-batches of at least one row in all")
        if self.stage_batches and len(self.stage_batches) != len(self.cells):
            raise ValueError("a pipeline with rows by stage has rows of each stage")

    @property
    def rows(self) -> int:
        return sum(self.micro_batches)

    def batches_at(self, stage: int) -> tuple[int, ...]:
        """Rows of each micro-batch at a stage."""
        return self.stage_batches[stage] if self.stage_batches else self.micro_batches

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layer after the last of each stage."""
        return tuple(cell.end_layer for cell in self.cells)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for cell in self.cells for rank in cell.ranks))


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Assignment of layers, shards and rows to ranks. Other ranks are idle or dead.

    Attributes:
        pipelines: their stages and rows.
        schedule: the order of forward and backward passes in all of them.

    Raises:
        ValueError: a rank appears twice, pipelines belong to different models, or the schedule has
            no program.
    """

    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = Schedule.ONE_F_ONE_B

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ValueError("a job has at least one pipeline")
        if self.schedule not in RUN_SCHEDULES:
            raise ValueError(f"schedule: expected one of {RUN_SCHEDULES}, got {self.schedule!r}")
        number = Counter(rank for pipeline in self.pipelines for rank in pipeline.ranks)
        twice = sorted(rank for rank, count in number.items() if count > 1)
        if twice:
            raise ValueError(f"ranks {twice} stand in two places")
        shapes = {
            (pipeline.cuts[-1], cell.attention[-1].end, cell.mlp[-1].end)
            for pipeline in self.pipelines
            for cell in pipeline.cells
        }
        if len(shapes) != 1:
            raise ValueError(f"pipelines of several models: layers and shards {sorted(shapes)}")
        if self.has_rows_by_stage:
            _check_rows_by_stage(self.pipelines)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for pipeline in self.pipelines for rank in pipeline.ranks))

    @property
    def has_rows_by_stage(self) -> bool:
        """Whether pipelines compute other shares of the rows at each stage."""
        return any(pipeline.stage_batches for pipeline in self.pipelines)

    @property
    def rows_per_step(self) -> int:
        return sum(pipeline.rows for pipeline in self.pipelines)

    def expert_groups(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """By expert group and stage: the ranks that share experts, those of one dispatch group."""
        ranks: dict[tuple[int, int], list[int]] = {}
        for pipeline in self.pipelines:
            if pipeline.expert_group is not None:
                for stage, cell in enumerate(pipeline.cells):
                    ranks.setdefault((pipeline.expert_group, stage), []).extend(cell.ranks)
        return {key: tuple(sorted(found)) for key, found in ranks.items()}

    def places(self) -> Iterator[tuple[int, int, StageShard]]:
        """Each cell with its pipeline and stage."""
        for at, pipeline in enumerate(self.pipelines):
            for stage, cell in enumerate(pipeline.cells):
                yield at, stage, cell


def _check_rows_by_stage(pipelines: Sequence[Pipeline]) -> None:
    """Each row of each micro-batch is computed once at each stage. Raises ValueError."""
    if len({pipeline.cuts for pipeline in pipelines}) > 1:
        raise ValueError("pipelines with rows by stage have the same layers in each stage")
    for stage in range(len(pipelines[0].cells)):
        batches = (pipeline.batches_at(stage) for pipeline in pipelines)
        rows = [sum(of) for of in zip(*batches, strict=True)]
        if rows != [sum(of) for of in zip(*(p.micro_batches for p in pipelines), strict=True)]:
            raise ValueError(f"stage {stage} computes {rows} rows of the micro-batches, not all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """State transfers that a partition needs.

    Attributes:
        bytes_in: (rank, bytes) of state it lacks and receives from living ranks.
        bytes_from_checkpoint: state that no living rank holds.
        move_s: pause and the slowest transfer.
    """

    bytes_in: tuple[tuple[int, float], ...]
    bytes_from_checkpoint: float
    move_s: float

    @property
    def total_bytes(self) -> float:
        return sum(count for _, count in self.bytes_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """A partition with its forecast.

    Attributes:
        partition: the result.
        step_s: predicted step time.
        fluid_s: healthy step time spread over all speeds; a plan better than the healthy one may
            pass it.
        memory_bytes: (rank, peak bytes).
        moves: transfers from the present partition.
        standby: living ranks without work.
        evicted: dead ranks.
        reason: the chosen candidate and its figures.
    """

    partition: Partition
    step_s: float
    fluid_s: float
    memory_bytes: tuple[tuple[int, float], ...]
    moves: Moves
    standby: tuple[int, ...]
    evicted: tuple[int, ...]
    reason: str

    @property
    def fluid_fraction(self) -> float:
        """Throughput over the fluid limit's."""
        return self.fluid_s / self.step_s if self.step_s > 0.0 else 0.0

    @property
    def gap(self) -> float:
        return self.step_s / self.fluid_s - 1.0
