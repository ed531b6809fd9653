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
    ChunkKind,
    ChunkOp,
    Schedule,
    input_of,
    pipeline_program,
)

Array = npt.NDArray[np.float64]
Output = tuple[int, ChunkOp]  # the stage and the chunk that made it


def partition_step_s(
    partition: Partition, problem: PartitionProblem, *, jitter: float = 0.0, seed: int = 0
) -> float:
    """Seconds of one step at the devices' speeds in `problem`.

    jitter: standard deviation of the log of each chunk's time, drawn by `seed`; pipelines that
    share experts draw the same, since they wait for each other in every layer.
    """
    draw = np.random.default_rng(seed)
    stretched: dict[object, Array] = {}
    known: dict[tuple[object, ...], Array] = {}
    times = StageTimeModel(problem).times(partition)
    ends = []
    for at, (pipeline, each) in enumerate(zip(partition.pipelines, times, strict=True)):
        key = each.key()
        if jitter:
            together = ("alone", at) if pipeline.expert_group is None else pipeline.expert_group
            if together not in stretched:
                shape = (len(ChunkKind), *each.forward_s.shape)
                stretched[together] = np.exp(draw.normal(0.0, jitter, shape))
            ends.append(pipeline_ends(each, problem.schedule, stretched[together]))
            continue
        if key not in known:
            known[key] = pipeline_ends(each, problem.schedule)
        ends.append(known[key])
    return _with_exchange(times, ends)


def pipeline_ends(times: PipelineTimes, schedule: Schedule, stretch: Array | None = None) -> Array:
    """[stages] when each has run its last chunk. stretch: of times, by kind, stage, micro-batch."""
    num_stages, num_microbatches = times.forward_s.shape
    script = _script(schedule, num_stages, num_microbatches)
    is_split = schedule is Schedule.ZERO_BUBBLE
    chunk_s = np.stack(
        [
            times.forward_s,
            times.backward_s + (0.0 if is_split else times.weight_s),
            times.weight_s,
        ]
    )
    if stretch is not None:
        chunk_s = chunk_s * stretch
    return _Play(script, chunk_s.tolist(), times.message_s.tolist()).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """orders[stage]: its chunks; needs[stage][i]: the output that chunk i waits for, None: nothing;
    consumers: of each output that leaves its stage, who waits for it.
    """

    orders: tuple[tuple[ChunkOp, ...], ...]
    needs: tuple[tuple[Output | None, ...], ...]
    consumers: dict[Output, int]


@lru_cache(maxsize=256)
def _script(schedule: Schedule, num_stages: int, num_microbatches: int) -> _Script:
    program = pipeline_program(schedule, num_stages=num_stages, num_microbatches=num_microbatches)
    orders = tuple(
        tuple(item for item in items if isinstance(item, ChunkOp)) for items in program.stages
    )
    needs = tuple(
        tuple(input_of(op, stage, num_stages=num_stages, num_model_chunks=1) for op in order)
        for stage, order in enumerate(orders)
    )
    consumers = {
        output: stage
        for stage, outputs in enumerate(needs)
        for output in outputs
        if output is not None and output[0] != stage
    }
    return _Script(orders=orders, needs=needs, consumers=consumers)


@dataclass(slots=True)
class _Play:
    """One pipeline in time. chunk_s[kind][stage][micro-batch], message_s[boundary][micro-batch]."""

    script: _Script
    chunk_s: Sequence[Sequence[Sequence[float]]]
    message_s: Sequence[Sequence[float]]
    events: list[tuple[float, int, Output]] = field(default_factory=list)
    there: set[tuple[int, Output]] = field(default_factory=set)  # outputs, where they are
    link_free_s: dict[tuple[int, int], float] = field(default_factory=dict)
    at: list[int] = field(default_factory=list)  # of each stage, the chunk that comes next
    is_busy: list[bool] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    def run(self) -> Array:
        num_stages = len(self.script.orders)
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
        assert all(
            at == len(order) for at, order in zip(self.at, self.script.orders, strict=True)
        ), "a step runs to its end"
        return np.array(self.ends_s)

    def _begin(self, stage: int, now_s: float) -> None:
        """The stage's next chunk, if it is free and has its input."""
        at, order = self.at[stage], self.script.orders[stage]
        if self.is_busy[stage] or at == len(order):
            return
        needed = self.script.needs[stage][at]
        if needed is not None and needed[0] != stage and (stage, needed) not in self.there:
            return
        op = order[at]
        self.is_busy[stage] = True
        self.at[stage] += 1
        taken_s = self.chunk_s[op.kind][stage][op.micro_batch]
        heappush(self.events, (now_s + taken_s, stage, (stage, op)))

    def _end(self, stage: int, output: Output, now_s: float) -> None:
        self.is_busy[stage] = False
        self.ends_s[stage] = now_s
        consumer = self.script.consumers.get(output)
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
