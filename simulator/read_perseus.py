"""Reads the power-capped pipeline runs of Perseus (Chung et al., SOSP 2024), reduced to tables.

One row per (setting, rank, iteration). Every GPU's power cap is known, so a run with an onset of
known place, time and size can be joined from two measured ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.trace import Chunk, ComputeTable, Trace, Worker
from pacekeeper.predictor.workload import Flags, Positions
from pacekeeper.simulator.parquet_file import read_parquet

COLUMNS = (
    "scheduler", "setting", "rank", "iteration", "fwd_sum_s", "bwd_sum_s", "state_min", "model",
    "partition", "dp", "pp", "tp", "mbs", "nmb", "label_kind",
)  # fmt: skip
JOB = ("model", "partition", "dp", "pp", "tp", "mbs", "nmb")
CAPPED = ("zeus_global", "zeus_local")  # the same cap everywhere; a cap for each GPU
FULL_POWER_W = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CappedRun:
    """One profiled run under power caps. `job` tells model, partition and sizes: runs of the same
    job do the same work. `cap_w`: of each rank's GPU.
    """

    job: tuple[Any, ...]
    scheduler: str
    setting: int
    cap_w: Mapping[int, int]
    trace: Trace

    @property
    def is_healthy(self) -> bool:
        """Nobody is capped, in a run that caps all GPUs alike."""
        return self.scheduler == "zeus_global" and min(self.cap_w.values()) >= FULL_POWER_W


def read_perseus(path: Path) -> tuple[CappedRun, ...]:
    """The power-capped runs in a rank_iterations file, iteration 0 (warm-up) left out.

    Raises DataError for anything else.
    """
    columns = _columns(path)
    kept = np.isin(columns["scheduler"], CAPPED) & (columns["iteration"] > 0)
    for name in ("fwd_sum_s", "bwd_sum_s"):
        with np.errstate(invalid="ignore"):
            kept &= columns[name] > 0.0
    if not kept.any():
        raise DataError(f"{path}: holds no power-capped iteration")
    keys: dict[tuple[Any, ...], list[int]] = {}
    rows = zip(*(columns[name] for name in (*JOB, "scheduler", "setting")), strict=True)
    for row, key in enumerate(rows):
        if kept[row]:
            keys.setdefault(tuple(key), []).append(row)
    return tuple(
        _run(path, {name: columns[name][rows] for name in COLUMNS}, key)
        for key, rows in sorted(keys.items(), key=lambda item: str(item[0]))
    )


def joined(
    healthy: Sequence[CappedRun],
    capped: CappedRun,
    *,
    victims: Collection[int] | None = None,
    healthy_iterations: int | None = None,
) -> Trace:
    """A trace that runs at full power and then as in `capped`; steps are counted from 0.

    victims: only these ranks change, the others go on as in the last of `healthy`, which is then
    no part of the past. healthy_iterations: the last so many of the past. Raises ValueError if the
    runs are of different jobs or there is no past left.
    """
    if {run.job for run in (*healthy, capped)} != {capped.job}:
        raise ValueError("runs of different jobs can not be joined")
    past = list(healthy) if victims is None else list(healthy[:-1])
    if not past:
        raise ValueError("an onset needs a healthy run before it")
    tables, first = [], 0
    for run in past:
        table, count = _renumbered(_table(run.trace), first)
        tables.append(table)
        first += count
    if healthy_iterations is not None:
        tables = [_only(t, t.step >= first - healthy_iterations) for t in tables]
    after, count = _renumbered(_table(capped.trace), first)
    if victims is not None:
        rest, spare = _renumbered(_table(healthy[-1].trace), first)
        common = first + min(count, spare)
        is_victim = np.isin(after.rank, list(victims))
        after = _only(after, is_victim & (after.step < common))
        rest = _only(rest, ~np.isin(rest.rank, list(victims)) & (rest.step < common))
        tables.append(rest)
    return replace(
        capped.trace,
        name=f"{capped.trace.name}-onset-{first}",
        compute=_concatenated([*tables, after]),
        notes=(
            *capped.trace.notes,
            f"joined from measured runs: full power before step {first}, then setting "
            f"{capped.setting} of {capped.scheduler}"
            + ("" if victims is None else f" for ranks {sorted(victims)} only"),
        ),
    )


def _run(path: Path, rows: Mapping[str, Any], key: tuple[Any, ...]) -> CappedRun:
    *job, scheduler, setting = key
    ranks = np.unique(rows["rank"])
    pp = int(job[JOB.index("pp")])
    stages, notes = _stages(rows, ranks, pp)
    count = len(rows["rank"])
    unknown = np.full(2 * count, np.nan)
    table = ComputeTable(
        step=np.tile(rows["iteration"], 2).astype(np.intp),
        rank=np.tile(rows["rank"], 2).astype(np.intp),
        micro_batch=np.zeros(2 * count, dtype=np.intp),
        chunk=np.repeat([int(Chunk.FORWARD), int(Chunk.BACKWARD)], count).astype(np.intp),
        model_chunk=np.zeros(2 * count, dtype=np.intp),
        compute_s=np.concatenate([rows["fwd_sum_s"], rows["bwd_sum_s"]]).astype(np.float64),
        tokens=unknown,
        sum_len_squared=unknown,
        expert_rows=unknown,
    )
    place = {rank: stages[:i].count(stages[i]) for i, rank in enumerate(ranks.tolist())}
    return CappedRun(
        job=tuple(job),
        scheduler=str(scheduler),
        setting=int(setting),
        cap_w={int(r): int(rows["state_min"][rows["rank"] == r].min()) for r in ranks},
        trace=Trace(
            name=f"{path.stem}-{job[0]}-{scheduler}-{setting}",
            source="perseus",
            workers=tuple(
                Worker(rank=rank, stage=stages[i], dp=place[rank])
                for i, rank in enumerate(ranks.tolist())
            ),
            compute=table,
            notes=("sums per iteration: single micro-batches are not told", *notes),
        ),
    )


def _stages(
    rows: Mapping[str, Any], ranks: Positions, pp: int
) -> tuple[list[int], tuple[str, ...]]:
    """The stage of each rank; where there are more ranks than stages, by which take equally long.

    Two orders are usual: pipeline outermost or innermost.
    """
    if len(ranks) <= pp or len(ranks) % pp:
        return list(range(len(ranks))), ()
    seconds = np.array([np.median(rows["bwd_sum_s"][rows["rank"] == rank]) for rank in ranks])
    outer = np.arange(len(ranks)) // (len(ranks) // pp)
    inner = np.arange(len(ranks)) % pp

    def unlike(stages: Positions) -> float:
        return float(sum(np.ptp(np.log(seconds[stages == stage])) for stage in range(pp)))

    chosen = outer if unlike(outer) <= unlike(inner) else inner
    return chosen.tolist(), ("the stage of each rank was told from its times",)


def _table(trace: Trace) -> ComputeTable:
    assert trace.compute is not None
    return trace.compute


def _renumbered(table: ComputeTable, first: int) -> tuple[ComputeTable, int]:
    """Steps numbered on from `first` without a gap; how many there are."""
    steps, position = np.unique(table.step, return_inverse=True)
    return replace(table, step=position.reshape(-1).astype(np.intp) + first), len(steps)


def _only(table: ComputeTable, kept: Flags) -> ComputeTable:
    return ComputeTable(**{name: getattr(table, name)[kept] for name in ComputeTable.__slots__})


def _concatenated(tables: Sequence[ComputeTable]) -> ComputeTable:
    return ComputeTable(
        **{
            name: np.concatenate([getattr(table, name) for table in tables])
            for name in ComputeTable.__slots__
        }
    )


def _columns(path: Path) -> dict[str, Any]:
    table = read_parquet(path)
    missing = sorted(set(COLUMNS) - set(table.schema.names))
    if missing:
        raise DataError(f"{path}: not a Perseus table: no column {', '.join(missing)}")
    return {name: np.array(table.column(name).to_pylist()) for name in COLUMNS}
