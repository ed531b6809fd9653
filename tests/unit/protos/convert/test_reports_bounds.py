"""What a report may bring at most: few bytes must not become more values than the memory holds."""

import pytest

from pacekeeper.core.telemetry.records import LOADS_PER_RECORD, MAX_S, PlanRefusedRecord
from pacekeeper.protos import telemetry_pb2
from pacekeeper.protos.convert import reports
from pacekeeper.protos.convert.records import MAX_RECORDS
from pacekeeper.protos.convert.reports import MAX_PARTS
from pacekeeper.protos.convert.samples import MAX_REMARKS


def report(*jobs: telemetry_pb2.JobReport) -> telemetry_pb2.NodeReport:
    return telemetry_pb2.NodeReport(sequence=1, jobs=jobs)


def steps(count: int) -> telemetry_pb2.StepColumns:
    return telemetry_pb2.StepColumns(
        rank=[0] * count, step=[1] * count, generation=[1] * count, tokens=[1] * count,
        duration_s=[0.1] * count,
    )  # fmt: skip


def test_as_many_records_as_may_come_are_taken_and_no_more() -> None:
    whole = telemetry_pb2.JobReport(job="a", steps=steps(MAX_RECORDS))
    assert len(reports.report_from_message(report(whole)).jobs[0].records) == MAX_RECORDS
    more = telemetry_pb2.JobReport(job="a", steps=steps(MAX_RECORDS + 1))
    with pytest.raises(ValueError, match=f"{MAX_RECORDS + 1} records, at most {MAX_RECORDS}"):
        reports.report_from_message(report(more))


def test_jobs_do_not_multiply_what_may_come() -> None:
    half = telemetry_pb2.JobReport(job="a", steps=steps(MAX_RECORDS // 2 + 1))
    with pytest.raises(ValueError, match="records in one report"):
        reports.report_from_message(report(half, half))


@pytest.mark.parametrize("name", ["compute_s", "tensor_share", "stall_s", "wait_s"])
def test_what_would_not_add_up_to_a_finite_number_is_refused(name: str) -> None:
    """A job of which one rank told it was never judged again."""
    work = telemetry_pb2.MicroBatchColumns(
        rank=[0], step=[1], micro_batch=[0], generation=[1], tokens=[1], compute_s=[MAX_S]
    )
    job = telemetry_pb2.JobReport(job="a", micro_batches=work)
    assert reports.report_from_message(report(job)).jobs[0].records
    del getattr(work, name)[:]
    getattr(work, name).append(1e308)
    job = telemetry_pb2.JobReport(job="a", micro_batches=work)
    with pytest.raises(ValueError, match=f"impossible {name} 1e.308"):
        reports.report_from_message(report(job))


def test_a_column_longer_than_the_others_is_not_even_looked_at() -> None:
    job = telemetry_pb2.JobReport(job="a", steps=steps(1))
    job.steps.tokens.extend([1] * MAX_RECORDS)
    with pytest.raises(ValueError, match=f"column tokens has {MAX_RECORDS + 1} entries, not 1"):
        reports.report_from_message(report(job))


def test_more_counts_than_all_records_hold_are_refused() -> None:
    loads = telemetry_pb2.ExpertLoadColumns(
        rank=[0], step=[1], generation=[1], layer=[0], first_expert=[0], num_counts=[1],
        counts=[1] * (LOADS_PER_RECORD * MAX_RECORDS + 1),
    )  # fmt: skip
    with pytest.raises(ValueError, match="counts, at most"):
        reports.report_from_message(report(telemetry_pb2.JobReport(job="a", expert_loads=loads)))


@pytest.mark.parametrize("part", sorted(MAX_PARTS))
def test_empty_parts_cost_bytes_only_up_to_a_number(part: str) -> None:
    """Ten thousand jobs of five bytes held the controller up for half a minute."""
    message = telemetry_pb2.NodeReport(sequence=1)
    for _ in range(MAX_PARTS[part] + 1):
        one = getattr(message, part).add()
        if part == "jobs":
            one.job = "a"
    with pytest.raises(ValueError, match=f"more than {MAX_PARTS[part]} {part}"):
        reports.report_from_message(message)


def test_a_job_name_is_looked_at_before_anything_is_said_of_it() -> None:
    job = telemetry_pb2.JobReport(job="a\nb", steps=steps(1))
    job.steps.tokens.extend([1])
    with pytest.raises(ValueError, match=r"job name 'a\\nb'"):
        reports.report_from_message(report(job))


def test_what_a_node_says_in_words_moves_no_terminals_cursor() -> None:
    """Ranks' users write some of it: reasons, roles, names of files and devices."""
    evil = "x\x1b[2J\n\x9b31m\u202ey"
    refused = telemetry_pb2.PlanRefusedColumns(
        rank=[0], generation=[1], plan_generation=[2], layout_crc=[0], reason=[evil]
    )
    attached = telemetry_pb2.Attachment(
        job="a", world_size=1, role=evil, device_uuid=evil, clock="wall"
    )
    job = telemetry_pb2.JobReport(job="a", plans_refused=refused, attached=[attached])
    device = telemetry_pb2.DeviceSample(device_uuid=evil, name=evil)
    health = telemetry_pb2.AgentHealth(nvml=evil, unreadable=[evil] * (MAX_REMARKS + 1))
    told = reports.report_from_message(
        telemetry_pb2.NodeReport(sequence=1, jobs=[job], devices=[device], health=health)
    )
    ((record,), (rank,)) = told.jobs[0].records, told.jobs[0].attached
    assert isinstance(record, PlanRefusedRecord)
    words = [record.reason, rank.role, rank.device_uuid, told.devices[0].device_uuid]
    words += [told.devices[0].name or "", told.health.nvml, *told.health.unreadable]
    assert set(words) == {"x [2J  31m y"}
    assert len(told.health.unreadable) == MAX_REMARKS
