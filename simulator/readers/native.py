"""Reads our own trace files (`core/telemetry/trace_jsonl.py`): one per node, put together to one
run."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.core.telemetry.trace_jsonl import TraceHeader, parse_header
from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.recorded.trace import (
    Chunk,
    ComputeTable,
    ExpertLoadTable,
    LayoutTable,
    NodeSamples,
    OwnInputTable,
    OwnTransferTable,
    StepTable,
    ThreadTable,
    Trace,
    WaitTable,
    Worker,
)
from pacekeeper.predictor.stats.group_ids import grouped
from pacekeeper.simulator.io.tables import MAX_S, newest
from pacekeeper.simulator.io.text import lines_of
from pacekeeper.simulator.readers.native_columns import LOAD, MICRO_BATCH, STEP, Gathered, take_all


def read_native(paths: Sequence[Path]) -> Trace:
    """The run in these files, all of one run of one job.

    Damaged lines are left out and counted in the notes. Raises DataError where a file is no trace
    file, where files are of different runs, or where nothing at all can be read.
    """
    gathered: Gathered | None = None
    notes: list[str] = []
    for path in paths:
        header, lines = _opened(path, notes)
        if gathered is None:
            gathered = Gathered(header=header, notes=notes)
        elif (header.job, header.run_id) != (gathered.header.job, gathered.header.run_id):
            raise DataError(
                f"{path} is of job {header.job!r}, run {header.run_id}; {paths[0]} of "
                f"{gathered.header.job!r}, run {gathered.header.run_id}",
                remedy="replay files of one run at a time",
            )
        take_all(gathered, path, header, lines)
    if gathered is None or not gathered.node_of:
        raise DataError(f"{', '.join(map(str, paths[:4])) or 'no file'}: no record in it")
    return _trace(gathered)


def _opened(path: Path, notes: list[str]) -> tuple[TraceHeader, Iterator[str]]:
    lines = lines_of(path, notes)
    try:
        return parse_header(next(lines, "")), lines
    except ValueError as error:
        raise DataError(
            f"{path}: {error}", remedy="its first line must be the header of a trace file"
        ) from None


def _trace(gathered: Gathered) -> Trace:
    attached = gathered.attached
    roles = sorted({a.role for a in attached.values()})
    stage_of = {r: roles.index(a.role) for r, a in attached.items()}
    uuid_of = {r: a.device_uuid for r, a in attached.items()}
    done = _newest(gathered.micro_batches, MICRO_BATCH, num_keys=3)
    steps = _newest(gathered.steps, STEP, num_keys=2)
    return Trace(
        name=gathered.header.job,
        source="native",
        workers=tuple(
            Worker(rank=r, stage=stage_of.get(r, 0), node=node, device_uuid=uuid_of.get(r, ""))
            for r, node in sorted(gathered.node_of.items())
        ),
        compute=None if done is None else _compute(done),
        waits=None if done is None else _waits(done),
        threads=None if done is None else _threads(done, steps),
        samples=_samples(gathered),
        own_transfers=None if steps is None else _own_transfers(steps),
        own_inputs=None if steps is None else _own_inputs(steps),
        steps=None if steps is None else _steps(steps),
        layouts=None if done is None else _layouts(done),
        expert_loads=_loads(_newest(gathered.loads, (*LOAD, "rows"), num_keys=4)),
        notes=tuple(gathered.notes),
    )


def _newest(columns: list[Any], names: Sequence[str], *, num_keys: int) -> dict[str, Array] | None:
    """Columns by name, ordered by the keys; of what was done again, the last counts."""
    if not len(columns[0]):
        return None
    values = [np.frombuffer(column, dtype=np.float64) for column in columns]
    kept = np.flatnonzero(newest([value.astype(np.intp) for value in values[:num_keys]]))
    kept = kept[np.lexsort([value[kept] for value in values[:num_keys][::-1]])]
    return {name: value[kept] for name, value in zip(names, values, strict=True)}


def _compute(done: dict[str, Array]) -> ComputeTable:
    """One row per micro-batch."""
    whole = np.zeros(len(done["step"]), dtype=np.intp)
    return ComputeTable(
        step=done["step"].astype(np.intp),
        rank=done["rank"].astype(np.intp),
        micro_batch=done["micro_batch"].astype(np.intp),
        chunk=whole + int(Chunk.WHOLE),
        model_chunk=whole,
        compute_s=done["compute_s"],
        tokens=done["tokens"],
        sum_len_squared=done["sum_len_squared"],
        expert_rows=done["expert_rows"],
    )


def _layouts(done: dict[str, Array]) -> LayoutTable:
    """The newest generation that a rank computed each step under."""
    step, row = np.unique(done["step"].astype(np.intp), return_inverse=True)
    generation = np.zeros(len(step), dtype=np.intp)
    np.maximum.at(generation, row, done["generation"].astype(np.intp))
    return LayoutTable(step=step, generation=generation)


def _by_step(done: dict[str, Array]) -> tuple[Positions, Positions, Positions]:
    """(step, rank) of each rank's steps, and which of them each row belongs to."""
    step, rank = (done[name].astype(np.intp) for name in ("step", "rank"))
    row, first = grouped(step, rank)
    return step[first], rank[first], row


