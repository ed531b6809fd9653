"""How long each micro-batch of a partition takes on each stage, and the ends of a step. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.controller.partition_cost import (
    Array,
    GroupCost,
    LayerSums,
    cell_cost,
    forward_row_s,
    layer_sums,
    message_s,
)
from pacekeeper.controller.partition_plan import Partition, Pipeline
from pacekeeper.controller.partition_problem import Problem
from pacekeeper.controller.partition_sync import cell_sync_s


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


def partition_times(partition: Partition, problem: Problem) -> tuple[PipelineTimes, ...]:
    """Per pipeline. What shares experts waits, micro-batch by micro-batch, for its slowest part."""
    sums = layer_sums(problem.model, problem.links)
    num_nodes = len({problem.device_of[rank].node for rank in partition.ranks})
    costs = [
        [
            cell_cost(cell, problem.model, problem.links, problem.device_of)
            for cell in pipeline.cells
        ]
        for pipeline in partition.pipelines
    ]
    parts: dict[object, list[int]] = {}
    for at, pipeline in enumerate(partition.pipelines):
        alone = ("alone", at) if pipeline.expert_group is None else pipeline.expert_group
        parts.setdefault(alone, []).append(at)
    result: list[PipelineTimes | None] = [None] * len(partition.pipelines)
    for members in parts.values():
        pipelines = [partition.pipelines[at] for at in members]
        forward_s, backward_s, weight_s = _compute(
            pipelines, [costs[at] for at in members], sums, problem.unevenness
        )
        for at, pipeline in zip(members, pipelines, strict=True):
            result[at] = PipelineTimes(
                forward_s=forward_s,
                backward_s=backward_s,
                weight_s=weight_s,
                message_s=_messages(pipeline, problem),
                sync_s=np.array(
                    [
                        cell_sync_s(
                            cell, len(partition.pipelines), problem, is_inside=num_nodes == 1
                        )
                        for cell in pipeline.cells
                    ]
                ),
                cuts=pipeline.cuts,
            )
    return tuple(times for times in result if times is not None)


def _compute(
    pipelines: Sequence[Pipeline],
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    unevenness: float,
) -> tuple[Array, Array, Array]:
    """Forward, input gradients and weight gradients [stages, micro-batches] of one lock-step."""
    rows = np.array([pipeline.micro_batches for pipeline in pipelines], dtype=np.float64)
    ratio = sums.model.backward_ratio
    forward, backward, weight = [], [], []
    for stage, cell in enumerate(pipelines[0].cells):
        first, end = cell.first_layer, cell.end_layer
        compute = np.zeros(len(pipelines))
        message = np.zeros(len(pipelines))
        for at, of_pipeline in enumerate(costs):
            both = forward_row_s(sums, of_pipeline[stage])
            compute[at], message[at] = (float(part[end] - part[first]) for part in both)
        expert = unevenness * float(sums.expert_s[end] - sums.expert_s[first])
        expert /= sum(of_pipeline[stage].speed for of_pipeline in costs)
        launch = (end - first) * sums.model.launch_s
        sum_s = (end - first) * max(of_pipeline[stage].sum_s for of_pipeline in costs)
        own = (rows * compute[:, None]).max(axis=0) + rows.sum(axis=0) * expert + launch
        told = (rows * message[:, None]).max(axis=0) + sum_s
        forward.append(own + told)
        backward.append(0.5 * ratio * own + told)
        weight.append(0.5 * ratio * own)
    return np.array(forward), np.array(backward), np.array(weight)


def _messages(pipeline: Pipeline, problem: Problem) -> Array:
    """[stages - 1, micro-batches]"""
    sizes = sorted(set(pipeline.micro_batches))
    result = np.zeros((len(pipeline.cells) - 1, len(pipeline.micro_batches)))
    rows = np.array(pipeline.micro_batches)
    for stage in range(len(pipeline.cells) - 1):
        sender, receiver = (
            [problem.device_of[rank] for rank in pipeline.cells[at].ranks]
            for at in (stage, stage + 1)
        )
        for size in sizes:
            result[stage, rows == size] = message_s(
                size, sender, receiver, problem.model, problem.links
            )
    return result
