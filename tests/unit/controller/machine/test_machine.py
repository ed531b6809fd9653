"""One job's trouble is its own: what else a report holds is taken in, and ends come first."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper.controller.detection import peer_groups
from pacekeeper.controller.machine import job_lifecycle
from pacekeeper.controller.state.events import Failed, NodeReported
from pacekeeper.core.incidents.findings import Blindness, CoverageState
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record
from support.machine_driver import (
    JOB,
    QUICK,
    WARM,
    Driver,
    attachment,
    exited,
    started,
    step,
    train,
)

OTHER = "other"


def without_times(number: int, ranks: Collection[int] = range(4)) -> list[Record]:
    """A step in which these ranks measured nothing."""
    return [
        replace(r, compute_s=0.0) if isinstance(r, MicroBatchRecord) and r.rank in ranks else r
        for r in step(number)
    ]


def report_both(driver: Driver, *records: Record) -> None:
    """One look of one agent: rank 0 of another job attaches, then what JOB has to say, then an
    end in the other job."""
    other = replace(attachment(0), job=OTHER)
    parts = (
        JobReport(job=OTHER, attached=(other,)),
        JobReport(job=JOB, records=records),
        JobReport(job=OTHER, records=(exited(0),)),
    )
    whole = NodeReport(sequence=1, sent_mono_s=driver.now_s, jobs=parts)
    driver.event(NodeReported(node="node-0", agent_incarnation="a", report=whole))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector breaks on steps of JOB."""

    def broken(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(peer_groups, "update_evidence", broken)


@pytest.mark.usefixtures("failing")
def test_a_job_that_can_not_be_judged_keeps_its_ends_and_the_other_jobs_theirs() -> None:
    driver = started(QUICK)
    report_both(driver, *step(0), exited(1))
    assert driver.job.dead == (1,)
    assert driver.state.jobs[OTHER].dead == (0,)
    (told,) = driver.all_said(Failed)
    assert told.what == f"job={JOB} judging its steps failed"
    assert isinstance(told.error, KeyError)


@pytest.mark.usefixtures("failing")
def test_such_a_job_is_blind_and_says_why() -> None:
    driver = started(QUICK)
    driver.report(*step(0))
    driver.tick()
    assert (driver.job.coverage.state, driver.job.coverage.blind) == (
        CoverageState.BLIND,
        Blindness.FAILED,
    )
    assert "judging its steps failed" in driver.job.coverage.reason
    assert not driver.job.progress.pending, "the next report need not fail on the same step"


def test_it_sees_again_with_the_first_step_that_can_be_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = started(QUICK)
    train(driver, 0, WARM + 10)
    with monkeypatch.context() as patch:
        patch.setattr(peer_groups, "update_evidence", lambda *_: 1 // 0)
        driver.report(*step(WARM + 10))
        assert driver.job.coverage.state is CoverageState.BLIND
    driver.report(*step(WARM + 11))
    assert (driver.job.coverage.state, driver.job.coverage.blind) == (CoverageState.HEALTHY, None)


def test_a_job_that_fails_on_a_tick_does_not_silence_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = started(QUICK)
    report_both(driver)
    real = job_lifecycle.update_lifecycle

    def broken(job: Any, now_s: float, unix_s: float) -> Any:
        if job.name == JOB:
            raise KeyError("a bug")
        return real(job, now_s, unix_s)

    monkeypatch.setattr(job_lifecycle, "update_lifecycle", broken)
    driver.tick()
    assert driver.state.jobs[OTHER].coverage.state is CoverageState.ENDED
    assert [told.what for told in driver.all_said(Failed)] == [
        f"job={JOB} updating it on a tick failed"
    ]


def test_a_job_whose_ranks_measure_no_time_is_judged_as_a_whole_and_fails_nowhere() -> None:
    driver = started(QUICK)
    for number in range(WARM + 10):
        driver.now_s += 0.2
        driver.report(*without_times(number))
        assert not driver.all_said(Failed)
    assert (driver.job.coverage.state, driver.job.coverage.blind) == (CoverageState.MEASURING, None)
    assert f"{WARM + 10} of 60 step times" in driver.job.coverage.reason
    assert driver.job.progress.step == WARM + 9


def test_a_rank_that_measures_no_time_leaves_the_others_judged() -> None:
    driver = started(QUICK)
    for number in range(WARM + 4):
        driver.now_s += 0.2
        driver.report(*without_times(number, ranks=(3,)))
    assert (driver.job.coverage.state, driver.job.coverage.blind) == (
        CoverageState.BLIND,
        Blindness.NO_TIMES,
    )
    assert driver.job.coverage.reason == "ranks 3 report no compute time for their work"
    assert driver.job.detection.measured.of(2).slowdown == pytest.approx(1.0, abs=0.05)
    assert driver.job.detection.measured.of(3).slowdown is None, (
        "what was not measured is not shown"
    )
