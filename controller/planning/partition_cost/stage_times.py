"""How long each micro-batch of a partition takes on each stage, and the ends of a step. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pacekeeper.controller.planning.partition.model import Cell, Partition, Pipeline
from pacekeeper.controller.planning.partition.problem import Problem
from pacekeeper.controller.planning.partition_cost.collectives import (
    MixedStage,
    cell_sync_s,
    mixed_stage,
)
from pacekeeper.controller.planning.partition_cost.compute import (
    Array,
    GroupCost,
    cell_cost,
    forward_row_s,
    layer_sums,
    message_s,
)
from pacekeeper.core.layout.pipeline_schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTimes:
    """One pipeline in a step. forward_s, backward_s, weight_s [stages, micro-batches]: backward_s
    without the weight gradients; message_s [stages - 1, micro-batches]: one boundary, one way;
    sync_s [stages]: exchange of gradients after the last micro-batch. cuts: of its stages.
    """

    forward_s: Array
    backward_s: Array
    weight_s: Array
    message_s: Array
    sync_s: Array
    cuts: tuple[int, ...]

    def key(self) -> tuple[object, ...]:
        """Equal for pipelines that take as long."""
        arrays = (self.forward_s, self.backward_s, self.weight_s, self.message_s, self.sync_s)
        return (self.cuts, *(array.tobytes() for array in arrays))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CellTimes:
    """compute_s, told_s: one row's forward and its messages; sum_s: messages of a micro-batch.

    expert_s: of one row of all that share the experts, at speed 1; launch_s: of a micro-batch.
    cost: of its tensor group.
    """

    cost: GroupCost
    compute_s: float
    told_s: float
    sum_s: float
    expert_s: float
    launch_s: float
    speed: float


class Clock:
    """The times of partitions of one problem; what cells have in common is found once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sums = layer_sums(problem.model, problem.links)
        self._cells: dict[Cell, _CellTimes] = {}
        self._syncs: dict[tuple[Cell, int, bool], float] = {}
        self._messages: dict[tuple[Cell, Cell], tuple[float, float]] = {}

    def times(self, partition: Partition) -> tuple[PipelineTimes, ...]:
        """Per pipeline. What shares experts waits, micro-batch by micro-batch, for its slowest."""
        nodes = {self.problem.device_of[rank].node for rank in partition.ranks}
        parts: dict[object, list[int]] = {}
        for at, pipeline in enumerate(partition.pipelines):
            alone = ("alone", at) if pipeline.expert_group is None else pipeline.expert_group
            parts.setdefault(alone, []).append(at)
        result: dict[int, PipelineTimes] = {}
        for members in parts.values():
            pipelines = [partition.pipelines[at] for at in members]
            forward_s, backward_s, weight_s = self._compute(pipelines)
            for at, pipeline in zip(members, pipelines, strict=True):
                result[at] = PipelineTimes(
                    forward_s=forward_s,
                    backward_s=backward_s,
                    weight_s=weight_s,
                    message_s=self._boundaries(pipeline),
                    sync_s=np.array(
                        [
                            self._sync_s(cell, len(partition.pipelines), len(nodes) == 1)
                            for cell in pipeline.cells
                        ]
                    ),
                    cuts=pipeline.cuts,
                )
        return tuple(result[at] for at in range(len(partition.pipelines)))

    def _compute(self, pipelines: Sequence[Pipeline]) -> tuple[Array, Array, Array]:
        """Forward, input and weight gradients [stages, micro-batches] of one lock-step."""
        rows = np.array([pipeline.micro_batches for pipeline in pipelines], dtype=np.float64)
        ratio = self.problem.model.backward_ratio
        cells = [[self._cell(cell) for cell in pipeline.cells] for pipeline in pipelines]
        # [pipelines, stages]
        compute = np.array([[cell.compute_s for cell in of_pipeline] for of_pipeline in cells])
        told = np.array([[cell.told_s for cell in of_pipeline] for of_pipeline in cells])
        sums = np.array([[cell.sum_s for cell in of_pipeline] for of_pipeline in cells])
        speed = np.array([[cell.speed for cell in of_pipeline] for of_pipeline in cells])
        expert = np.array([cell.expert_s for cell in cells[0]])
        expert *= self.problem.unevenness / speed.sum(axis=0)
        launch = np.array([cell.launch_s for cell in cells[0]])
        together_s = expert[:, None] * rows.sum(axis=0) + launch[:, None]
        mixed = self._mixed(pipelines, cells, rows)

        def chunk_s(scale: float, *, has_messages: bool = True) -> Array:
            """Until the slowest pipeline is there: who computes longest need not tell longest."""
            own_s = scale * compute[:, :, None] * rows[:, None, :]
            if has_messages:
                own_s += told[:, :, None] * rows[:, None, :] + sums[:, :, None]
            slowest: Array = own_s.max(axis=0)
            for stage, groups in mixed:
                slowest[stage] = groups.chunk_s(scale) if has_messages else groups.weight_s(scale)
            slowest += scale * together_s
            return slowest

        weight_s = chunk_s(0.5 * ratio, has_messages=False)
        if self.problem.schedule is Schedule.ZERO_BUBBLE:
            return chunk_s(1.0), chunk_s(0.5 * ratio), weight_s
        return chunk_s(1.0), chunk_s(ratio) - weight_s, weight_s  # one chunk: who waits, waits once

    def _mixed(
        self, pipelines: Sequence[Pipeline], cells: Sequence[Sequence[_CellTimes]], rows: Array
    ) -> list[tuple[int, MixedStage]]:
        """Stages whose experts are shared by groups that differ."""
        if len(pipelines) == 1:
            return []
        found = []
        for stage, cell in enumerate(pipelines[0].cells):
            costs = [of_pipeline[stage].cost for of_pipeline in cells]
            mixed = mixed_stage(costs, cell.first_layer, cell.end_layer, self.sums, rows)
            if mixed is not None:
                found.append((stage, mixed))
        return found

    def _cell(self, cell: Cell) -> _CellTimes:
        found = self._cells.get(cell)
        if found is None:
            problem, sums = self.problem, self.sums
            first, end = cell.first_layer, cell.end_layer
            cost = cell_cost(cell, problem.model, problem.links, problem.device_of)
            compute_s, told_s = forward_row_s(sums, cost)
            found = self._cells[cell] = _CellTimes(
                cost=cost,
                compute_s=float(compute_s[end] - compute_s[first]),
                told_s=float(told_s[end] - told_s[first]),
                sum_s=(end - first) * cost.sum_s,
                expert_s=float(sums.expert_s[end] - sums.expert_s[first]),
                launch_s=(end - first) * problem.model.launch_s,
                speed=cost.speed,
            )
        return found

    def _sync_s(self, cell: Cell, num_pipelines: int, is_inside: bool) -> float:
        key = (cell, num_pipelines, is_inside)
        if key not in self._syncs:
            self._syncs[key] = cell_sync_s(cell, num_pipelines, self.problem, is_inside=is_inside)
        return self._syncs[key]

    def _boundaries(self, pipeline: Pipeline) -> Array:
        """[stages - 1, micro-batches]"""
        each = [self._message(*pair) for pair in pairwise(pipeline.cells)]
        fixed, of_row = np.array(each).reshape(-1, 2).T
        rows = np.array(pipeline.micro_batches, dtype=np.float64)
        boundaries: Array = fixed[:, None] + of_row[:, None] * rows
        return boundaries

    def _message(self, sender: Cell, receiver: Cell) -> tuple[float, float]:
        """Of a boundary without rows, and what one row adds."""
        key = (sender, receiver)
        if key not in self._messages:
            problem = self.problem
            source, target = ([problem.device_of[r] for r in cell.ranks] for cell in key)
            none, one = (
                message_s(rows, source, target, problem.model, problem.links) for rows in (0.0, 1.0)
            )
            self._messages[key] = (none, one - none)
        return self._messages[key]
