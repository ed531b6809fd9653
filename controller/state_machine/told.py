"""What one job's part of a report tells, by kind: who reads it looks at its own only. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable, table_of
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import (
    CheckpointRecord,
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    SnapshotRecord,
    StepRecord,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Within a kind in the order it was told. `ranks`: who told anything, or of whom it was."""

    ranks: frozenset[int]
    runs: frozenset[tuple[int, int]]  # (rank, generation): work and more was told under it
    work: Sequence[MicroBatchTable]
    ends: Sequence[StepRecord]
    loads: Sequence[ExpertLoadRecord]
    applied: Sequence[PlanAppliedRecord]
    refused: Sequence[PlanRefusedRecord]
    exits: Sequence[RankExitRecord]
    probes: Sequence[ProbeRecord]
    checkpoints: Sequence[CheckpointRecord]
    snapshots: Sequence[SnapshotRecord]


def told_by(report: JobReport) -> Told:
    """Its records and tables, sorted once."""
    by_kind: dict[type, list[Any]] = defaultdict(list)
    for record in report.records:
        by_kind[type(record)].append(record)
    single = by_kind[MicroBatchRecord]
    work = (*report.micro_batches, *([table_of(single)] if single else ()))
    runs = {
        (record.rank, record.generation)
        for kind, records in by_kind.items()
        if kind not in (RankExitRecord, PlanAppliedRecord, MicroBatchRecord)
        for record in records
    }.union(*(zip(t.column("rank"), t.column("generation"), strict=True) for t in work))
    ranks = {rank for rank, _ in runs}
    ranks.update(one.rank for kind in (RankExitRecord, PlanAppliedRecord) for one in by_kind[kind])
    return Told(
        ranks=frozenset(ranks),
        runs=frozenset(runs),
        work=work,
        ends=by_kind[StepRecord],
        loads=by_kind[ExpertLoadRecord],
        applied=by_kind[PlanAppliedRecord],
        refused=by_kind[PlanRefusedRecord],
        exits=by_kind[RankExitRecord],
        probes=by_kind[ProbeRecord],
        checkpoints=by_kind[CheckpointRecord],
        snapshots=by_kind[SnapshotRecord],
    )
