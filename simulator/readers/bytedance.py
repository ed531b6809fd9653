"""Reads traces in the format of ByteDance's StragglerAnalysis: a table of every operation of a job.

One lane is kept per data-parallel x pipeline worker; a step's clock begins at 0.
"""

from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.cost.features import Flags, Positions
from pacekeeper.predictor.recorded.trace import OpTable, OpType, Trace, Worker, compute_of
from pacekeeper.simulator.io.tables import (
    MAX_WHOLE,
    Table,
    is_time,
    is_whole,
    left_out,
    newest,
    read_table,
)

NEEDED = ("dp_rank", "stage", "step", "optype", "duration")
MAX_PLACE = 1 << 16  # of a stage or a data-parallel rank: more is no such table
OPS = {
    "forward-compute": OpType.FORWARD,
    "backward-compute": OpType.BACKWARD,
    "forward-send": OpType.FORWARD_SEND,
    "forward-recv": OpType.FORWARD_RECV,
    "backward-send": OpType.BACKWARD_SEND,
    "backward-recv": OpType.BACKWARD_RECV,
    "params-all-gather": OpType.PARAMS_ALL_GATHER,
    "grads-reduce-scatter": OpType.GRADS_REDUCE_SCATTER,
    "layernorm-grads-all-reduce": OpType.LAYERNORM_GRADS_ALL_REDUCE,
    "embedding-grads-all-reduce": OpType.EMBEDDING_GRADS_ALL_REDUCE,
    "optimizer": OpType.OPTIMIZER,
    "optimizer-clip-main-grad": OpType.CLIP_GRADS,
    "gc": OpType.GARBAGE_COLLECTION,
}


def read_bytedance(path: Path) -> Trace:
    """The trace in a file of this format. Raises DataError for anything else.

    Where the starts of operations are not told there is no timeline, only compute times; rank,
    model chunk and order are taken from the rest where they are not told. All of it is noted.
    """
    table = read_table(path)
    table.need(NEEDED, "a StragglerAnalysis trace")
    notes = list(table.notes)
    ops, place = _usable(table, notes)
    workers = tuple(
        Worker(rank=rank, stage=stage, dp=dp)
        for rank, stage, dp in np.unique(place, axis=1).T.tolist()
    )
    if len({worker.rank for worker in workers}) != len(workers):
        raise DataError(
            f"{path}: a rank appears at two places", remedy="replay one lane of each worker"
        )
    return Trace(
        name=path.name.partition(".")[0],
        source="bytedance",
        workers=workers,
        ops=ops if "start_ts" in table else None,
        compute=compute_of(ops),
        notes=tuple(notes),
    )


def _usable(table: Table, notes: list[str]) -> tuple[OpTable, Positions]:
    """The operations that can be used, and (rank, stage, dp) of each [3, rows]."""
    names = table.words("optype")
    known = np.isin(names, list(OPS))
    duration, start = table.numbers("duration"), table.numbers("start_ts")
    timed = is_time(duration)
    if "start_ts" in table:
        timed &= np.abs(start) < MAX_WHOLE  # since the step began, or since 1970
    else:
        notes.append("starts of operations are not told (start_ts): no timeline, no what-if")
    stage, dp, step = (table.numbers(name) for name in ("stage", "dp_rank", "step"))
    rank = table.numbers("rank")
    if "rank" not in table:
        rank = stage * (1.0 + np.nanmax(dp, initial=0.0)) + dp
        notes.append("ranks are not told: numbered by stage and data-parallel rank")
    placed = is_whole(step) & is_whole(rank)
    for value in (stage, dp):
        placed &= is_whole(value) & (value < MAX_PLACE)
    good = known & timed & placed
    unknown = sorted(set(names[~known].tolist()))[:4]
    said = left_out(int((~known).sum()), f"operations of unknown types left out: {unknown}")
    said += left_out(int((known & ~timed).sum()), "operations without a possible time left out")
    said += left_out(
        int((known & timed & ~placed).sum()),
        "operations without a possible step and place left out",
    )
    if not good.any():
        why = f" ({'; '.join(said)})" if said else ""
        raise DataError(f"{table.path}: holds no operation that can be read{why}")
    notes += said
    ops = _ops(table, good, names, (step, rank, start, duration), notes)
    place = np.stack([value[good].astype(np.intp) for value in (rank, stage, dp)])
    key = [ops.step, ops.op, ops.micro_batch, ops.model_chunk, ops.sequence]
    kept = newest([*key, *place])
    notes += left_out(int((~kept).sum()), "operations told twice: the last one counts")
    kept_ops = OpTable(**{name: getattr(ops, name)[kept] for name in OpTable.__slots__})
    return kept_ops, place[:, kept]


def _ops(
    table: Table, good: Flags, names: Any, columns: tuple[Any, ...], notes: list[str]
) -> OpTable:
    step, rank, start, duration = (values[good] for values in columns)
    op = np.array([int(OPS[name]) for name in names[good]], dtype=np.intp)
    order = _order(step, rank, op, np.nan_to_num(start))

    def told(name: str, otherwise: Positions) -> Positions:
        values = table.numbers(name)[good]
        is_told = is_whole(values, least=-1.0)
        if name in table and not is_told.all():
            notes.append(f"{int((~is_told).sum())} operations do not tell their {name}")
        return np.where(is_told, np.nan_to_num(values), otherwise).astype(np.intp)

    is_compute = np.isin(op, (OpType.FORWARD, OpType.BACKWARD))
    return OpTable(
        step=step.astype(np.intp),
        rank=rank.astype(np.intp),
        op=op,
        micro_batch=told("mb_id", np.where(is_compute, order, -1)),
        model_chunk=told("mc", np.zeros_like(op)),
        sequence=told("seq_id", order),
        start_s=np.nan_to_num(start),
        duration_s=duration,
    )


def _order(step: Any, rank: Any, op: Positions, start: Any) -> Positions:
    """Position of each operation among those of its type in a rank's step, by their starts."""
    by_key = np.lexsort((start, op, rank, step))
    keys = np.stack([step, rank, op.astype(np.float64)])[:, by_key]
    is_new = np.ones(len(op), dtype=np.bool_)
    is_new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    begin = np.maximum.accumulate(np.where(is_new, np.arange(len(op)), 0))
    order = np.empty(len(op), dtype=np.intp)
    order[by_key] = np.arange(len(op)) - begin
    return order
