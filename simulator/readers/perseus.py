"""Reads the power-capped pipeline runs of Perseus (Chung et al., SOSP 2024), reduced to tables.

One row per (setting, rank, iteration), or per instruction of those. Every GPU's power cap is known,
so a run with an onset of known place, time and size can be joined from two measured ones.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.recorded.trace import Chunk, ComputeTable, Trace, Worker
from pacekeeper.predictor.stats.group_ids import grouped
from pacekeeper.simulator.io.tables import (
    MAX_WHOLE,
    Table,
    is_time,
    is_whole,
    left_out,
    newest,
    read_table,
)

SUMS = ("rank", "iteration", "fwd_sum_s", "bwd_sum_s")
INSTRUCTIONS = ("rank", "iteration", "phase", "microbatch", "seconds")
CAPS = ("state_min", "power_cap_W")
JOB = ("model", "partition", "dp", "pp", "tp", "mbs", "nmb")
RUN = (*JOB, "scheduler", "setting")
CAPPED = ("zeus_global", "zeus_local")  # the same cap everywhere; a cap for each GPU
CHUNKS = {"forward": Chunk.FORWARD, "backward": Chunk.BACKWARD}
CHUNK_SUMS = {"fwd_sum_s": Chunk.FORWARD, "bwd_sum_s": Chunk.BACKWARD}
FULL_POWER_W = 300

T = TypeVar("T", "_Rows", ComputeTable)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Times of forward and backward with the place and the cap of their GPU."""

    step: Positions
    rank: Positions
    micro_batch: Positions
    chunk: Positions
    compute_s: Array
    cap_w: Array  # NaN where it is not told


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CappedRun:
    """One profiled run under power caps. `job` tells model, partition and sizes: runs of the same
    job do the same work. `cap_w`: of each GPU it is told of; `full_w`: the highest of the job.
    """

    job: tuple[str, ...]
    scheduler: str
    setting: int
    cap_w: Mapping[int, int]
    trace: Trace
    full_w: int = FULL_POWER_W

    @property
    def is_healthy(self) -> bool:
        """Nobody is capped, in a run that caps all GPUs alike."""
        caps = self.cap_w.values()
        return self.scheduler == "zeus_global" and min(caps, default=0) >= self.full_w


def is_perseus(names: Collection[str]) -> bool:
    """Are columns of these names those of the tables?"""
    return set(SUMS) <= set(names) or set(INSTRUCTIONS) <= set(names)


def read_perseus(
    path: Path, *, schedulers: Collection[str] | None = CAPPED
) -> tuple[CappedRun, ...]:
    """The runs of these schedulers (None: all) in a table of sums per iteration, or of
    instructions; iteration 0 (warm-up) is left out.

    Raises DataError for anything else.
    """
    table, number, keys, notes = _rows(path, schedulers)
    runs = [
        _run(path, _only(table, rows), keys[number[rows[0]]], notes)
        for rows in _split(number, len(keys))
        if len(rows)
    ]
    runs.sort(key=lambda run: (run.job, run.scheduler, run.setting))
    full_w: dict[tuple[str, ...], int] = {}
    for run in runs:
        if run.scheduler in CAPPED:
            full_w[run.job] = max(full_w.get(run.job, 0), *run.cap_w.values(), 0)
    return tuple(replace(run, full_w=full_w.get(run.job, 0)) for run in runs)


def perseus_traces(path: Path) -> tuple[Trace, ...]:
    """The file as runs to be judged: of each job that was measured at full power, that and then one
    setting, for each setting; else the settings alone. Raises as `read_perseus`.
    """
    capped = read_perseus(path, schedulers=None)
    return tuple(
        trace for job in dict.fromkeys(run.job for run in capped) for trace in _of(job, capped)
    )


def _of(job: tuple[str, ...], runs: Sequence[CappedRun]) -> Iterator[Trace]:
    own = [run for run in runs if run.job == job]
    healthy = [run for run in own if run.is_healthy]
    for run in own:
        others = [other for other in healthy if other is not run]
        if run.scheduler not in CAPPED or not others:
            yield run.trace
        elif len(others) == 1 and _table(others[0].trace).step.max() < _table(run.trace).step.min():
            both = [_table(one.trace) for one in (others[0], run)]  # numbered on in the file itself
            yield replace(run.trace, compute=_concatenated(both))
        else:
            yield joined(others, run)


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


def _run(path: Path, rows: _Rows, key: tuple[str, ...], notes: Sequence[str]) -> CappedRun:
    *job, scheduler, setting = key
    ranks = np.unique(rows.rank)
    stages, told = _stages(rows, ranks, job[JOB.index("pp")])
    unknown = np.full(len(rows.rank), np.nan)
    place = {rank: stages[:i].count(stages[i]) for i, rank in enumerate(ranks.tolist())}
    own = _split(np.searchsorted(ranks, rows.rank), len(ranks))
    lowest = {rank: rows.cap_w[own[i]].min() for i, rank in enumerate(ranks.tolist())}
    return CappedRun(
        job=tuple(job),
        scheduler=scheduler,
        setting=_int(setting),
        cap_w={rank: int(cap) for rank, cap in lowest.items() if np.isfinite(cap)},
        trace=Trace(
            name="-".join(filter(None, (path.name.partition(".")[0], job[0], scheduler, setting))),
            source="perseus",
            workers=tuple(
                Worker(rank=rank, stage=stages[i], dp=place[rank])
                for i, rank in enumerate(ranks.tolist())
            ),
            compute=ComputeTable(
                step=rows.step,
                rank=rows.rank,
                micro_batch=rows.micro_batch,
                chunk=rows.chunk,
                model_chunk=np.zeros_like(rows.chunk),
                compute_s=rows.compute_s,
                tokens=unknown,
                sum_len_squared=unknown,
                expert_rows=unknown,
            ),
            notes=(*notes, *told),
        ),
    )


