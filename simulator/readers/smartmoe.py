"""Reads the per-rank timers of SmartMoE's artefact: a table, one row per rank and iteration.

Its expert layers are timed with the all-to-alls around them, hence with waiting for the slowest
host of their group; what is left of forward and backward is the rank's own compute.
"""

from pathlib import Path

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.recorded.trace import Chunk, ComputeTable, Trace, Worker
from pacekeeper.simulator.io.tables import is_time, is_whole, left_out, newest, read_table

PLACES = ("rank", "iteration", "pp_rank", "dp_rank")
FORWARD, BACKWARD = "fwd-encoder|total", "backward-compute|total"
ALL_EXPERTS = "MoEMLP|total"  # of the forward pass
EXPERTS = "MoE_L{layer}_{chunk}|total"
CHUNKS = {"fwd": Chunk.FORWARD, "bwd": Chunk.BACKWARD}
HOSTS_OF_EXPERTS = 8  # ranks of an expert-parallel group; the file does not tell


def read_smartmoe(path: Path, *, group_size: int = HOSTS_OF_EXPERTS) -> Trace:
    """The run in a file of this format. Raises DataError for anything else.

    `compute`: per rank and iteration forward and backward without expert layers. `expert_compute`:
    the expert layers, `model_chunk` counts those of a stage. Not in it are the first to meet others
    after a wait (the first layer's forward, the last one's backward): they time that wait.
    """
    table = read_table(path)
    layers = [at for at in range(99) if EXPERTS.format(layer=at, chunk="fwd") in table]
    timers = {FORWARD, BACKWARD, ALL_EXPERTS}
    timers |= {EXPERTS.format(layer=at, chunk=chunk) for at in layers for chunk in CHUNKS}
    table.need({*PLACES, *timers}, "timers of SmartMoE")
    if not layers or not table.num_rows:
        raise DataError(f"{path}: holds no expert layer's time")
    keys = {name: table.numbers(name) for name in PLACES}
    placed = np.all([is_whole(values) for values in keys.values()], axis=0)
    if not placed.any():
        raise DataError(f"{path}: no row tells its rank, iteration and place")
    whole = {name: values[placed].astype(np.intp) for name, values in keys.items()}
    kept = newest([whole["rank"], whole["iteration"]])
    notes = [
        *table.notes,
        *left_out(
            int((~placed).sum()), "rows without a possible rank, iteration and place left out"
        ),
        *left_out(int((~kept).sum()), "rows told twice: the last one counts"),
    ]
    ms = {name: _ms(table.numbers(name)[placed][kept]) for name in timers}
    whole = {name: values[kept] for name, values in whole.items()}
    rank, step = whole["rank"], whole["iteration"]
    backward_experts = sum(ms[EXPERTS.format(layer=at, chunk="bwd")] for at in layers)
    own_ms = {
        Chunk.FORWARD: ms[FORWARD] - ms[ALL_EXPERTS],
        Chunk.BACKWARD: ms[BACKWARD] - backward_experts,
    }
    inner = [
        (chunk, layer, ms[EXPERTS.format(layer=layer, chunk=name)])
        for name, chunk in CHUNKS.items()
        for layer in layers
        if layer != (layers[0] if chunk is Chunk.FORWARD else layers[-1])
    ]
    places = np.stack([whole[name] for name in ("rank", "pp_rank", "dp_rank")])
    workers = tuple(
        Worker(rank=rank, stage=stage, dp=dp)
        for rank, stage, dp in np.unique(places, axis=1).T.tolist()
    )
    if len({worker.rank for worker in workers}) != len(workers):
        raise DataError(f"{path}: a rank appears at two places")
    return Trace(
        name=path.name.partition(".")[0],
        source="smartmoe",
        workers=workers,
        compute=_rows(step, rank, [(chunk, 0, taken) for chunk, taken in own_ms.items()]),
        expert_compute=_rows(step, rank, inner) if inner else None,
        groups=_groups(workers, group_size),
        notes=(
            *notes,
            "expert layers are timed with the waiting for their slowest host",
            f"expert-parallel groups of {group_size} neighbouring ranks are assumed",
        ),
    )


def _ms(values: Array) -> Array:
    """Milliseconds, NaN for what no timer can have shown."""
    return np.where(is_time(np.abs(values) * 1e-3), values, np.nan)


def _rows(step: Positions, rank: Positions, parts: list[tuple[Chunk, int, Array]]) -> ComputeTable:
    """One row per part, rank and iteration; parts are (chunk, layer, milliseconds)."""
    chunk, layer, taken_ms = zip(*parts, strict=True)
    count = len(step)
    compute_s = np.concatenate(taken_ms) / 1e3
    unknown = np.full(len(compute_s), np.nan)
    return ComputeTable(
        step=np.tile(step, len(parts)),
        rank=np.tile(rank, len(parts)),
        micro_batch=np.zeros(len(compute_s), dtype=np.intp),
        chunk=np.repeat(np.array(chunk, dtype=np.intp), count),
        model_chunk=np.repeat(np.array(layer, dtype=np.intp), count),
        compute_s=compute_s,
        tokens=unknown,
        sum_len_squared=unknown,
        expert_rows=unknown,
    )


def _groups(workers: tuple[Worker, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours of a stage by dp rank."""
    stages: dict[int, list[Worker]] = {}
    for worker in sorted(workers, key=lambda worker: (worker.stage, worker.dp)):
        stages.setdefault(worker.stage, []).append(worker)
    return tuple(
        tuple(worker.rank for worker in members[first : first + size])
        for members in stages.values()
        for first in range(0, len(members), size)
    )