def _sums(row: Positions, values: Array) -> Array:
    total = np.zeros(int(row.max()) + 1)
    np.add.at(total, row, values)
    return total


def _waits(done: dict[str, Array]) -> WaitTable | None:
    """Per step and rank; None where a record does not tell it."""
    if not np.isfinite(done["wait_s"]).all():
        return None
    step, rank, row = _by_step(done)
    return WaitTable(step=step, rank=rank, wait_s=_sums(row, done["wait_s"]))


def _threads(done: dict[str, Array], steps: dict[str, Array] | None) -> ThreadTable:
    """A step has ended when its last micro-batch has, and when its rank says so."""
    ends = [done] if steps is None else [done, steps]
    told = {
        name: np.concatenate([table[name] for table in ends])
        for name in ("step", "rank", "ended_mono_s")
    }
    step, rank, row = _by_step(told)
    ended_s = np.zeros(len(step))
    with np.errstate(invalid="ignore"):  # NaN where it is not told
        np.fmax.at(ended_s, row, told["ended_mono_s"])
    row = row[: len(done["step"])]
    worked = np.zeros(len(step), dtype=np.bool_)
    worked[row] = True
    row = (np.cumsum(worked) - 1)[row]
    return ThreadTable(
        step=step[worked],
        rank=rank[worked],
        compute_s=_sums(row, done["compute_s"]),
        run_queue_s=_sums(row, done["run_queue_s"]),
        stall_s=_sums(row, done["stall_s"]),
        ended_s=np.where(ended_s > 0.0, ended_s, np.nan)[worked],
    )


def _samples(gathered: Gathered) -> tuple[NodeSamples, ...]:
    pids: defaultdict[str, set[int]] = defaultdict(set)
    for rank, attachment in gathered.attached.items():
        pids[gathered.node_of[rank]].add(attachment.pid)
    return tuple(
        NodeSamples(
            node=node,
            devices={
                uuid: tuple(sorted(own, key=lambda s: s.sampled_s))
                for uuid, own in gathered.devices.get(node, {}).items()
            },
            host=tuple(sorted(gathered.hosts.get(node, []), key=lambda s: s.sampled_s)),
            pids=frozenset(pids[node]),
        )
        for node in sorted({*gathered.node_of.values()})
    )


def _steps(done: dict[str, Array]) -> StepTable:
    """A step takes as long as its last rank."""
    order = np.lexsort((-done["duration_s"], done["step"]))
    step = done["step"][order].astype(np.intp)
    _, first = np.unique(step, return_index=True)
    longest = order[first]
    tokens, squares = (done[name][longest] for name in ("tokens", "sum_len_squared"))
    return StepTable(
        step=step[first],
        duration_s=done["duration_s"][longest],
        tokens=np.where(tokens > 0.0, tokens, np.nan),
        sum_len_squared=np.where(squares > 0.0, squares, np.nan),
    )


def _own_transfers(done: dict[str, Array]) -> OwnTransferTable | None:
    """None where no rank ever tells any."""
    if not np.isfinite(done["transfer_s"]).any():
        return None
    return OwnTransferTable(
        step=done["step"].astype(np.intp),
        rank=done["rank"].astype(np.intp),
        num_bytes=done["transfer_bytes"],
        transfer_s=np.where(done["transfer_s"] < MAX_S, done["transfer_s"], np.nan),
    )


def _own_inputs(done: dict[str, Array]) -> OwnInputTable | None:
    """None where no rank ever tells any."""
    if not np.isfinite(done["input_wait_s"]).any():
        return None
    return OwnInputTable(
        step=done["step"].astype(np.intp),
        rank=done["rank"].astype(np.intp),
        duration_s=done["duration_s"],
        input_s=np.where(done["input_wait_s"] < MAX_S, done["input_wait_s"], np.nan),
    )


def _loads(told: dict[str, Array] | None) -> ExpertLoadTable | None:
    """Rows routed by all ranks together."""
    if told is None:
        return None
    places = [told[name].astype(np.intp) for name in ("step", "layer", "first_expert")]
    row, first = grouped(*places)
    step, layer, expert = (column[first] for column in places)
    return ExpertLoadTable(
        step=step,
        layer=layer,
        expert=expert,
        rows=_sums(row, told["rows"]),
    )
