"""How well does the longest path price real steps from their own measured parts?

`python -m benchmarks.critical_path_error --data DIR`. Each step of the `bytedance_straggler` traces
is priced from its chunk durations and transfers (end minus the latest start in the group: waiting
left out) and compared with its measured time. Host gaps between operations are not in the price.
Prints a table, last one line of JSON. Authors' own simulation: 1.3 % median, 5.5 % p90.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pacekeeper.core.layout.pipeline_schedule import ChunkKind, Schedule, pipeline_program
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.cost.longest_path import PathGraph, path_graph
from pacekeeper.predictor.cost.pipeline_time import Collective, critical_path
from pacekeeper.predictor.offline.trace import OpTable, OpType, Trace
from pacekeeper.simulator.readers.bytedance import read_bytedance

Place = tuple[int, int]
CHUNKS = {OpType.FORWARD: ChunkKind.FORWARD, OpType.BACKWARD: ChunkKind.BACKWARD}
MESSAGES = {
    OpType.FORWARD_SEND: (ChunkKind.FORWARD, OpType.FORWARD_RECV, 1),
    OpType.BACKWARD_SEND: (ChunkKind.BACKWARD, OpType.BACKWARD_RECV, -1),
}
BEFORE = (OpType.PARAMS_ALL_GATHER,)
AFTER = (
    OpType.LAYERNORM_GRADS_ALL_REDUCE,
    OpType.EMBEDDING_GRADS_ALL_REDUCE,
    OpType.GRADS_REDUCE_SCATTER,
    OpType.CLIP_GRADS,
    OpType.OPTIMIZER,
)


def group_of(op: OpType, dp: int, stage: int) -> tuple[int, int]:
    """What meets in a collective; in the others each worker is alone."""
    match op:
        case OpType.PARAMS_ALL_GATHER | OpType.GRADS_REDUCE_SCATTER:
            return -1, stage
        case OpType.EMBEDDING_GRADS_ALL_REDUCE:
            return dp, -1
        case OpType.CLIP_GRADS:
            return -1, -1
        case _:
            return dp, stage


class Step:
    """The operations of one step: (type, place, position) -> (start, end)."""

    def __init__(self, trace: Trace, ops: OpTable, step: int) -> None:
        places = {worker.rank: (worker.dp, worker.stage) for worker in trace.workers}
        self.times: dict[OpType, dict[Place, dict[int, tuple[float, float]]]] = defaultdict(dict)
        for i in np.flatnonzero(ops.step == step).tolist():
            start_s = float(ops.start_s[i])
            of_place = self.times[OpType(ops.op[i])].setdefault(places[int(ops.rank[i])], {})
            of_place[int(ops.sequence[i])] = (start_s, start_s + float(ops.duration_s[i]))
        spans = [t for by in self.times.values() for of in by.values() for t in of.values()]
        self.measured_s = max(end for _, end in spans) - min(start for start, _ in spans)

    def chunks(self, dp: int, num_stages: int, count: int) -> Array:
        """Seconds of the chunks of one data-parallel rank, as the graph wants them."""
        own_s = np.zeros((len(ChunkKind), num_stages, count, 1))
        for op, kind in CHUNKS.items():
            for stage in range(num_stages):
                for position, (start, end) in self.times[op][dp, stage].items():
                    own_s[kind, stage, position, 0] = end - start
        return own_s

    def messages(self, dp: int, num_stages: int, count: int) -> Array:
        """Seconds of each message: both ends are parts of batches, the shorter one is nearer."""
        sent_s = np.zeros((len(ChunkKind), num_stages, count, 1))
        for op, (kind, receive, towards) in MESSAGES.items():
            for stage in range(num_stages):
                arriving = self.times[receive].get((dp, stage + towards), {})
                for position, (start, end) in self.times[op].get((dp, stage), {}).items():
                    if position in arriving:
                        began, ended = arriving[position]
                        lasted = min(end, ended) - max(start, began)
                        sent_s[kind, stage, position, 0] = max(lasted, 0.0)
        return sent_s

    def collectives(self, ops: Sequence[OpType]) -> list[Collective]:
        found = []
        for op in ops:
            groups: dict[Place, list[Place]] = defaultdict(list)
            for dp, stage in self.times[op]:
                groups[group_of(op, dp, stage)].append((dp, stage))
            for members in groups.values():
                spans = [t for place in members for t in self.times[op][place].values()]
                lasted = max(end for _, end in spans) - max(start for start, _ in spans)
                found.append(
                    Collective(name=op.name.lower(), workers=tuple(members), duration_s=lasted)
                )
        return found


def errors_of(trace: Trace, *, is_blocking: bool) -> list[float]:
    """(price - measured) / measured of every step."""
    ops = trace.ops
    assert ops is not None
    num_stages = 1 + max(worker.stage for worker in trace.workers)
    num_dp = 1 + max(worker.dp for worker in trace.workers)
    graphs: dict[int, PathGraph] = {}
    errors = []
    for number in np.unique(ops.step).tolist():
        step = Step(trace, ops, number)
        counts = [len(step.times[OpType.FORWARD][dp, 0]) for dp in range(num_dp)]
        for count in set(counts) - graphs.keys():
            program = pipeline_program(
                Schedule.ONE_F_ONE_B, num_stages=num_stages, num_microbatches=count
            )
            graphs[count] = path_graph(program, is_blocking=is_blocking)
        price = critical_path(
            [graphs[count] for count in counts],
            chunk_s=[step.chunks(dp, num_stages, count) for dp, count in enumerate(counts)],
            transfer_s=[step.messages(dp, num_stages, count) for dp, count in enumerate(counts)],
            before=step.collectives(BEFORE),
            after=step.collectives(AFTER),
        )
        errors.append(price.step_s / step.measured_s - 1.0)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    folder = parser.parse_args().data / "bytedance_straggler"
    table = Table("trace", "messages", "steps", "median", "p90", "max", "signed median", "time")
    rows: list[dict[str, float | str]] = []
    pooled: dict[str, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("trace-*.parquet")):
        trace = read_bytedance(path)
        for name, is_blocking in (("rendezvous", True), ("data edges", False)):
            began_s = time.perf_counter()
            errors = errors_of(trace, is_blocking=is_blocking)
            pooled[name] += errors
            rows.append(_row(trace.name, name, errors, time.perf_counter() - began_s))
    if not rows:
        raise SystemExit(f"no traces in {folder}")
    rows += [_row("all", name, errors, 0.0) for name, errors in pooled.items()]
    for row in rows:
        shown = [f"{v:.2%}" if "error" in k else str(v) for k, v in row.items()]
        table.add_row(*shown)
    Console().print(table)
    print(json.dumps(rows))


def _row(trace: str, name: str, errors: list[float], took_s: float) -> dict[str, float | str]:
    size = np.abs(errors)
    return {
        "trace": trace,
        "messages": name,
        "steps": len(errors),
        "median_error": float(np.median(size)),
        "p90_error": float(np.quantile(size, 0.9)),
        "max_error": float(size.max()),
        "signed_median_error": float(np.median(errors)),
        "took_s": round(took_s, 1),
    }


if __name__ == "__main__":
    main()
