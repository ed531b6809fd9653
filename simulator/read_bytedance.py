"""Reads traces in the format of ByteDance's StragglerAnalysis: Parquet, every operation of a job.

One lane is kept per data-parallel x pipeline worker; a step's clock begins at 0.
"""

from pathlib import Path

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.trace import OpTable, OpType, Trace, Worker, compute_of
from pacekeeper.predictor.workload import Array, Positions
from pacekeeper.simulator.parquet_file import read_parquet

COLUMNS = (
    "dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id",
)  # fmt: skip
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
    """The trace in a Parquet file of this format. Raises DataError for anything else."""
    table = read_parquet(path)
    missing = sorted(set(COLUMNS) - set(table.schema.names))
    if missing:
        raise DataError(f"{path}: not a StragglerAnalysis trace: no column {', '.join(missing)}")
    columns = {name: table.column(name).to_numpy() for name in COLUMNS}
    known = np.isin(columns["optype"], list(OPS))
    finite = np.isfinite(columns["duration"]) & np.isfinite(columns["start_ts"])
    good = known & finite & (columns["duration"] >= 0.0)
    if not good.any():
        raise DataError(f"{path}: holds no operation that can be read")
    notes = []
    if not known.all():
        names = sorted(set(columns["optype"][~known].tolist()))
        notes.append(f"{int((~known).sum())} operations of unknown types left out: {names}")
    if not (good == known).all():
        notes.append(f"{int((known & ~good).sum())} operations without a possible time left out")

    def whole(name: str) -> Positions:
        kept: Positions = columns[name][good].astype(np.intp)
        return kept

    def real(name: str) -> Array:
        kept: Array = columns[name][good].astype(np.float64)
        return kept

    codes = np.array([int(OPS[name]) for name in columns["optype"][good]], dtype=np.intp)
    ops = OpTable(
        step=whole("step"),
        rank=whole("rank"),
        op=codes,
        micro_batch=whole("mb_id"),
        model_chunk=whole("mc"),
        sequence=whole("seq_id"),
        start_s=real("start_ts"),
        duration_s=real("duration"),
    )
    places = set(
        zip(*(columns[name][good].tolist() for name in ("rank", "stage", "dp_rank")), strict=True)
    )
    workers = tuple(
        Worker(rank=int(rank), stage=int(stage), dp=int(dp)) for rank, stage, dp in sorted(places)
    )
    if len({worker.rank for worker in workers}) != len(workers):
        raise DataError(f"{path}: a rank appears at two places")
    return Trace(
        name=path.stem,
        source="bytedance",
        workers=workers,
        ops=ops,
        compute=compute_of(ops),
        notes=tuple(notes),
    )
