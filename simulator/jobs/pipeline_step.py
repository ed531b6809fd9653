"""Event simulation of one step of a partition: chunks, messages on links, gradient exchange.

Gives the step time of `Planned` work in the simulated world. It executes the step program of
`core/layout/pipeline_schedule.py`; planners price the same program by its longest path. Both take
the seconds of a chunk from `controller/planning/partition_cost/stage_times.py`, so the comparison
tests order, waiting and messages, not the cost of a layer. A boundary carries one message after
the other in each direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.stage_times import PipelineTimes, StageTimeModel
from pacekeeper.core.layout.pipeline_schedule import (
    ChunkOp,
    Schedule,
    input_stage,
    output_stage,
    pipeline_program,
)

Array = npt.NDArray[np.float64]
Orders = tuple[tuple[ChunkOp, ...], ...]
Output = tuple[int, ChunkOp]  # the stage and the chunk that made it


def partition_step_s(partition: Partition, problem: PartitionProblem) -> float:
    """Seconds of one step at the devices' speeds in `problem`."""
    known: dict[tuple[object, ...], Array] = {}
    times = StageTimeModel(problem).times(partition)
    ends = []
    for each in times:
        key = each.key()
        if key not in known:
            known[key] = pipeline_ends(each)
        ends.append(known[key])
    return _with_exchange(times, ends)


def pipeline_ends(times: PipelineTimes) -> Array:
    """[stages] when each has run its last chunk."""
    is_split = times.schedule is Schedule.ZERO_BUBBLE
    chunk_s = np.stack(
        [
            times.forward_s,
            times.backward_s + (0.0 if is_split else times.weight_s),
            times.weight_s,
        ]
    )
    orders = _orders(times.schedule, *times.forward_s.shape)
    return _Play(orders, chunk_s.tolist(), times.message_s.tolist()).run()


@lru_cache(maxsize=256)
def _orders(schedule: Schedule, num_stages: int, num_microbatches: int) -> Orders:
    program = pipeline_program(schedule, num_stages=num_stages, num_microbatches=num_microbatches)
    return tuple(
        tuple(item for item in items if isinstance(item, ChunkOp)) for items in program.stages
    )


@dataclass(slots=True)
class _Play:
    """One pipeline in time. chunk_s[kind][stage][micro-batch], message_s[boundary][micro-batch]."""

    orders: Orders  # the chunks of each stage
    chunk_s: Sequence[Sequence[Sequence[float]]]
    message_s: Sequence[Sequence[float]]
    events: list[tuple[float, int, Output]] = field(default_factory=list)
    there: set[tuple[int, Output]] = field(default_factory=set)  # outputs, where they are
    link_free_s: dict[tuple[int, int], float] = field(default_factory=dict)
    at: list[int] = field(default_factory=list)  # of each stage, the chunk that comes next
    is_busy: list[bool] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    def run(self) -> Array:
        num_stages = len(self.orders)
        self.at, self.is_busy = [0] * num_stages, [False] * num_stages
        self.ends_s = [0.0] * num_stages
        for stage in range(num_stages):
            self._begin(stage, 0.0)
        while self.events:
            now_s, stage, output = heappop(self.events)
            if output[0] == stage:
                self._end(stage, output, now_s)
            else:
                self.there.add((stage, output))
            self._begin(stage, now_s)
        assert all(at == len(order) for at, order in zip(self.at, self.orders, strict=True)), (
            "a step runs to its end"
        )
        return np.array(self.ends_s)

    def _begin(self, stage: int, now_s: float) -> None:
        """The stage's next chunk, if it is free and has its input."""
        at, order = self.at[stage], self.orders[stage]
        if self.is_busy[stage] or at == len(order):
            return
        op = order[at]
        source = input_stage(op.kind, stage, num_stages=len(self.orders))
        if source is not None and (stage, (source, op)) not in self.there:
            return
        self.is_busy[stage] = True
        self.at[stage] += 1
        taken_s = self.chunk_s[op.kind][stage][op.micro_batch]
        heappush(self.events, (now_s + taken_s, stage, (stage, op)))

    def _end(self, stage: int, output: Output, now_s: float) -> None:
        self.is_busy[stage] = False
        self.ends_s[stage] = now_s
        consumer = output_stage(output[1].kind, stage, num_stages=len(self.orders))
        if consumer is None:
            return
        link = (stage, consumer)
        begins_s = max(now_s, self.link_free_s.get(link, 0.0))
        taken_s = self.message_s[min(link)][output[1].micro_batch]
        self.link_free_s[link] = begins_s + taken_s
        heappush(self.events, (begins_s + taken_s, consumer, output))


def _with_exchange(times: Sequence[PipelineTimes], ends: Sequence[Array]) -> float:
    """A cell's exchange begins when all that hold one of its layers have ended; the slowest of
    these paces it.
    """
    cells = [
        (first, end, float(of[stage]), float(each.sync_s[stage]))
        for each, of in zip(times, ends, strict=True)
        for stage, (first, end) in enumerate(zip((0, *each.cuts[:-1]), each.cuts, strict=True))
    ]
    ended_s = 0.0
    by_layers = sorted(set(cells))
    for first, end, _, _ in by_layers:
        partners = [cell for cell in by_layers if cell[0] < end and first < cell[1]]
        ended_s = max(
            ended_s, max(cell[2] for cell in partners) + max(cell[3] for cell in partners)
        )
    return ended_s
