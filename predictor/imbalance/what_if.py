"""Step times as they would be if parts of the job had run at their usual speed.

The dependency graph of each step is replayed with ideal times: for each type of operation the mean
of compute, the median of the own time (without waiting) of communication. Definitions as in Lin et
al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025: S is
their eq. 1, the parts eqs. 2 and 4, M_W eq. 5, M_S section 5.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.imbalance.step_graph import (
    CLOSING,
    COMPUTE,
    TRANSFERS,
    CutOff,
    StepGraph,
    step_graph,
)
from pacekeeper.predictor.recorded.anomalies import WhatIf
from pacekeeper.predictor.recorded.trace import OpTable, OpType, Trace, Worker

WORST_SHARE = 0.03  # of the ranks, for M_W
COUNTED_AS_COMPUTE = (*COMPUTE, OpType.OPTIMIZER, OpType.GARBAGE_COLLECTION)
MOST_CELLS = 1 << 24  # operations x questions replayed at once, to bound memory

# Which operations keep their real times: those whose value in a column is one of these, or is not.
Kept = tuple[Positions, Sequence[int], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """The steps of a trace that can be replayed; `notes` list what was left out and why.

    `lanes`: the workers, one for each place of the pipeline.
    """

    ops: OpTable
    lanes: tuple[Worker, ...]
    graphs: tuple[StepGraph, ...]
    ideal_s: Array  # [op types]
    notes: tuple[str, ...]

    def mean_s(self, questions: Sequence[Kept]) -> list[float]:
        """Mean step time for each question: operations that it does not keep take ideal times."""
        total_s = np.zeros(len(questions))
        at_once = max(1, MOST_CELLS // len(self.ops.op))
        for first in range(0, len(questions), at_once):
            some = slice(first, first + at_once)
            kept = np.stack([np.isin(c, v, invert=not is_in) for c, v, is_in in questions[some]], 1)
            for graph in self.graphs:
                ideal_s = self.ideal_s[self.ops.op[graph.rows], None]
                own_s = np.where(kept[graph.rows], graph.own_s[:, None], ideal_s)
                total_s[some] += graph.duration_s(own_s)
        mean_s: list[float] = (total_s / len(self.graphs)).tolist()
        return mean_s


def replayed(trace: Trace) -> tuple[Replay | None, tuple[str, ...]]:
    """Return the replay of a trace, with notes on what cannot be replayed and why."""
    if trace.ops is None:
        return None, ()
    first_at: dict[tuple[int, int], Worker] = {}
    for worker in sorted(trace.workers, key=lambda worker: worker.rank):
        first_at.setdefault((worker.stage, worker.dp), worker)
    lanes = tuple(first_at.values())
    graphs, left_out = _graphs(trace.ops, lanes)
    why = f"({'; '.join(left_out[:3])})"
    if not graphs:
        return None, (f"no step can be replayed: no what-if {why}",)
    notes = left_out and [f"{len(left_out)} steps not replayed {why}"]
    if len(lanes) < len(trace.workers):
        notes.append(f"{len(trace.workers) - len(lanes)} ranks share a place and are not replayed")
    replay = Replay(
        ops=trace.ops,
        lanes=lanes,
        graphs=tuple(graphs),
        ideal_s=_ideal_times(trace.ops, graphs),
        notes=tuple(notes),
    )
    return replay, replay.notes


def _graphs(ops: OpTable, lanes: tuple[Worker, ...]) -> tuple[list[StepGraph], list[str]]:
    """Return the graphs of the complete steps, and why the others are incomplete."""
    num_stages = 1 + max(lane.stage for lane in lanes)
    order = np.argsort(ops.step, kind="stable")
    bounds = np.flatnonzero(np.diff(ops.step[order], prepend=-1, append=-1))
    usual = _usual_counts(ops)
    graphs, left_out = [], []
    for first, end in pairwise(bounds):
        rows = order[first:end]
        try:
            graph = step_graph(ops, rows, lanes, num_stages)
            _check_whole(ops, graph, lanes, usual)
        except CutOff as reason:
            left_out.append(f"step {int(ops.step[rows[0]])}: {reason}")
        else:
            graphs.append(graph)
    return graphs, left_out


def what_if_of(replay: Replay) -> WhatIf:
    """Return S and its parts. For a part's slowdown only its operations keep their real times.

    A rank's score is the smaller of its data-parallel rank's and its stage's. M_W and M_S are the
    shares of the loss that disappear when the worst 3 % of ranks, or the last stage, get ideal
    times.
    """
    rank, op = replay.ops.rank, replay.ops.op
    of_dp = {
        dp: [lane.rank for lane in replay.lanes if lane.dp == dp]
        for dp in sorted({lane.dp for lane in replay.lanes})
    }
    of_stage = {
        stage: [lane.rank for lane in replay.lanes if lane.stage == stage]
        for stage in sorted({lane.stage for lane in replay.lanes})
    }
    of_kind: dict[str, list[int]] = {}
    for kind in np.unique(op).tolist():
        of_kind.setdefault(_part_name(kind), []).append(kind)
    last = of_stage[max(of_stage)]
    questions: list[Kept] = [(rank, [], False), (rank, [], True), (rank, last, False)]
    questions += [(rank, ranks, True) for ranks in (*of_dp.values(), *of_stage.values())]
    questions += [(op, kinds, True) for _, kinds in sorted(of_kind.items())]
    real_s, ideal_s, without_last_s, *parts_s = replay.mean_s(questions)
    parts = iter(part_s / ideal_s for part_s in parts_s)
    by_dp = {dp: next(parts) for dp in of_dp}
    by_stage = {stage: next(parts) for stage in of_stage}
    by_rank = {lane.rank: min(by_dp[lane.dp], by_stage[lane.stage]) for lane in replay.lanes}
    worst = sorted(by_rank, key=lambda rank: (-by_rank[rank], rank))
    worst = worst[: -int(-len(worst) * WORST_SHARE // 1)]
    (without_worst_s,) = replay.mean_s([(rank, worst, False)])

    def share_of_loss(without_s: float) -> float:
        return (real_s - without_s) / (real_s - ideal_s) if real_s != ideal_s else 0.0

    return WhatIf(
        slowdown=real_s / ideal_s,
        by_dp=by_dp,
        by_stage=by_stage,
        by_op={kind: next(parts) for kind in sorted(of_kind)},
        by_rank=by_rank,
        worst_workers_share=share_of_loss(without_worst_s),
        last_stage_share=share_of_loss(without_last_s),
        notes=replay.notes,
    )


def _usual_counts(ops: OpTable) -> dict[tuple[int, int], int]:
    """How often a rank runs each closing operation per step: the most frequent count."""
    closing = np.isin(ops.op, CLOSING)
    keys = np.stack([ops.rank[closing], ops.op[closing], ops.step[closing]], axis=1)
    triples, counts = np.unique(keys, axis=0, return_counts=True)
    seen: dict[tuple[int, int], list[int]] = {}
    for (rank, op, _), count in zip(triples.tolist(), counts.tolist(), strict=True):
        seen.setdefault((rank, op), []).append(count)
    return {key: int(np.bincount(values).argmax()) for key, values in seen.items()}


def _check_whole(
    ops: OpTable,
    graph: StepGraph,
    lanes: tuple[Worker, ...],
    usual: dict[tuple[int, int], int],
) -> None:
    """Raise CutOff unless the stages of a data-parallel rank ran the same micro-batches, and each
    rank ran its usual closing operations.
    """
    rank, op = ops.rank[graph.rows], ops.op[graph.rows]
    place = {lane.rank: lane for lane in lanes}
    for (worker, kind), count in usual.items():
        if worker in place and int(((rank == worker) & (op == kind)).sum()) != count:
            raise CutOff("the step's end is missing")
    ran: dict[int, set[frozenset[int]]] = {}
    for lane in lanes:
        for kind in COMPUTE:
            mine = graph.rows[(rank == lane.rank) & (op == kind)]
            for chunk in np.unique(ops.model_chunk[mine]):
                batches = ops.micro_batch[mine[ops.model_chunk[mine] == chunk]].tolist()
                ran.setdefault(lane.dp, set()).add(frozenset(batches))
    if any(len(sets) != 1 for sets in ran.values()):
        raise CutOff("micro-batches are missing")


def _ideal_times(ops: OpTable, graphs: list[StepGraph]) -> Array:
    """Ideal time of each type of operation, over all replayed steps and ranks; NaN without any."""
    op = np.concatenate([ops.op[graph.rows] for graph in graphs])
    own_s = np.concatenate([graph.own_s for graph in graphs])
    ideal_s = np.full(max(OpType) + 1, np.nan)
    for kind in np.unique(op):
        middle = np.mean if kind in COUNTED_AS_COMPUTE else np.median
        ideal_s[kind] = middle(own_s[op == kind])
    return ideal_s


def _part_name(op: int) -> str:
    """Name of the operation's part; the two ends of a transfer are one part."""
    if op in TRANSFERS:
        return "forward_transfer" if op < OpType.BACKWARD_SEND else "backward_transfer"
    return OpType(op).name.lower()
