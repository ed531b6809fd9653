"""The controller's machine: what a rank's refusal of a plan changes, and for how long."""

from dataclasses import replace

import pytest

from pacekeeper.controller.state.events import OfferPlan, SaveDecision, SaveIncident
from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.records import PlanRefusedRecord
from support.machine_driver import (
    FIRST,
    FLOOR,
    QUICK,
    Driver,
    applied,
    exited,
    refused,
    step,
    train,
    with_plan,
)

WHY = "no room for 9 rows"


def desired(driver: Driver) -> Layout:
    assert driver.job.plan.desired is not None, "a plan is offered"
    return driver.job.plan.desired


def next_offer(driver: Driver, within_steps: int = 4) -> Layout | None:
    """The plan that is offered in the next steps, a tick in each."""
    for _ in range(within_steps):
        if driver.job.plan.desired is not None:
            break
        driver.tick(0.1)
        train(driver, driver.job.progress.step + 1, driver.job.progress.step + 2, slow=2)
    return driver.job.plan.desired


def bring_to_nothing(driver: Driver) -> list[MitigationLevel]:
    """Refuse whatever is offered until nothing is; the kinds of plan, in order."""
    levels = []
    while (plan := next_offer(driver)) is not None:
        assert driver.job.plan.last_decision is not None
        levels.append(driver.job.plan.last_decision.level)
        driver.report(refused(plan, 3, WHY))
    return levels


def test_a_refused_plan_is_given_up_at_once_with_the_reason_of_the_rank() -> None:
    driver = with_plan()
    driver.report(refused(desired(driver), 3, WHY))
    assert driver.job.plan.desired is None
    said = f"rank 3 refused plan 2: {WHY}; no batch_shares plan for 60 s"
    assert f"plan=2 given up: {said}" in driver.texts
    (stored,) = driver.all_said(SaveDecision)
    assert (stored.decision.level, stored.decision.layout) == (MitigationLevel.NOTHING, None)
    assert stored.decision.reason == f"plan 2 given up: {said}"
    (incident,) = [command.incident for command in driver.all_said(SaveIncident)]
    assert incident.actions[-1] == stored.decision.reason
    assert driver.job.plan.last_decision == stored.decision
    driver.now_s += 1.1
    assert not [o for o in driver.all_said(OfferPlan) if o.layout.generation == 2]


def test_the_next_best_plan_is_offered_instead_and_says_so() -> None:
    driver = with_plan()
    driver.report(refused(desired(driver), 3, WHY))
    plan = next_offer(driver)
    assert plan is not None and plan.generation == 3
    assert driver.job.plan.last_decision is not None
    assert driver.job.plan.last_decision.level is MitigationLevel.TOKEN_SHARES
    assert (
        f"no batch_shares plan for 59.9 s more: rank 3 refused plan 2: {WHY}"
        in (driver.job.layouts.offer_reasons[3])
    )


def test_what_was_refused_waits_twice_as_long_each_time_up_to_an_hour_and_says_so() -> None:
    driver = with_plan()
    plan: Layout | None = desired(driver)
    waits_s = []
    for count in range(1, 9):
        assert plan is not None
        driver.report(refused(plan, 3, WHY))
        refusal = driver.job.plan.refusals[MitigationLevel.BATCH_SHARES]
        assert refusal.count == count
        waits_s.append(refusal.until_s - driver.now_s)
        driver.now_s = max(driver.now_s, refusal.until_s - 2.0)
        assert MitigationLevel.BATCH_SHARES not in bring_to_nothing(driver)
        driver.now_s = refusal.until_s
        was = plan.generation
        plan = next_offer(driver)
        assert plan is not None
        assert (
            f"tried again: rank 3 refused plan {was}"
            in driver.job.layouts.offer_reasons[plan.generation]
        )
    assert waits_s == pytest.approx([60, 120, 240, 480, 960, 1920, 3600, 3600])


def test_a_plan_that_is_taken_ends_the_waits_of_its_kind_only() -> None:
    driver = with_plan()
    driver.report(refused(desired(driver), 3, WHY))
    plan = next_offer(driver)
    assert plan is not None
    driver.report(refused(plan, 3, WHY))
    assert set(driver.job.plan.refusals) == {
        MitigationLevel.BATCH_SHARES,
        MitigationLevel.TOKEN_SHARES,
    }
    driver.now_s = driver.job.plan.refusals[MitigationLevel.BATCH_SHARES].until_s
    again = next_offer(driver)
    assert again is not None
    driver.report(*applied(again))
    assert driver.job.layouts.current == again
    assert set(driver.job.plan.refusals) == {MitigationLevel.TOKEN_SHARES}


def test_survivors_may_be_asked_for_what_was_refused_before() -> None:
    driver = with_plan()
    driver.report(refused(desired(driver), 3, WHY))
    survivors = shrink(FIRST, dead=[1], generation=3, floor=FLOOR)
    driver.report(exited(1), *applied(survivors), layouts=[survivors])
    assert not driver.job.plan.refusals


@pytest.mark.parametrize(
    "change",
    [{"layout_crc": 7}, {"plan_generation": 1}, {"rank": 9}],
    ids=["of another plan of its number", "of another number", "of nobody"],
)
def test_a_refusal_of_something_else_changes_nothing(change: dict[str, int]) -> None:
    driver = with_plan()
    plan = driver.job.plan.desired
    record = refused(desired(driver), 3, WHY)
    assert isinstance(record, PlanRefusedRecord)
    driver.report(replace(record, **change))  # type: ignore[arg-type]
    assert driver.job.plan.desired == plan
    assert not driver.job.plan.refusals


def test_all_ranks_that_refuse_one_plan_are_one_refusal() -> None:
    driver = with_plan()
    plan = desired(driver)
    driver.report(*(refused(plan, rank, WHY) for rank in range(4)))
    driver.report(refused(plan, 0, WHY))
    assert driver.job.plan.refusals[MitigationLevel.BATCH_SHARES].count == 1


def test_the_rank_that_refuses_says_which_generation_it_runs() -> None:
    driver = with_plan(QUICK)
    before = driver.job.ranks[3].observed_generation
    driver.report(refused(desired(driver), 3, WHY), *step(driver.job.progress.step + 1))
    assert driver.job.ranks[3].observed_generation == before == 1
