"""Made-up recorded pipelines: documents that all stages compute, noise, ranks slowed at will."""

from dataclasses import replace

import numpy as np

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.recorded.trace import Chunk, ComputeTable, Trace, Worker


def pipeline(
    *,
    seed: int = 0,
    num_dp: int = 8,
    num_stages: int = 2,
    num_steps: int = 12,
    num_microbatches: int = 6,
    noise: float = 0.006,
    documents: float = 0.3,
    tail_freedom: float | None = None,
    tells_work: bool = False,
) -> Trace:
    """Rank = stage * num_dp + dp. A micro-batch takes the same documents through all stages.

    Seconds are linear in tokens (all the same) and sum(length^2) (lognormal, spread `documents`);
    noise: relative, of each forward and backward; tail_freedom: of Student's t instead of a normal.
    """
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_microbatches, num_dp, num_stages, 2)
    step, micro_batch, dp, stage, chunk = (grid.ravel() for grid in np.indices(shape))
    squares = rng.lognormal(0.0, documents, shape[:3])[step, micro_batch, dp]
    fixed, per_square = 0.10 + 0.03 * stage, 0.04 + 0.01 * stage
    if tail_freedom is None:
        wild = rng.standard_normal(len(step))
    else:
        wild = rng.standard_t(tail_freedom, len(step))
    compute_s = (1.0 + chunk) * (fixed + per_square * squares) * np.exp(noise * wild)
    unknown = np.full(len(step), np.nan)
    return Trace(
        name="made up",
        source="test",
        workers=tuple(
            Worker(rank=s * num_dp + d, stage=s, dp=d)
            for s in range(num_stages)
            for d in range(num_dp)
        ),
        compute=ComputeTable(
            step=10 + step,
            rank=stage * num_dp + dp,
            micro_batch=micro_batch,
            chunk=np.where(chunk == 0, int(Chunk.FORWARD), int(Chunk.BACKWARD)),
            model_chunk=np.zeros(len(step), dtype=np.intp),
            compute_s=compute_s,
            tokens=np.full(len(step), 4096.0) if tells_work else unknown,
            sum_len_squared=4096.0**2 * squares if tells_work else unknown,
            expert_rows=unknown,
        ),
    )


FIRST_STEP = 10


def table_of(trace: Trace) -> ComputeTable:
    assert trace.compute is not None
    return trace.compute


def timed(trace: Trace, factors: Array) -> Trace:
    """The trace with each row's time multiplied."""
    table = table_of(trace)
    return replace(trace, compute=replace(table, compute_s=table.compute_s * factors))


def slowed(
    trace: Trace, rank: int, factor: float, *, first: int = 0, last: int | None = None
) -> Trace:
    """A rank slowed from a step on (counted from FIRST_STEP), up to and with another."""
    table = table_of(trace)
    hit = (table.rank == rank) & (table.step >= FIRST_STEP + first)
    if last is not None:
        hit &= table.step <= FIRST_STEP + last
    return timed(trace, np.where(hit, factor, 1.0))


def summed(trace: Trace) -> Trace:
    """The same run from a source that only tells sums per step and chunk."""
    table = table_of(trace)
    keys = np.stack([table.step, table.rank, table.chunk], axis=1)
    rows, row = np.unique(keys, axis=0, return_inverse=True)
    sums = np.zeros(len(rows))
    np.add.at(sums, row.reshape(-1), table.compute_s)
    zeros, unknown = np.zeros(len(rows), dtype=np.intp), np.full(len(rows), np.nan)
    return replace(
        trace,
        compute=ComputeTable(
            step=rows[:, 0],
            rank=rows[:, 1],
            micro_batch=zeros,
            chunk=rows[:, 2],
            model_chunk=zeros,
            compute_s=sums,
            tokens=unknown,
            sum_len_squared=unknown,
            expert_rows=unknown,
        ),
    )
