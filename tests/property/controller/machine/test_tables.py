"""What a rank tells means the same as columns of the wire and as records."""

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.controller.machine.report_parsing import records_by_kind
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.protos import telemetry_pb2
from pacekeeper.protos.convert import reports as wire
from support.machine_driver import JOB, Driver, started, step


def over_the_wire(part: JobReport) -> JobReport:
    """As the controller reads it."""
    message = wire.report_to_message(NodeReport(sequence=1, sent_mono_s=0.0, jobs=(part,)))
    parts = telemetry_pb2.NodeReportParts.FromString(message.SerializeToString())
    (read,) = wire.report_from_parts(parts).jobs
    return read


def some_steps(dice: Random) -> list[list[Record]]:
    """Reports of four ranks and one that nobody knows: steps whole, in parts, again and anew."""
    told: list[Record] = []
    for number in range(dice.randrange(1, 5)):
        generation = dice.choice([1, 1, 1, 2])
        for record in step(number):
            if dice.random() < 0.1:
                continue  # lost
            if isinstance(record, MicroBatchRecord | StepRecord):
                record = replace(record, generation=generation)
            told += [record] * dice.choice([1, 1, 1, 2])
            if isinstance(record, MicroBatchRecord):
                more = replace(record, micro_batch=1, rank=dice.choice([record.rank, 7]))
                told.append(replace(more, compute_s=dice.uniform(0.0, 0.2)))
    reports: list[list[Record]] = [[]]
    for record in told:
        if dice.random() < 0.2:
            reports.append([])
        reports[-1].append(record)
    return [report for report in reports if report]


@given(seed=st.integers(0, 10_000))
def test_columns_and_records_lead_the_machine_to_the_same_state(seed: int) -> None:
    by_records, by_tables = started(), started()
    for records in some_steps(Random(seed)):
        part = JobReport(job=JOB, records=tuple(records))
        said = []
        for driver, told in ((by_records, part), (by_tables, over_the_wire(part))):
            assert told.micro_batches or driver is by_records or not _work(records)
            driver.take(told)
            said.append(list(map(repr, driver.said)))
        assert said[0] == said[1]
    one, other = by_records.job, by_tables.job
    assert (one.progress.step, one.ranks, one.workload.loads) == (
        other.progress.step,
        other.ranks,
        other.workload.loads,
    )
    assert (one.workload.tokens_per_step, one.heard_s) == (
        other.workload.tokens_per_step,
        other.heard_s,
    )
    assert _drafts(by_records) == _drafts(by_tables)


@given(seed=st.integers(0, 10_000))
def test_who_told_anything_is_known_by_kind(seed: int) -> None:
    for records in some_steps(Random(seed)):
        told = records_by_kind(over_the_wire(JobReport(job=JOB, records=tuple(records))))
        assert told.ranks == {record.rank for record in records}
        runs = {
            (record.rank, record.generation)
            for record in records
            if isinstance(record, MicroBatchRecord | StepRecord)
        }
        assert told.runs >= runs
        assert [r for t in told.work for r in t.records()] == _work(records)
        assert told.ends == [record for record in records if isinstance(record, StepRecord)]


def test_work_may_come_as_both_in_one_report() -> None:
    records = step(0)
    work = _work(records)
    driver = started()
    driver.take(
        JobReport(
            job=JOB,
            records=tuple(record for record in records if record not in work[1:]),
            micro_batches=(table_from_records(work[1:]),),
        )
    )
    assert driver.job.progress.step == 0


def _work(records: list[Record]) -> list[MicroBatchRecord]:
    return [record for record in records if isinstance(record, MicroBatchRecord)]


def _drafts(driver: Driver) -> object:
    return {
        step: (
            dict(draft.num_rows),
            dict(draft.ends),
            {rank: draft.work_of(rank) for rank in range(8)},
        )
        for step, draft in driver.job.progress.pending.items()
    }
