"""Reads our own trace files (`core/trace_file.py`): one per node, put together to one run."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.core.records import (
    ExpertLoadRecord,
    MicroBatchRecord,
    Record,
    StepRecord,
)
from pacekeeper.core.topology import Attachment
from pacekeeper.core.trace_file import TraceHeader, parse_header, parse_line
from pacekeeper.predictor.trace import (
    Chunk,
    ComputeTable,
    ExpertLoadTable,
    StepTable,
    Trace,
    WaitTable,
    Worker,
)


@dataclass(slots=True, kw_only=True)
class _Gathered:
    """What all files together told, before it is put into columns."""

    header: TraceHeader
    node_of: dict[int, str] = field(default_factory=dict)
    attached: dict[int, Attachment] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_native(paths: Sequence[Path]) -> Trace:
    """The run in these files, all of one life of one job.

    Damaged lines are left out and counted in the notes. Raises DataError where a file is no trace
    file, where files are of different runs, or where nothing at all can be read.
    """
    gathered: _Gathered | None = None
    for path in paths:
        header, lines = _opened(path)
        if gathered is None:
            gathered = _Gathered(header=header)
        elif (header.job, header.life) != (gathered.header.job, gathered.header.life):
            raise DataError(
                f"{path} is of job {header.job!r}, life {header.life}; {paths[0]} of "
                f"{gathered.header.job!r}, life {gathered.header.life}",
                remedy="replay files of one run at a time",
            )
        _take(gathered, path, header, lines)
    if gathered is None or not gathered.records:
        raise DataError(f"{', '.join(map(str, paths)) or 'no file'}: no record in it")
    return _trace(gathered)


def _opened(path: Path) -> tuple[TraceHeader, list[str]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return parse_header(lines[0] if lines else ""), lines[1:]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _take(gathered: _Gathered, path: Path, header: TraceHeader, lines: Iterable[str]) -> None:
    damaged: Counter[str] = Counter()
    for line in lines:
        try:
            fact = parse_line(line, header)
        except ValueError as error:
            damaged[str(error)] += 1
            continue
        if isinstance(fact, Attachment):
            gathered.attached[fact.rank] = fact
            gathered.node_of[fact.rank] = header.node
        else:
            gathered.records.append(fact)
            gathered.node_of.setdefault(fact.rank, header.node)
    if damaged:
        why, _ = damaged.most_common(1)[0]
        gathered.notes.append(f"{path.name}: {damaged.total()} damaged lines left out ({why})")


def _trace(gathered: _Gathered) -> Trace:
    micro_batches = [r for r in gathered.records if isinstance(r, MicroBatchRecord)]
    ranks = sorted({r.rank for r in gathered.records} | set(gathered.attached))
    roles = sorted({a.role for a in gathered.attached.values()})
    stage_of = {r: roles.index(a.role) for r, a in gathered.attached.items()}
    return Trace(
        name=gathered.header.job,
        source="native",
        workers=tuple(
            Worker(rank=r, stage=stage_of.get(r, 0), node=gathered.node_of.get(r, ""))
            for r in ranks
        ),
        compute=_compute(micro_batches) if micro_batches else None,
        waits=_waits(micro_batches),
        steps=_steps([r for r in gathered.records if isinstance(r, StepRecord)]),
        expert_loads=_loads([r for r in gathered.records if isinstance(r, ExpertLoadRecord)]),
        notes=tuple(gathered.notes),
    )


def _compute(records: Sequence[MicroBatchRecord]) -> ComputeTable:
    """One row per micro-batch; of a step done again, the last time counts."""
    newest = {(r.step, r.rank, r.micro_batch): r for r in records}
    rows = [newest[key] for key in sorted(newest)]
    whole = np.zeros(len(rows), dtype=np.intp)
    return ComputeTable(
        step=np.array([r.step for r in rows], dtype=np.intp),
        rank=np.array([r.rank for r in rows], dtype=np.intp),
        micro_batch=np.array([r.micro_batch for r in rows], dtype=np.intp),
        chunk=whole + int(Chunk.WHOLE),
        model_chunk=whole,
        compute_s=np.array([r.compute_s for r in rows]),
        tokens=np.array([float(r.tokens) for r in rows]),
        sum_len_squared=np.array([float(r.sum_len_squared) for r in rows]),
        expert_rows=np.array([float(r.expert_rows) for r in rows]),
    )


def _waits(records: Sequence[MicroBatchRecord]) -> WaitTable | None:
    """Per step and rank; None where a record does not tell it."""
    wait_s: defaultdict[tuple[int, int], float] = defaultdict(float)
    for record in {(r.step, r.rank, r.micro_batch): r for r in records}.values():
        if record.wait_s is None:
            return None
        wait_s[record.step, record.rank] += record.wait_s
    if not wait_s:
        return None
    keys = np.array(sorted(wait_s), dtype=np.intp)
    return WaitTable(
        step=keys[:, 0], rank=keys[:, 1], wait_s=np.array([wait_s[key] for key in sorted(wait_s)])
    )


def _steps(records: Sequence[StepRecord]) -> StepTable | None:
    """A step takes as long as its last rank."""
    if not records:
        return None
    longest: dict[int, StepRecord] = {}
    for record in records:
        known = longest.get(record.step)
        if known is None or record.duration_s > known.duration_s:
            longest[record.step] = record
    rows = [longest[step] for step in sorted(longest)]
    return StepTable(
        step=np.array([r.step for r in rows], dtype=np.intp),
        duration_s=np.array([r.duration_s for r in rows]),
        tokens=np.array([float(r.tokens) if r.tokens else np.nan for r in rows]),
        sum_len_squared=np.full(len(rows), np.nan),
    )


def _loads(records: Sequence[ExpertLoadRecord]) -> ExpertLoadTable | None:
    """Rows routed by all ranks together."""
    if not records:
        return None
    rows: defaultdict[tuple[int, int, int], float] = defaultdict(float)
    for record in records:
        for offset, count in enumerate(record.counts):
            rows[record.step, record.layer, record.first_expert + offset] += count
    keys = np.array(sorted(rows), dtype=np.intp)
    return ExpertLoadTable(
        step=keys[:, 0],
        layer=keys[:, 1],
        expert=keys[:, 2],
        rows=np.array([rows[key] for key in sorted(rows)]),
    )
