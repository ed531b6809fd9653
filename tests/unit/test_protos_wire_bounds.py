"""What a report may bring at most: few bytes must not become more values than the memory holds."""

import pytest

from pacekeeper.core.records import LOADS_PER_RECORD
from pacekeeper.protos import telemetry_pb2, wire
from pacekeeper.protos.wire import MAX_RECORDS


def report(*jobs: telemetry_pb2.JobReport) -> telemetry_pb2.NodeReport:
    return telemetry_pb2.NodeReport(sequence=1, jobs=jobs)


def steps(count: int) -> telemetry_pb2.StepColumns:
    return telemetry_pb2.StepColumns(
        rank=[0] * count, step=[1] * count, generation=[1] * count, tokens=[1] * count,
        duration_s=[0.1] * count,
    )  # fmt: skip


def test_as_many_records_as_may_come_are_taken_and_no_more() -> None:
    whole = telemetry_pb2.JobReport(job="a", steps=steps(MAX_RECORDS))
    assert len(wire.report_from_message(report(whole)).jobs[0].records) == MAX_RECORDS
    more = telemetry_pb2.JobReport(job="a", steps=steps(MAX_RECORDS + 1))
    with pytest.raises(ValueError, match=f"{MAX_RECORDS + 1} records, at most {MAX_RECORDS}"):
        wire.report_from_message(report(more))


def test_jobs_do_not_multiply_what_may_come() -> None:
    half = telemetry_pb2.JobReport(job="a", steps=steps(MAX_RECORDS // 2 + 1))
    with pytest.raises(ValueError, match="records in one report"):
        wire.report_from_message(report(half, half))


def test_a_column_longer_than_the_others_is_not_even_looked_at() -> None:
    job = telemetry_pb2.JobReport(job="a", steps=steps(1))
    job.steps.tokens.extend([1] * MAX_RECORDS)
    with pytest.raises(ValueError, match=f"column tokens has {MAX_RECORDS + 1} entries, not 1"):
        wire.report_from_message(report(job))


def test_more_counts_than_all_records_hold_are_refused() -> None:
    loads = telemetry_pb2.ExpertLoadColumns(
        rank=[0], step=[1], generation=[1], layer=[0], first_expert=[0], num_counts=[1],
        counts=[1] * (LOADS_PER_RECORD * MAX_RECORDS + 1),
    )  # fmt: skip
    with pytest.raises(ValueError, match="counts, more than may come at once"):
        wire.report_from_message(report(telemetry_pb2.JobReport(job="a", expert_loads=loads)))
