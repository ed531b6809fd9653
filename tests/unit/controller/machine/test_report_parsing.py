"""Reports of many nodes at once: joined where they tell the same kind of news, never reordered."""

from dataclasses import replace

from pacekeeper.controller.machine.report_parsing import by_job, merge_reports
from pacekeeper.controller.state.events import (
    NodeDetached,
    NodeReported,
    NodesReported,
    Tick,
)
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import (
    MicroBatchRecord,
    PlanAppliedRecord,
    RankExitRecord,
    Record,
    StepRecord,
)


def ended(rank: int, step: int = 0) -> StepRecord:
    return StepRecord(rank=rank, step=step, generation=1, duration_s=1.0, tokens=1)


def told(node: str, *jobs: JobReport) -> NodeReported:
    report = NodeReport(sequence=1, sent_mono_s=0.0, jobs=jobs)
    return NodeReported(node=node, agent_incarnation="x", report=report)


def part(*records: Record, job: str = "a", run_id: int = 1) -> JobReport:
    return JobReport(job=job, run_id=run_id, records=records)


def test_work_of_one_job_becomes_one_part_in_the_order_it_came() -> None:
    events = [
        told("n", part(ended(0))),
        told("m", part(ended(8), ended(9))),
        told("n", part(ended(0, 1))),
    ]
    assert list(by_job(events)) == [("n", part(ended(0), ended(8), ended(9), ended(0, 1)))]


def test_work_in_tables_is_joined_as_well() -> None:
    first, second = (
        table_from_records([MicroBatchRecord(
            rank=rank, step=0, micro_batch=0, generation=1, compute_s=0.1, tokens=1
        )])
        for rank in (0, 8)
    )  # fmt: skip
    events = [
        told("n", replace(part(), micro_batches=(first,))),
        told("m", replace(part(ended(8)), micro_batches=(second,))),
    ]
    joined = replace(part(ended(8)), micro_batches=(first, second))
    assert list(by_job(events)) == [("n", joined)]


def test_jobs_lie_one_after_the_other() -> None:
    events = [told("n", part(ended(0)), part(ended(0), job="b")), told("m", part(ended(8)))]
    assert list(by_job(events)) == [
        ("n", part(ended(0), ended(8))),
        ("n", part(ended(0), job="b")),
    ]


def test_what_is_more_than_work_stays_by_itself_at_its_place() -> None:
    end = RankExitRecord(rank=8, pid=1, exit_code=1, signal=0)
    plan = PlanAppliedRecord(
        rank=0, step=0, generation=2, previous_generation=1, duration_s=0.0, moved_bytes=0,
        is_regroup=False, layout_crc=1,
    )  # fmt: skip
    events = [
        told("n", part(ended(0))),
        told("m", part(end)),
        told("n", part(ended(1)), part(plan)),
        told("m", part(ended(2))),
    ]
    assert list(by_job(events)) == [
        ("n", part(ended(0))),
        ("m", part(end)),
        ("n", part(ended(1))),
        ("n", part(plan)),
        ("m", part(ended(2))),
    ]


def test_lives_of_a_job_are_never_mixed() -> None:
    parts = (part(ended(0)), part(ended(8), run_id=2), part(ended(0)))
    events = [told("n", one) for one in parts]
    assert [report.run_id for _, report in by_job(events)] == [1, 2, 1]


def test_a_quiet_report_has_no_part() -> None:
    assert list(by_job([told("n")])) == []


def test_only_reports_that_follow_each_other_are_taken_in_together() -> None:
    gone = NodeDetached(node="n", agent_incarnation="x")
    first, second, third = told("n"), told("m"), told("n")
    assert list(merge_reports([first, second, gone, third, Tick()])) == [
        NodesReported(reports=(first, second)),
        gone,
        NodesReported(reports=(third,)),
        Tick(),
    ]
