"""A step program as a graph whose longest path is the step's time (ResiHP, eq. 2).

Built once and evaluated often: by `controller/planning/partition_cost/step_time.py` for plans, by
`iteration.py` for the steps of a running job. Data edges carry messages, resource edges keep each
stage's order. Sends are asynchronous: an output is sent as soon as it exists, and the sender
continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pacekeeper.core.layout.pipeline_schedule import (
    ChunkKind,
    ChunkOp,
    Program,
    Schedule,
    input_stage,
    pipeline_program,
)
from pacekeeper.predictor.cost.features import Array, Positions

NO_COST = 0
Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathGraph:
    """The chunks of a program in topological order; node num_stages + i is chunk i.

    Nodes 0..num_stages-1 are the starts of the stages. Chunk i starts when node `first[i]` has
    ended and node `second[i]` has ended + lag. Costs and lags are positions in one array: 0 is
    zero, followed by the chunk seconds and the message seconds, both flattened from `shape` (kinds,
    stages, micro-batches). `last`: each stage's last node.
    """

    shape: Shape
    first: Sequence[int]
    second: Sequence[int]
    cost_at: Positions
    lag_at: Positions
    last: Sequence[int]


def path_graph(program: Program) -> PathGraph:
    """Build the graph of one pipeline's program.

    Raises:
        ValueError: the program deadlocks.
    """
    num_stages = program.num_stages
    shape = (len(ChunkKind), num_stages, program.num_microbatches)
    size = int(np.prod(shape))
    orders = [[item for item in stage if isinstance(item, ChunkOp)] for stage in program.stages]
    last = list(range(num_stages))
    first, second, cost_at, lag_at = [], [], [], []
    node_of: list[dict[ChunkOp, int]] = [{} for _ in orders]
    waiting: dict[tuple[int, ChunkOp], int] = {}  # by (source stage, chunk): the stage that waits
    runnable = list(range(num_stages))
    while runnable:
        stage = runnable.pop()
        for op in orders[stage][len(node_of[stage]) :]:
            before, lag = last[stage], NO_COST
            source = input_stage(op.kind, stage, num_stages=num_stages)
            if source is not None:
                if op not in node_of[source]:
                    waiting[source, op] = stage
                    break
                before, lag = node_of[source][op], 1 + size + _place(op, source, shape)
            first.append(last[stage])
            second.append(before)
            cost_at.append(1 + _place(op, stage, shape))
            lag_at.append(lag)
            last[stage] = node_of[stage][op] = num_stages + len(first) - 1
            if (stage, op) in waiting:
                runnable.append(waiting.pop((stage, op)))
    if waiting:
        raise ValueError("the program deadlocks")
    return PathGraph(
        shape=shape,
        first=first,
        second=second,
        cost_at=np.array(cost_at, dtype=np.intp),
        lag_at=np.array(lag_at, dtype=np.intp),
        last=last,
    )


@lru_cache(maxsize=256)
def schedule_graph(schedule: Schedule, num_stages: int, num_microbatches: int) -> PathGraph:
    """Return the graph of a schedule's program. Raises ValueError as `pipeline_program` does."""
    return path_graph(
        pipeline_program(schedule, num_stages=num_stages, num_microbatches=num_microbatches)
    )


def _place(op: ChunkOp, stage: int, shape: Shape) -> int:
    return (op.kind * shape[1] + stage) * shape[2] + op.micro_batch


def stage_ends(graph: PathGraph, *, chunk_s: Array, message_s: Array) -> Array:
    """Seconds at which each stage has run its last chunk [stages].

    Args:
        graph: of the pipeline's program.
        chunk_s: seconds of each chunk, of shape `graph.shape`.
        message_s: the same for the message that carries a chunk's output.

    Raises:
        ValueError: seconds are negative or not finite, or of another shape.
    """
    if np.shape(chunk_s) != graph.shape or np.shape(message_s) != graph.shape:
        raise ValueError(f"expected seconds of shape {graph.shape}")
    slots = np.concatenate([[0.0], chunk_s.ravel(), message_s.ravel()])
    if not (np.isfinite(slots) & (slots >= 0.0)).all():
        raise ValueError("seconds must be finite and not below 0")
    ends = [0.0] * len(graph.last)
    costs, lags = slots[graph.cost_at].tolist(), slots[graph.lag_at].tolist()
    for first, second, lag, cost in zip(graph.first, graph.second, lags, costs, strict=True):
        one, other = ends[first], ends[second] + lag
        ends.append((one if one >= other else other) + cost)
    return np.array([ends[node] for node in graph.last])


def ends_of_many(graph: PathGraph, chunk_s: Array) -> Array:
    """`stage_ends` of k pipelines of one program whose messages take no time [stages, k].

    Args:
        graph: of the program.
        chunk_s: seconds of each chunk, of shape (*graph.shape, k); finite and not below 0.
    """
    num_stages, k = len(graph.last), chunk_s.shape[-1]
    cost_s = chunk_s.reshape(-1, k)[graph.cost_at - 1]
    ends = np.zeros((num_stages + len(graph.first), k))
    for node, (first, second) in enumerate(zip(graph.first, graph.second, strict=True)):
        ends[num_stages + node] = np.maximum(ends[first], ends[second]) + cost_s[node]
    return ends[list(graph.last)]
