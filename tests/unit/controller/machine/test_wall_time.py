"""The wall clock is set, or the host was suspended, while a controller runs."""

from dataclasses import replace

import pytest

from pacekeeper.controller.mitigation.approvals import find_proposal
from pacekeeper.controller.observability import alerts
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.events import Log, SaveProposal, Tick
from pacekeeper.core.incidents.proposals import ProposalState
from support.machine_driver import JOB, QUICK, UNIX_OFFSET_S, Driver, started
from support.proposed import STANDS_S, asking, opened
from support.scrapes import value

HOUR_S = 3600.0


def set_by(driver: Driver, by_s: float) -> None:
    driver.event(Tick(unix_offset_s=driver.state.unix_offset_s + by_s))


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
def test_dates_go_by_the_clock_as_it_is_now(by_s: float) -> None:
    driver = started(QUICK)
    set_by(driver, by_s)
    assert driver.state.unix_offset_s == UNIX_OFFSET_S + by_s
    (said,) = driver.all_said(Log)
    assert f"{by_s:+.0f} s" in said.text


def test_drift_moves_no_date_before_it_is_a_second() -> None:
    driver = started(QUICK)
    set_by(driver, 0.9)
    driver.tick()
    assert driver.state.unix_offset_s == UNIX_OFFSET_S and not driver.all_said(Log)


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
def test_a_plan_that_waits_for_a_person_has_the_time_left_that_it_had(by_s: float) -> None:
    driver = asking()
    before = opened(driver)
    driver.now_s += STANDS_S / 2
    set_by(driver, by_s)
    after = opened(driver)
    assert after.expires_unix_s - before.expires_unix_s == by_s
    assert [one.proposal for one in driver.all_said(SaveProposal)] == [after]
    driver.tick(STANDS_S / 4)
    assert opened(driver) == after
    driver.tick(STANDS_S)
    ended = find_proposal(driver.state, before.proposal_id)
    assert ended is not None and ended.answer is ProposalState.EXPIRED


def test_an_offer_is_no_older_for_it() -> None:
    """The rule of PacekeeperPlanStuck compares it with Prometheus's clock."""
    driver = asking()
    driver.hear(1, is_approved=True)
    metrics = ControllerMetrics()

    name = "job_plan_offered_timestamp_seconds"
    metrics.update(driver.state)
    assert value(metrics, name, job_name=JOB) == driver.now_s + UNIX_OFFSET_S
    set_by(driver, HOUR_S)
    metrics.update(driver.state)
    assert value(metrics, name, job_name=JOB) == driver.now_s + UNIX_OFFSET_S + HOUR_S


def test_what_stands_is_told_when_it_has_stood_for_long_enough_whatever_the_clock() -> None:
    driver = asking()
    driver.hear(1, is_approved=True)
    standing, _ = alerts.update_alerts({}, driver.state, driver.now_s, 1.0)
    held = {key for key, one in standing.items() if not one.is_told}
    assert held, "there is something that must hold for a while"
    state = replace(driver.state, unix_offset_s=UNIX_OFFSET_S + HOUR_S)
    after, told = alerts.update_alerts(standing, state, driver.now_s + 1.0, 1.0)
    assert not told and not any(after[key].is_told for key in held)
    _, told = alerts.update_alerts(after, state, driver.now_s + HOUR_S, 1.0)
    assert {one.began_unix_s for one in told} == {driver.now_s + UNIX_OFFSET_S + HOUR_S}
