"""A job that became slower as a whole: an incident of kind host, of no rank, without a plan."""

from dataclasses import replace

from pacekeeper.controller.api.messages import incident_view, job_view
from pacekeeper.controller.state.events import OfferPlan, SaveIncident
from pacekeeper.core.incidents.findings import CoverageState, FindingKind
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record
from support.machine_driver import QUICK, WARM, Driver, started, step

FAULT = WARM + 8


def slower(number: int, factor: float) -> list[Record]:
    return [
        replace(record, compute_s=record.compute_s * factor)
        if isinstance(record, MicroBatchRecord)
        else record
        for record in step(number)
    ]


def train(driver: Driver, first: int, end: int, factor: float) -> None:
    for number in range(first, end):
        driver.now_s += 0.2
        driver.report(*slower(number, factor))
        assert driver.all_said(OfferPlan) == []


def slow_job() -> Driver:
    driver = started(QUICK)
    train(driver, 0, FAULT, 1.0)
    train(driver, FAULT, FAULT + 12, 1.3)
    return driver


def test_it_is_one_incident_of_no_rank_and_the_watch_is_degraded() -> None:
    driver = slow_job()
    (incident,) = driver.job.open_incidents
    finding = incident.finding
    assert (finding.kind, finding.rank, finding.onset_step) == (FindingKind.HOST, None, FAULT)
    assert 1.28 < finding.slowdown < 1.32
    assert driver.job.detection.evidence.slow == {} and driver.job.layouts.baseline is None
    assert driver.job.coverage.state is CoverageState.DEGRADED
    assert "all ranks together are x1.30 slow" in driver.job.coverage.reason
    assert job_view(driver.state, driver.job).watch == "degraded"
    assert not incident_view(driver.state, incident).HasField("rank")


def test_it_is_closed_when_all_are_back() -> None:
    driver = slow_job()
    train(driver, FAULT + 12, FAULT + 24, 1.0)
    assert driver.job.open_incidents == ()
    (incident,) = driver.job.incidents
    (action,) = incident.actions
    assert action.startswith("all ranks are back at their expected time after")


def test_a_controller_that_starts_again_knows_it() -> None:
    driver = slow_job()
    driver.start_again()
    assert len(driver.job.open_incidents) == 1
    common = driver.job.detection.evidence.common
    assert common is not None and common.is_open


def test_a_larger_one_is_told_again() -> None:
    driver = slow_job()
    train(driver, FAULT + 12, FAULT + 24, 2.0)
    (incident,) = driver.job.open_incidents
    assert 1.95 < incident.finding.slowdown < 2.05
    train(driver, FAULT + 24, FAULT + 25, 2.0)
    assert driver.all_said(SaveIncident) == []
