"""A step of a partition, event by event: every rank, every layer, every message by itself.

Nothing here is the planner's but what one message and one exchange of gradients take. A rank
computes its shards, meets its tensor group after attention and after the MLP, and meets all that
share its experts before and after these, in every layer; outputs leave as soon as they are there,
one after the other on a link. Each of these times may jitter by itself.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from pacekeeper.controller.planning.model.partition import Partition, StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.collectives import gradient_sync_s
from pacekeeper.controller.planning.partition_cost.compute import message_s, shares_of
from pacekeeper.core.layout.pipeline_schedule import (
    ChunkKind,
    ChunkOp,
    Schedule,
    input_stage,
    pipeline_program,
)

Place = tuple[int, int]  # pipeline, stage
Output = tuple[int, int, ChunkOp]  # pipeline, stage, and the chunk that made it


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait for all that share experts, in one layer of one chunk."""

    key: tuple[object, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Receive:
    output: Output


@dataclass(frozen=True, slots=True)
class Send:
    output: Output
    taken_s: float


Action = float | Meet | Receive | Send  # a number: compute so long
Actor = Generator[Action, None, None]


def event_step_s(
    partition: Partition, problem: PartitionProblem, *, jitter: float = 0.0, seed: int = 0
) -> float:
    """Seconds of one step. jitter: spread of the log of each rank's time for each layer."""
    step = _Step(partition, problem, jitter, np.random.default_rng(seed))
    places = [
        (at, stage) for at, p in enumerate(partition.pipelines) for stage in range(len(p.cells))
    ]
    ends = _played({place: step.actor(*place) for place in places})
    return step.exchanged_s(ends)


@dataclass(slots=True)
class _Step:
    partition: Partition
    problem: PartitionProblem
    jitter: float
    draw: np.random.Generator

    def actor(self, at: int, stage: int) -> Actor:
        """What one tensor group does in a step."""
        pipeline = self.partition.pipelines[at]
        num_stages = len(pipeline.cells)
        program = pipeline_program(
            self.partition.schedule,
            num_stages=num_stages,
            num_microbatches=len(pipeline.micro_batches),
        )
        for op in program.stages[stage]:
            if not isinstance(op, ChunkOp):
                continue
            source = input_stage(op.kind, stage, num_stages=num_stages)
            if source is not None:
                yield Receive((at, source, op))
            yield from self._chunk(at, stage, op)
            target = stage + (1 if op.kind is ChunkKind.FORWARD else -1)
            if op.kind is not ChunkKind.WEIGHT_GRADIENT and 0 <= target < num_stages:
                rows = pipeline.micro_batches[op.micro_batch]
                first, last = sorted((stage, target))
                yield Send((at, stage, op), self._message_s(at, first, last, rows))

    def _chunk(self, at: int, stage: int, op: ChunkOp) -> Iterator[Action]:
        model, is_split = self.problem.model, self.partition.schedule is Schedule.ZERO_BUBBLE
        cell = self.partition.pipelines[at].cells[stage]
        layers = list(range(cell.first_layer, cell.end_layer))
        match op.kind:
            case ChunkKind.FORWARD:
                scale, has_messages = 1.0, True
            case ChunkKind.BACKWARD:
                scale, has_messages = model.backward_ratio * (0.5 if is_split else 1.0), True
                layers.reverse()
            case ChunkKind.WEIGHT_GRADIENT:
                scale, has_messages = 0.5 * model.backward_ratio, False
        for layer in layers:
            yield from self._layer(at, stage, op, layer, scale, has_messages)

    def _layer(
        self, at: int, stage: int, op: ChunkOp, layer: int, scale: float, has_messages: bool
    ) -> Iterator[Action]:
        """One layer of one micro-batch; its halves in any order take as long."""
        problem, pipeline = self.problem, self.partition.pipelines[at]
        model, links = problem.model, problem.links
        cell, cost = pipeline.cells[stage], model.layers[layer]
        rows = pipeline.micro_batches[op.micro_batch]
        yield from self._halves(cell, layer, scale, rows)
        if has_messages and len(cell.ranks) > 1:
            yield 2.0 * self._sum_s(cell, rows)
        if cost.expert_s <= 0.0:
            return
        devices = [problem.device_of[rank] for rank in cell.ranks]
        bandwidth = sum(links.between_bytes_per_s * device.link_speed for device in devices)
        one_way_s = 0.5 * rows * cost.dispatch_bytes / bandwidth if has_messages else 0.0
        sharers = [
            other
            for other in self.partition.pipelines
            if other is pipeline
            or (pipeline.expert_group is not None and other.expert_group == pipeline.expert_group)
        ]
        together = sum(other.micro_batches[op.micro_batch] for other in sharers)
        speed = sum(
            problem.device_of[rank].speed for other in sharers for rank in other.cells[stage].ranks
        )
        expert_s = scale * together * cost.expert_s * problem.unevenness / speed
        alone = at if pipeline.expert_group is None else None
        key = (alone, pipeline.expert_group, stage, op, layer)
        yield one_way_s
        if has_messages:
            yield Meet((*key, "there"), len(sharers))
        yield expert_s
        if has_messages:
            yield Meet((*key, "back"), len(sharers))
        yield one_way_s

    def _halves(self, cell: StageShard, layer: int, scale: float, rows: int) -> Iterator[float]:
        """Attention, then the MLP, each with half of what all ranks do, until the slowest rank."""
        model, cost = self.problem.model, self.problem.model.layers[layer]
        ends_s = model.embedding_s if layer == 0 else 0.0
        ends_s += model.head_s if layer == len(model.layers) - 1 else 0.0
        for runs, cut_s in ((cell.attention, cost.attention_s), (cell.mlp, cost.mlp_s + ends_s)):
            shares = shares_of(runs)
            taken = [
                (
                    0.5 * model.launch_s
                    + rows * (0.5 * cost.replicated_s + shares.get(rank, 0.0) * cut_s)
                )
                / self.problem.device_of[rank].speed
                for rank in cell.ranks
            ]
            if self.jitter:
                taken = list(taken * np.exp(self.draw.normal(0.0, self.jitter, len(taken))))
            yield scale * float(max(taken))

    def _sum_s(self, cell: StageShard, rows: int) -> float:
        """One sum over a tensor group: a ring's reduce-scatter and all-gather."""
        links, size = self.problem.links, len(cell.ranks)
        devices = [self.problem.device_of[rank] for rank in cell.ranks]
        if len({device.node for device in devices}) == 1:
            latency_s, bandwidth = links.inside_latency_s, links.inside_bytes_per_s
        else:
            slowest = min(device.link_speed for device in devices)
            latency_s = links.between_latency_s
            bandwidth = links.between_bytes_per_s * slowest
        ring = 2.0 * (size - 1) / size
        return ring * rows * self.problem.model.boundary_bytes / bandwidth + 2.0 * latency_s

    def _message_s(self, at: int, first: int, last: int, rows: int) -> float:
        cells = self.partition.pipelines[at].cells
        sender, receiver = (
            [self.problem.device_of[rank] for rank in cells[stage].ranks] for stage in (first, last)
        )
        return message_s(float(rows), sender, receiver, self.problem.model, self.problem.links)

    def exchanged_s(self, ends: dict[Place, float]) -> float:
        """Of each cell when all that hold one of its layers have ended, as long as the slowest."""
        pipelines = self.partition.pipelines
        nodes = {self.problem.device_of[rank].node for rank in self.partition.ranks}
        cells = {place: pipelines[place[0]].cells[place[1]] for place in ends}
        sync_s = {
            place: gradient_sync_s(cell, len(pipelines), self.problem, is_inside=len(nodes) == 1)
            for place, cell in cells.items()
        }
        last_s = 0.0
        for cell in cells.values():
            partners = [
                place
                for place, other in cells.items()
                if other.first_layer < cell.end_layer and cell.first_layer < other.end_layer
            ]
            begins_s = max(ends[place] for place in partners)
            last_s = max(last_s, begins_s + max(sync_s[place] for place in partners))
        return last_s


@dataclass(slots=True)
class _Stage:
    """Who waits where, and what is there."""

    events: list[tuple[float, int, Place]] = field(default_factory=list)
    met: dict[tuple[object, ...], list[Place]] = field(default_factory=dict)
    there_s: dict[Output, float] = field(default_factory=dict)
    waiting: dict[Output, Place] = field(default_factory=dict)
    free_s: dict[tuple[int, int, ChunkKind], float] = field(default_factory=dict)
    number: int = 0

    def wake(self, at_s: float, place: Place) -> None:
        self.number += 1
        heappush(self.events, (at_s, self.number, place))


def _played(actors: dict[Place, Actor]) -> dict[Place, float]:
    """When each has come to its end."""
    stage, ends = _Stage(), {}
    for place in actors:
        stage.wake(0.0, place)
    while stage.events:
        now_s, _, place = heappop(stage.events)
        for action in actors[place]:
            match action:
                case Meet(key=key, number=number):
                    stage.met.setdefault(key, []).append(place)
                    if len(stage.met[key]) == number:
                        for other in stage.met.pop(key):
                            stage.wake(now_s, other)
                    break
                case Receive(output=output):
                    if (arrived_s := stage.there_s.get(output)) is None:
                        stage.waiting[output] = place
                    else:
                        stage.wake(max(now_s, arrived_s), place)
                    break
                case Send(output=output, taken_s=taken_s):
                    link = (*place, output[2].kind)
                    arrives_s = max(now_s, stage.free_s.get(link, 0.0)) + taken_s
                    stage.free_s[link] = stage.there_s[output] = arrives_s
                    if output in stage.waiting:
                        stage.wake(arrives_s, stage.waiting.pop(output))
                case taken_s:
                    if taken_s > 0.0:
                        stage.wake(now_s + taken_s, place)
                        break
        else:
            ends[place] = now_s
    assert len(ends) == len(actors), "a step runs to its end"
    return ends