def _stages(rows: _Rows, ranks: Positions, told: str) -> tuple[list[int], tuple[str, ...]]:
    """The stage of each rank; where there are more ranks than stages, by which take equally long.

    Two orders are usual: pipeline outermost or innermost.
    """
    pp = _int(told)
    if pp < 1 or len(ranks) <= pp or len(ranks) % pp:
        return list(range(len(ranks))), ()
    backward = np.flatnonzero(rows.chunk == Chunk.BACKWARD)
    of_rank = _split(np.searchsorted(ranks, rows.rank[backward]), len(ranks))
    seconds = np.array([np.median(rows.compute_s[backward[own]]) for own in of_rank])
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


def _only(table: T, kept: Any) -> T:
    names = [field.name for field in fields(table)]
    return type(table)(**{name: getattr(table, name)[kept] for name in names})


def _concatenated(tables: Sequence[T]) -> T:
    names = [field.name for field in fields(tables[0])]
    columns = {name: np.concatenate([getattr(one, name) for one in tables]) for name in names}
    return type(tables[0])(**columns)


def _split(number: Positions, count: int) -> list[Positions]:
    """Where each number from 0 to `count` stands."""
    order = np.argsort(number, kind="stable")
    return np.split(order, np.searchsorted(number[order], np.arange(1, count)))


def _rows(
    path: Path, schedulers: Collection[str] | None
) -> tuple[_Rows, Positions, list[tuple[str, ...]], list[str]]:
    """The usable rows, the number of the run of each, the runs, and notes. Raises DataError where
    there are none.
    """
    table = read_table(path)
    is_split = set(INSTRUCTIONS) <= set(table.columns)
    table.need(INSTRUCTIONS if is_split else SUMS, "a Perseus table")
    notes = [*table.notes]
    if is_split:
        chunks = np.array([CHUNKS.get(phase, -1) for phase in table.words("phase")], dtype=np.intp)
        parts = [(chunks, table.numbers("seconds"))]
        micro_batch = table.numbers("microbatch")
    else:
        whole = np.zeros(table.num_rows, dtype=np.intp)
        parts = [(whole + int(chunk), table.numbers(name)) for name, chunk in CHUNK_SUMS.items()]
        micro_batch = whole.astype(np.float64)
        notes.append("sums per iteration: single micro-batches are not told")
    step, rank = table.numbers("iteration"), table.numbers("rank")
    good = is_whole(rank) & is_whole(step) & is_whole(micro_batch)
    for chunk, seconds in parts:
        good &= is_time(seconds) & (seconds != 0.0) & (chunk >= 0)
    notes += left_out(int((~good).sum()), "rows without a possible place and time left out")
    words = [_words(table, name) for name in RUN]
    if schedulers is not None:
        code, told = words[RUN.index("scheduler")]
        good &= np.array([word in schedulers for word in told], dtype=np.bool_)[code]
    good &= step > 0  # iteration 0 warms up
    if not good.any():
        raise DataError(f"{path}: holds no power-capped iteration")
    caps = [table.numbers(name) for name in CAPS if name in table]
    rows = _concatenated(
        [
            _Rows(
                step=step[good].astype(np.intp),
                rank=rank[good].astype(np.intp),
                micro_batch=micro_batch[good].astype(np.intp),
                chunk=chunk[good],
                compute_s=seconds[good],
                cap_w=caps[0][good] if caps else np.full(int(good.sum()), np.nan),
            )
            for chunk, seconds in parts
        ]
    )
    run, first = grouped(*(code[good] for code, _ in words))
    kept_rows = np.flatnonzero(good)[first]
    keys = [tuple(told[code[row]] for code, told in words) for row in kept_rows]
    run = np.tile(run, len(parts))
    kept = newest([run, rows.step, rows.rank, rows.micro_batch, rows.chunk])
    notes += left_out(int((~kept).sum()), "times told twice: the last one counts")
    return _only(rows, kept), run[kept], keys, notes


def _int(word: str) -> int:
    """0 where it is no number of a sensible size."""
    try:
        value = float(word)
    except ValueError:
        return 0
    return int(value) if abs(value) < MAX_WHOLE else 0


def _words(table: Table, name: str) -> tuple[Positions, list[str]]:
    """A column that says which run a row is of: the number of each row's word, and the words;
    where there is no such column, all are of one run.
    """
    if name not in table:
        return np.zeros(table.num_rows, dtype=np.intp), [""]
    told = table.words(name).tolist()
    number = {word: i for i, word in enumerate(dict.fromkeys(told))}
    return np.fromiter(map(number.__getitem__, told), np.intp, len(told)), list(number)
