"""Ranks that all go back to earlier steps are watched from there; told twice changes nothing."""

from collections.abc import Collection
from dataclasses import replace

from pacekeeper.core.incidents.findings import CoverageState
from pacekeeper.core.telemetry.records import Record, StepRecord
from support.machine_driver import QUICK, WARM, Driver, attachment, started, step

LAST = WARM + 8


def ended_at(now_s: float, records: Collection[Record]) -> list[Record]:
    return [replace(r, ended_mono_s=now_s) if isinstance(r, StepRecord) else r for r in records]


def run(
    driver: Driver,
    first: int,
    end: int,
    *,
    slow: int | None = None,
    ranks: Collection[int] = range(4),
) -> None:
    """Steps [first, end), each with the moment of its end."""
    for number in range(first, end):
        driver.now_s += 0.2
        driver.report(*ended_at(driver.now_s, step(number, ranks=ranks, slow=slow)))


def trained() -> Driver:
    driver = started(QUICK)
    run(driver, 0, LAST + 1)
    assert (driver.job.coverage.state, driver.job.progress.step) == (CoverageState.HEALTHY, LAST)
    return driver


def test_ranks_that_go_back_are_judged_from_there_on() -> None:
    driver = trained()
    run(driver, 5, 6)
    assert f"restarted from step 5: its ranks had ended step {LAST}" in driver.texts
    run(driver, 6, 9)
    assert (driver.job.coverage.state, driver.job.progress.step) == (CoverageState.HEALTHY, 8)


def test_a_new_run_with_the_same_pids_and_no_number_is_watched() -> None:
    driver = trained()
    driver.report(attached=[attachment(0), attachment(1)])
    driver.report(attached=[attachment(2), attachment(3)], node="node-1")
    run(driver, 0, 5)
    run(driver, 5, 10, slow=2)
    (incident,) = driver.job.incidents
    assert (incident.finding.rank, incident.is_open) == (2, True)
    assert 4 <= incident.finding.onset_step <= 6, "dated by the new run's steps"


def test_reports_that_come_twice_take_nobody_back() -> None:
    driver = started(QUICK)
    told = []
    for number in range(LAST + 1):
        driver.now_s += 0.2
        told.append(ended_at(driver.now_s, step(number)))
        driver.report(*told[-1])
    for records in told[5:]:
        driver.report(*records)
        assert driver.job.progress.step == LAST
        assert not driver.job.progress.again
        assert "restarted from step" not in driver.texts


def test_one_rank_that_goes_back_takes_nobody_along() -> None:
    driver = trained()
    run(driver, 5, 12, ranks=(0, 1, 2))
    assert driver.job.progress.step == LAST
    assert driver.job.progress.again.keys() == {0, 1, 2}


def test_after_a_restart_the_first_step_heard_of_a_rank_proves_nothing() -> None:
    driver = trained()
    driver.start_again()
    driver.report(attached=[attachment(0), attachment(1)])
    driver.report(attached=[attachment(2), attachment(3)], node="node-1")
    assert driver.job.progress.step == LAST
    run(driver, 5, 6)
    assert driver.job.progress.step == LAST, "it may be an old report that comes again"
    run(driver, 6, 7)
    assert driver.job.progress.step == 6
