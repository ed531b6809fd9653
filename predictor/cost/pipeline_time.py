"""A step's time is the longest path through its micro-batches (ResiHP, eq. 2). Pure.

Data edges carry transfers, resource edges keep each stage's order; collectives before and after the
pipeline join workers of all data-parallel ranks. The path says who the step waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.core.layout.pipeline_schedule import ChunkKind, ChunkOp
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.cost.longest_path import NO_COST, PathGraph

Place = tuple[int, int]  # data-parallel rank, stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Work that begins when all its workers are there and ends for all at once.

    With one worker: local work outside the pipeline, as the optimizer.
    """

    name: str
    workers: tuple[Place, ...]
    duration_s: float

    def __post_init__(self) -> None:
        if not self.workers or not 0.0 <= self.duration_s < np.inf:
            raise ValueError(f"a collective needs workers and a time of 0 or more: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """One piece of the longest path. stage: where it is computed, or the one that sends.

    name: forward, backward, weight_gradient, transfer, or a collective's, which has no op.
    """

    name: str
    dp: int
    stage: int
    op: ChunkOp | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrice:
    """What a step takes, and why.

    path: its longest path, without gaps from 0 to step_s. chunk_start_s, chunk_end_s: per
    data-parallel rank [kinds, stages, micro-batches, model chunks], NaN where there is no such
    chunk. bubble_share [dp, stages]: part of the step in which the worker computes no chunk.
    path_share [dp, stages]: part of the step in which the path computes chunks there.
    """

    step_s: float
    path: tuple[PathPart, ...]
    chunk_start_s: tuple[Array, ...]
    chunk_end_s: tuple[Array, ...]
    bubble_share: Array
    path_share: Array


def gradient_sync(num_dp: int, sync_s: Sequence[float]) -> tuple[Collective, ...]:
    """The usual end of a step: all data-parallel ranks of a stage meet; seconds per stage."""
    return tuple(
        Collective(
            name="gradient_sync",
            workers=tuple((dp, stage) for dp in range(num_dp)),
            duration_s=duration_s,
        )
        for stage, duration_s in enumerate(sync_s)
    )


def critical_path(
    graphs: Sequence[PathGraph],
    *,
    chunk_s: Sequence[Array],
    transfer_s: Sequence[Array] | float = 0.0,
    before: Sequence[Collective] = (),
    after: Sequence[Collective] = (),
) -> StepPrice:
    """Price one step of data-parallel ranks, one graph each; they may differ in micro-batches.

    chunk_s: per rank seconds, of a shape that broadcasts to [kinds, stages, micro-batches, model
    chunks]. transfer_s: one number, or the same for the message that carries a chunk's output.
    before, after: collectives around the pipeline; a worker goes through its own in this order.
    Raises ValueError for seconds below 0 or not finite, wrong shapes, and unknown workers.
    """
    if not graphs or len({graph.program.num_stages for graph in graphs}) != 1:
        raise ValueError("expected one or more graphs with equally many stages")
    if len(chunk_s) != len(graphs):
        raise ValueError(f"expected chunk seconds for {len(graphs)} ranks, got {len(chunk_s)}")
    transfers = (
        [np.full((1, 1, 1, 1), transfer_s)] * len(graphs)
        if isinstance(transfer_s, int | float)
        else transfer_s
    )
    num_stages = graphs[0].program.num_stages
    places = [(dp, stage) for dp in range(len(graphs)) for stage in range(num_stages)]
    reached: dict[Place, _Reached] = {place: _Reached(0.0) for place in places}
    _meet(before, reached)
    runs = []
    for dp, (graph, own_s, sent_s) in enumerate(zip(graphs, chunk_s, transfers, strict=True)):
        begins = [reached[dp, stage] for stage in range(num_stages)]
        run = _run(dp, graph, own_s, sent_s, begins)
        runs.append(run)
        for stage in range(num_stages):
            node = graph.last[stage]
            reached[dp, stage] = _Reached(run.ends[node], run=run, node=node)
    _meet(after, reached)
    last = max(reached.values(), key=lambda place: place.at_s)
    path = tuple(reversed(_path_to(last)))
    busy_s = np.array([run.busy_s for run in runs])
    step_s = last.at_s
    on_path_s = np.zeros(busy_s.shape)
    for part in path:
        if part.op is not None and part.name != "transfer":
            on_path_s[part.dp, part.stage] += part.end_s - part.start_s
    whole_s = step_s or 1.0  # nothing took any time: shares of nothing are 0
    return StepPrice(
        step_s=step_s,
        path=path,
        chunk_start_s=tuple(run.spread(run.start_s) for run in runs),
        chunk_end_s=tuple(run.spread(np.array(run.ends)) for run in runs),
        bubble_share=(step_s - busy_s) / whole_s,
        path_share=on_path_s / whole_s,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Reached:
    """How far a worker is, and through what: a node of a run, a collective, or the beginning."""

    at_s: float
    run: "_Run | None" = None
    node: int = 0
    collective: Collective | None = None
    previous: "_Reached | None" = None  # of the worker the collective waited for
    by: Place = (0, 0)


def _meet(collectives: Sequence[Collective], reached: dict[Place, _Reached]) -> None:
    for collective in collectives:
        unknown = set(collective.workers) - reached.keys()
        if unknown:
            raise ValueError(f"{collective.name}: there is no worker {sorted(unknown)}")
        latest = max(collective.workers, key=lambda place: reached[place].at_s)
        previous = reached[latest]
        end = _Reached(
            previous.at_s + collective.duration_s,
            collective=collective,
            previous=previous,
            by=latest,
        )
        for place in collective.workers:
            reached[place] = end


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The priced nodes of one data-parallel rank. slots: the costs behind the positions."""

    dp: int
    graph: PathGraph
    slots: Array
    ends: list[float]
    begins: Sequence[_Reached]

    @property
    def num_chunk_slots(self) -> int:
        return int(np.prod(self.graph.shape))

    @property
    def start_s(self) -> Array:
        started: Array = np.array(self.ends) - self.slots[self.graph.cost_at]
        return started

    @property
    def busy_s(self) -> Array:
        """Seconds of all chunks, per stage."""
        at = self.graph.cost_at
        at = at[(at != NO_COST) & (at <= self.num_chunk_slots)] - 1
        stage = np.unravel_index(at, self.graph.shape)[1]
        num_stages = self.graph.program.num_stages
        return np.bincount(stage, weights=self.slots[1 + at], minlength=num_stages).astype(float)

    def spread(self, of_nodes: Array) -> Array:
        """Values of nodes at their chunks."""
        spread = np.full(self.num_chunk_slots, np.nan)
        at = self.graph.cost_at
        is_chunk = (at != NO_COST) & (at <= self.num_chunk_slots)
        spread[at[is_chunk] - 1] = of_nodes[is_chunk]
        return spread.reshape(self.graph.shape)


def _run(
    dp: int, graph: PathGraph, chunk_s: Array, transfer_s: Array, begins: Sequence[_Reached]
) -> _Run:
    slots = np.concatenate([[0.0], _slots(chunk_s, graph), _slots(transfer_s, graph)])
    if not (np.isfinite(slots) & (slots >= 0.0)).all():
        raise ValueError("seconds must be finite and not below 0")
    num_stages = graph.program.num_stages
    ends = [begin.at_s for begin in begins]
    costs = slots[graph.cost_at[num_stages:]].tolist()
    lags = slots[graph.lag_at[num_stages:]].tolist()
    nodes = zip(graph.first[num_stages:], graph.second[num_stages:], lags, costs, strict=True)
    for first, second, lag, cost in nodes:
        one, other = ends[first], ends[second] + lag
        ends.append((one if one >= other else other) + cost)
    return _Run(dp, graph, slots, ends, begins)


def _slots(given_s: Array, graph: PathGraph) -> Array:
    try:
        spread = np.broadcast_to(np.asarray(given_s, dtype=np.float64), graph.shape)
    except ValueError:
        raise ValueError(
            f"seconds of shape {np.shape(given_s)} do not fit {graph.shape}: "
            "[kinds, stages, micro-batches, model chunks]"
        ) from None
    flat: Array = spread.ravel()
    return flat


def _path_to(place: _Reached) -> list[PathPart]:
    """The longest path, backwards from where it ended."""
    parts: list[PathPart] = []
    while True:
        if place.collective is not None and place.previous is not None:
            dp, stage = place.by
            parts.append(
                PathPart(
                    name=place.collective.name,
                    dp=dp,
                    stage=stage,
                    op=None,
                    start_s=place.previous.at_s,
                    end_s=place.at_s,
                )
            )
            place = place.previous
        elif place.run is not None:
            place = _path_through(place.run, place.node, parts)
        else:
            return parts


def _path_through(run: _Run, node: int, parts: list[PathPart]) -> _Reached:
    """Append the path through one pipeline; where it was entered."""
    graph = run.graph
    num_stages = graph.program.num_stages
    while node >= num_stages:
        end_s = run.ends[node]
        first, second = graph.first[node], graph.second[node]
        lag_at = int(graph.lag_at[node])
        arrived_s = run.ends[second] + float(run.slots[lag_at])
        is_second = arrived_s > run.ends[first]
        start_s = arrived_s if is_second else run.ends[first]
        cost_at = int(graph.cost_at[node])
        if cost_at != NO_COST:
            parts.append(_part(run, cost_at, start_s, end_s))
        if is_second and lag_at != NO_COST:
            parts.append(_part(run, lag_at, run.ends[second], start_s))
        node = second if is_second else first
    return run.begins[node]


def _part(run: _Run, slot: int, start_s: float, end_s: float) -> PathPart:
    place = (slot - 1) % run.num_chunk_slots
    kind, stage, micro_batch, chunk = (int(i) for i in np.unravel_index(place, run.graph.shape))
    is_chunk = slot <= run.num_chunk_slots
    return PathPart(
        name=ChunkKind(kind).name.lower() if is_chunk else "transfer",
        dp=run.dp,
        stage=stage,
        op=ChunkOp(ChunkKind(kind), micro_batch, chunk),
        start_s=start_s,
        end_s=end_s,
    )
