"""Reports of many nodes, grouped by job and sorted by kind of record.

Ranks end a step together, so their nodes report it together, and handling a job once per report
costs far more than handling a record. The order within a job is kept. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pacekeeper.controller.state.events import Event, NodeReported, NodesReported
from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable, table_from_records
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import (
    CheckpointRecord,
    ExpertLoadRecord,
    MicroBatchRecord,
    PairRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    SnapshotRecord,
    StepRecord,
)

Part = tuple[str, JobReport]
"""A node, and what it says of one job."""

_WORK = frozenset((MicroBatchRecord, StepRecord, ExpertLoadRecord))


def by_job(events: Iterable[NodeReported]) -> Iterator[Part]:
    """Yield the parts of these reports job by job.

    Consecutive parts with nothing but steps of the same run are joined under the first one's node.
    """
    parts: dict[str, list[Part]] = {}
    for event in events:
        for report in event.report.jobs:
            parts.setdefault(report.job, []).append((event.node, report))
    for own in parts.values():
        yield from own if len(own) == 1 else _joined(own)


def merge_reports(events: Iterable[Event]) -> Iterator[Event]:
    """The same events, reports that come one after the other as one."""
    reports: list[NodeReported] = []
    for event in events:
        if isinstance(event, NodeReported):
            reports.append(event)
            continue
        if reports:
            yield NodesReported(reports=tuple(reports))
            reports = []
        yield event
    if reports:
        yield NodesReported(reports=tuple(reports))


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    waiting = list[Part]()
    for node, report in parts:
        is_work = _is_work(report)
        if waiting and not (is_work and report.run_id == waiting[0][1].run_id):
            yield _as_one(waiting)
            waiting = []
        if is_work:
            waiting.append((node, report))
        else:
            yield node, report
    if waiting:
        yield _as_one(waiting)


def _as_one(parts: Sequence[Part]) -> Part:
    node, first = parts[0]
    reports = [report for _, report in parts]
    return node, JobReport(
        job=first.job,
        run_id=first.run_id,
        records=tuple(chain.from_iterable(report.records for report in reports)),
        micro_batches=tuple(chain.from_iterable(report.micro_batches for report in reports)),
    )


def _is_work(report: JobReport) -> bool:
    if report.attached or report.layouts or report.phases or report.stacks:
        return False
    if not (report.records or report.micro_batches):
        return False
    return _WORK.issuperset(map(type, report.records))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsByKind:
    """The records of a report by kind, in order of arrival; `ranks`: all ranks they concern."""

    ranks: frozenset[int]
    runs: frozenset[tuple[int, int]]  # (rank, generation): work and more was told under it
    work: Sequence[MicroBatchTable]
    ends: Sequence[StepRecord]
    loads: Sequence[ExpertLoadRecord]
    applied: Sequence[PlanAppliedRecord]
    refused: Sequence[PlanRefusedRecord]
    exits: Sequence[RankExitRecord]
    probes: Sequence[ProbeRecord]
    pairs: Sequence[PairRecord]
    checkpoints: Sequence[CheckpointRecord]
    snapshots: Sequence[SnapshotRecord]


def records_by_kind(report: JobReport) -> RecordsByKind:
    """Its records and tables, sorted once."""
    by_kind: dict[type, list[Any]] = defaultdict(list)
    for record in report.records:
        by_kind[type(record)].append(record)
    single = by_kind[MicroBatchRecord]
    work = (*report.micro_batches, *([table_from_records(single)] if single else ()))
    runs = {
        (record.rank, record.generation)
        for kind, records in by_kind.items()
        if kind not in (RankExitRecord, PlanAppliedRecord, MicroBatchRecord)
        for record in records
    }.union(*(zip(t.column("rank"), t.column("generation"), strict=True) for t in work))
    ranks = {rank for rank, _ in runs}
    ranks.update(one.rank for kind in (RankExitRecord, PlanAppliedRecord) for one in by_kind[kind])
    return RecordsByKind(
        ranks=frozenset(ranks),
        runs=frozenset(runs),
        work=work,
        ends=by_kind[StepRecord],
        loads=by_kind[ExpertLoadRecord],
        applied=by_kind[PlanAppliedRecord],
        refused=by_kind[PlanRefusedRecord],
        exits=by_kind[RankExitRecord],
        probes=by_kind[ProbeRecord],
        pairs=by_kind[PairRecord],
        checkpoints=by_kind[CheckpointRecord],
        snapshots=by_kind[SnapshotRecord],
    )
