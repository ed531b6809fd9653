"""Time of each micro-batch on each stage, and of the exchange at the end of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.collectives import (
    MixedStage,
    gradient_sync_s,
    mixed_stage,
)
from pacekeeper.controller.planning.partition_cost.compute import (
    Array,
    GroupCost,
    forward_messages_s,
    layer_sums,
    message_s,
    micro_batch_s,
    shard_cost,
)
from pacekeeper.core.layout.pipeline_schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTimes:
    """One pipeline in a step. forward_s, backward_s, weight_s [stages, micro-batches]: backward_s
    without the weight gradients; message_s [stages - 1, micro-batches]: one boundary, one way;
    sync_s [stages]: exchange of gradients after the last micro-batch. cuts: of its stages.
    schedule: the order of its chunks.
    """

    forward_s: Array
    backward_s: Array
    weight_s: Array
    message_s: Array
    sync_s: Array
    cuts: tuple[int, ...]
    schedule: Schedule

    def key(self) -> tuple[object, ...]:
        """Equal for pipelines that take as long."""
        arrays = (self.forward_s, self.backward_s, self.weight_s, self.message_s, self.sync_s)
        return (self.cuts, self.schedule, *(array.tobytes() for array in arrays))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardTimes:
    """Times of one stage shard.

    Attributes:
        cost: of its tensor group.
        communication_s: one row's messages.
        sum_s: messages of a micro-batch.
        expert_s: experts of one row at speed 1.
        speed: sum over its ranks.
    """

    cost: GroupCost
    communication_s: float
    sum_s: float
    expert_s: float
    speed: float


class StageTimeModel:
    """Times of partitions of one problem; results are cached by stage shard."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        self.sums = layer_sums(problem.model, problem.links)
        self._cells: dict[StageShard, _ShardTimes] = {}
        self._own: dict[tuple[StageShard, float], float] = {}
        self._syncs: dict[tuple[StageShard, int, bool], float] = {}
        self._messages: dict[tuple[StageShard, StageShard], tuple[float, float]] = {}

    def times(self, partition: Partition) -> tuple[PipelineTimes, ...]:
        """Times of each pipeline.

        Pipelines that share experts, or the rows of a micro-batch, wait for the slowest of them,
        micro-batch by micro-batch.
        """
        nodes = {self.problem.device_of[rank].node for rank in partition.ranks}
        parts: dict[object, list[int]] = {}
        for at, pipeline in enumerate(partition.pipelines):
            is_alone = pipeline.expert_group is None and not pipeline.stage_batches
            together = ("alone", at) if is_alone else pipeline.expert_group
            parts.setdefault(together, []).append(at)
        result: dict[int, PipelineTimes] = {}
        for members in parts.values():
            pipelines = [partition.pipelines[at] for at in members]
            forward_s, backward_s, weight_s = self._compute(pipelines, partition.schedule)
            shared_s = self._shared_boundaries(pipelines) if partition.has_rows_by_stage else None
            for at, pipeline in zip(members, pipelines, strict=True):
                result[at] = PipelineTimes(
                    forward_s=forward_s,
                    backward_s=backward_s,
                    weight_s=weight_s,
                    message_s=self._boundaries(pipeline) if shared_s is None else shared_s,
                    sync_s=np.array(
                        [
                            self.sync_s(cell, len(partition.pipelines), len(nodes) == 1)
                            for cell in pipeline.cells
                        ]
                    ),
                    cuts=pipeline.cuts,
                    schedule=partition.schedule,
                )
        return tuple(result[at] for at in range(len(partition.pipelines)))

    def chunk_s(self, cell: StageShard, rows: float) -> tuple[float, float, float]:
        """Forward, input and weight gradients of a micro-batch on ranks that wait for no others."""
        of, ratio = self._cell(cell), self.problem.model.backward_ratio
        own_s = self._own_s(cell, rows)
        own_s += rows * of.expert_s * self.problem.unevenness / of.speed
        messages_s = rows * of.communication_s + of.sum_s
        half_s = 0.5 * ratio * own_s
        return own_s + messages_s, half_s + messages_s, half_s

    def boundary_s(self, sender: StageShard, receiver: StageShard, rows: float) -> float:
        """A micro-batch's message from one stage to the next."""
        fixed_s, of_row_s = self._message(sender, receiver)
        return fixed_s + of_row_s * rows

    def sync_s(self, cell: StageShard, num_pipelines: int, is_inside: bool) -> float:
        """The exchange of gradients after the last micro-batch."""
        key = (cell, num_pipelines, is_inside)
        if key not in self._syncs:
            self._syncs[key] = gradient_sync_s(
                cell, num_pipelines, self.problem, is_inside=is_inside
            )
        return self._syncs[key]

    def _compute(
        self, pipelines: Sequence[Pipeline], schedule: Schedule
    ) -> tuple[Array, Array, Array]:
        """Forward, input and weight gradients [stages, micro-batches] of one lock-step."""
        stages = range(len(pipelines[0].cells))
        # rows, compute_s [pipelines, stages, micro-batches]; the rest [pipelines, stages]
        rows = np.array([[one.batches_at(stage) for stage in stages] for one in pipelines], float)
        ratio = self.problem.model.backward_ratio
        cells = [[self._cell(cell) for cell in pipeline.cells] for pipeline in pipelines]
        compute_s = np.array(
            [
                [
                    [self._own_s(cell, count) for count in counts]
                    for cell, counts in zip(pipeline.cells, of_stages, strict=True)
                ]
                for pipeline, of_stages in zip(pipelines, rows.tolist(), strict=True)
            ]
        )
        communication = np.array(
            [[cell.communication_s for cell in of_pipeline] for of_pipeline in cells]
        )
        sums = np.array([[cell.sum_s for cell in of_pipeline] for of_pipeline in cells])
        speed = np.array([[cell.speed for cell in of_pipeline] for of_pipeline in cells])
        expert = np.array([cell.expert_s for cell in cells[0]])
        expert *= self.problem.unevenness / speed.sum(axis=0)
        together_s = expert[:, None] * rows.sum(axis=0)
        mixed = self._mixed(pipelines, cells, rows)

        def chunk_s(scale: float, *, has_messages: bool = True) -> Array:
            """Seconds until the slowest pipeline; compute and messages may have different
            slowest ones.
            """
            own_s = scale * compute_s
            if has_messages:
                own_s += communication[:, :, None] * rows + sums[:, :, None]
            slowest: Array = own_s.max(axis=0)
            for stage, groups in mixed:
                slowest[stage] = groups.chunk_s(scale) if has_messages else groups.weight_s(scale)
            slowest += scale * together_s
            return slowest

        weight_s = chunk_s(0.5 * ratio, has_messages=False)
        if schedule is Schedule.ZERO_BUBBLE:
            return chunk_s(1.0), chunk_s(0.5 * ratio), weight_s
        # Input and weight gradients are one chunk: pipelines wait for each other once, at its end.
        return chunk_s(1.0), chunk_s(ratio) - weight_s, weight_s

    def _mixed(
        self, pipelines: Sequence[Pipeline], cells: Sequence[Sequence[_ShardTimes]], rows: Array
    ) -> list[tuple[int, MixedStage]]:
        """Stages whose experts are shared by groups that differ."""
        if len(pipelines) == 1:
            return []
        found = []
        for stage, cell in enumerate(pipelines[0].cells):
            costs = [of_pipeline[stage].cost for of_pipeline in cells]
            mixed = mixed_stage(costs, cell.first_layer, cell.end_layer, self.sums, rows[:, stage])
            if mixed is not None:
                found.append((stage, mixed))
        return found

    def _cell(self, cell: StageShard) -> _ShardTimes:
        found = self._cells.get(cell)
        if found is None:
            problem, sums = self.problem, self.sums
            first, end = cell.first_layer, cell.end_layer
            cost = shard_cost(cell, problem.model, problem.links, problem.device_of)
            communication_s = forward_messages_s(sums, cost)
            found = self._cells[cell] = _ShardTimes(
                cost=cost,
                communication_s=float(communication_s[end] - communication_s[first]),
                sum_s=(end - first) * cost.sum_s,
                expert_s=float(sums.expert_s[end] - sums.expert_s[first]),
                speed=cost.speed,
            )
        return found

    def _own_s(self, cell: StageShard, rows: float) -> float:
        """The forward of a micro-batch on the cell's ranks, without messages and experts."""
        key = (cell, rows)
        if key not in self._own:
            sums_s = micro_batch_s(self.sums, self._cell(cell).cost, rows)
            self._own[key] = float(sums_s[cell.end_layer] - sums_s[cell.first_layer])
        return self._own[key]

    def _boundaries(self, pipeline: Pipeline) -> Array:
        """[stages - 1, micro-batches]"""
        each = [self._message(*pair) for pair in pairwise(pipeline.cells)]
        fixed, of_row = np.array(each).reshape(-1, 2).T
        rows = np.array(pipeline.micro_batches, dtype=np.float64)
        boundaries: Array = fixed[:, None] + of_row[:, None] * rows
        return boundaries

    def _shared_boundaries(self, pipelines: Sequence[Pipeline]) -> Array:
        """[stages - 1, micro-batches] until all hidden states have gone to the next stage's ranks.

        Rows of a micro-batch are consecutive in the order of the pipelines' leaders, at each stage;
        a stage sends to, and receives from, those whose rows overlap its own, one after the other.
        """
        ordered = sorted(pipelines, key=lambda one: one.cells[0].attention[0].rank)
        stages = range(len(ordered[0].cells))
        rows = np.array([[one.batches_at(stage) for one in ordered] for stage in stages])
        ends = rows.cumsum(axis=1)  # [stages, pipelines, micro-batches]
        begins = ends - rows
        found = np.zeros((len(stages) - 1, rows.shape[2]))
        for stage in stages[:-1]:
            first = np.maximum(begins[stage][:, None], begins[stage + 1][None])
            last = np.minimum(ends[stage][:, None], ends[stage + 1][None])
            count = np.maximum(last - first, 0)  # [senders, receivers, micro-batches]
            sides = [[one.cells[at] for one in ordered] for at in (stage, stage + 1)]
            each = np.array([[self._message(a, b) for b in sides[1]] for a in sides[0]])
            taken_s = np.where(count > 0, each[:, :, :1] + each[:, :, 1:] * count, 0.0)
            busiest = np.maximum(taken_s.sum(axis=1).max(axis=0), taken_s.sum(axis=0).max(axis=0))
            found[stage] = busiest
        return found

    def _message(self, sender: StageShard, receiver: StageShard) -> tuple[float, float]:
        """(latency, seconds per row) of the boundary between two stages."""
        key = (sender, receiver)
        if key not in self._messages:
            problem = self.problem
            source, target = ([problem.device_of[r] for r in cell.ranks] for cell in key)
            none, one = (
                message_s(rows, source, target, problem.model, problem.links) for rows in (0.0, 1.0)
            )
            self._messages[key] = (none, one - none)
        return self._messages[key]
