"""What people order holds until they take it back: cordons, pauses, a dry run."""

from dataclasses import replace

import pytest

from pacekeeper.controller.api.messages import job_view, node_views
from pacekeeper.controller.mitigation import overrides
from pacekeeper.controller.policy.inputs import snapshot_of
from pacekeeper.controller.state.events import (
    DeleteOrder,
    OfferPlan,
    OrderGiven,
    RequestDecision,
    SaveOrder,
    SaveProposal,
)
from pacekeeper.controller.storage.restore import job_record, restored
from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.incidents.operator_orders import OrderKind, parse_rank_subject
from pacekeeper.core.incidents.proposals import ProposalState
from support.machine_driver import JOB, QUICK, UNIX_OFFSET_S, WARM, Driver, applied, started, train
from support.proposed import asking


def say(driver: Driver, kind: OrderKind, subject: str, *, is_on: bool = True) -> None:
    driver.event(OrderGiven(kind=kind, subject=subject, is_on=is_on, operator="ada", reason="new"))


def slow_job(driver: Driver, *, until: int = WARM + 12) -> None:
    train(driver, driver.job.progress.step + 1, until, slow=2)


def running() -> Driver:
    driver = started(QUICK)
    train(driver, 0, WARM)
    return driver


def test_a_paused_job_has_findings_and_no_plans() -> None:
    driver = running()
    say(driver, OrderKind.PAUSE, JOB)
    slow_job(driver)
    assert [i.finding.rank for i in driver.job.open_incidents] == [2]
    assert driver.job.plan.desired is None
    decision = driver.job.plan.last_decision
    assert decision is None or decision.level is MitigationLevel.NOTHING
    say(driver, OrderKind.PAUSE, JOB, is_on=False)
    driver.tick()
    assert driver.job.plan.desired is not None, "resumed, it is decided at once"


def test_an_offer_and_a_question_under_way_end_with_the_pause() -> None:
    driver = running()
    slow_job(driver)
    assert driver.job.plan.desired is not None
    say(driver, OrderKind.PAUSE, JOB)
    assert driver.job.plan.desired is None
    assert "given up: paused by ada: new" in driver.texts
    driver.tick(2.0)
    assert not driver.all_said(OfferPlan)


def test_a_decision_that_comes_after_the_pause_is_dropped() -> None:
    driver = running()
    driver.is_deciding = False
    train(driver, WARM, WARM + 12, slow=2)
    question = RequestDecision(
        job=JOB, asked=driver.job.plan.asked, view=snapshot_of(driver.job, driver.now_s, {})
    )
    assert driver.job.plan.asked, "one is being made"
    say(driver, OrderKind.PAUSE, JOB)
    driver.answer(question)
    assert driver.job.plan.desired is None


def test_a_proposal_that_waits_is_stale_once_its_job_is_paused() -> None:
    driver = asking()
    say(driver, OrderKind.PAUSE, JOB)
    (saved,) = driver.all_said(SaveProposal)
    assert (saved.proposal.answer, saved.proposal.note) == (
        ProposalState.STALE,
        "paused by ada: new",
    )


def test_in_a_dry_run_plans_are_made_and_told_and_none_is_offered() -> None:
    driver = running()
    say(driver, OrderKind.DRY_RUN, "")
    slow_job(driver)
    decision = driver.job.plan.last_decision
    assert decision is not None and decision.layout is not None
    assert driver.job.plan.desired is None
    say(driver, OrderKind.DRY_RUN, "", is_on=False)
    driver.tick()
    assert driver.job.plan.desired is not None


def test_a_dry_run_takes_back_what_is_on_its_way() -> None:
    driver = running()
    slow_job(driver)
    assert driver.job.plan.desired is not None
    say(driver, OrderKind.DRY_RUN, "")
    assert driver.job.plan.desired is None and "given up: dry run by ada: new" in driver.texts


def test_an_order_is_stored_once_and_dropped_once() -> None:
    driver = running()
    say(driver, OrderKind.CORDON_NODE, "node-1")
    assert [c.order.subject for c in driver.all_said(SaveOrder)] == ["node-1"]
    (order,) = driver.state.orders
    assert (order.operator, order.reason) == ("ada", "new")
    assert order.since_unix_s == driver.now_s + UNIX_OFFSET_S
    say(driver, OrderKind.CORDON_NODE, "node-1")
    assert not driver.said, "the same again changes nothing"
    say(driver, OrderKind.CORDON_NODE, "node-1", is_on=False)
    assert [c.subject for c in driver.all_said(DeleteOrder)] == ["node-1"]
    assert not driver.state.orders and not driver.job.cordoned
    say(driver, OrderKind.CORDON_NODE, "node-1", is_on=False)
    assert not driver.said


def test_orders_outlive_a_restart() -> None:
    driver = running()
    for kind, subject in (
        (OrderKind.PAUSE, JOB),
        (OrderKind.CORDON_RANK, f"{JOB}/3"),
        (OrderKind.CORDON_NODE, "node-0"),
    ):
        say(driver, kind, subject)
    state = restored(
        [job_record(driver.state, JOB)],
        (),
        next_incident_id=1,
        unix_offset_s=UNIX_OFFSET_S,
        standing=driver.state.orders,
    )
    assert state.orders == driver.state.orders
    driver.state = state
    assert driver.job.layouts.current is not None
    driver.attach_again(driver.job.layouts.current)
    assert overrides.with_cordons(driver.state, driver.job).cordoned == {0, 1, 3}
    order = overrides.pause_order(driver.state, JOB)
    assert order is not None and (order.operator, order.reason) == ("ada", "new")


@pytest.mark.parametrize(
    ("kind", "subject", "named"),
    [
        (OrderKind.CORDON_NODE, "node-9", ("node-9", "node-0", "node-1")),
        (OrderKind.CORDON_RANK, "moe/9", ("moe", "9")),
        (OrderKind.CORDON_RANK, "nope/1", ("nope/1", "JOB/RANK", "moe")),
        (OrderKind.CORDON_RANK, "moe", ("'moe'", "JOB/RANK")),
        (OrderKind.PAUSE, "nope", ("nope", "moe")),
        (OrderKind.DRY_RUN, "moe", ("subject",)),
    ],
)
def test_an_order_of_what_is_not_there_is_refused_and_says_what_is(
    kind: OrderKind, subject: str, named: tuple[str, ...]
) -> None:
    driver = running()
    why = overrides.subject_error(driver.state, kind, subject)
    assert why is not None and all(name in why for name in named)
    say(driver, kind, subject)
    assert not driver.state.orders and not driver.said


@pytest.mark.parametrize(
    ("subject", "named"),
    [
        ("moe/3", ("moe", 3)),
        ("a/b/3", ("a/b", 3)),
        ("moe", None),
        ("/3", None),
        ("moe/x", None),
        ("moe/-1", None),
        ("moe/" + "9" * 40, None),
    ],
)
def test_a_rank_is_named_by_its_job_and_number(subject: str, named: tuple[str, int] | None) -> None:
    assert parse_rank_subject(subject) == named


def test_a_rank_cordon_is_of_this_life_of_the_job() -> None:
    driver = running()
    say(driver, OrderKind.CORDON_RANK, f"{JOB}/3")
    assert overrides.with_cordons(driver.state, driver.job).cordoned == {3}
    later = replace(driver.job, run_id=driver.job.run_id + 1)
    assert overrides.with_cordons(driver.state, later).cordoned == frozenset()
    assert not overrides.orders_of_job(driver.state, later)


def test_orders_are_seen_in_the_status() -> None:
    driver = running()
    say(driver, OrderKind.CORDON_NODE, "node-1")
    say(driver, OrderKind.PAUSE, JOB)
    job = job_view(driver.state, driver.job)
    assert [(o.kind, o.subject) for o in job.orders] == [("cordon_node", "node-1"), ("pause", JOB)]
    assert [r.rank for r in job.ranks if r.is_cordoned] == [2, 3]
    nodes = {view.name: view for view in node_views(driver.state, driver.state.nodes.values())}
    assert nodes["node-1"].cordon.operator == "ada"
    assert not nodes["node-0"].HasField("cordon")


def test_a_cordoned_rank_is_left_out_and_comes_back() -> None:
    driver = running()
    say(driver, OrderKind.CORDON_RANK, f"{JOB}/3")
    driver.tick()
    plan = driver.job.plan.desired
    assert plan is not None and plan.standing_by == (3,) and plan.ranks == (0, 1, 2, 3)
    assert driver.job.plan.last_decision is not None
    assert driver.job.plan.last_decision.reason.startswith(
        "ranks 3 are cordoned: without them a step"
    )
    first = driver.job.layouts.current
    driver.report(*applied(plan))
    assert driver.job.layouts.current == plan
    train(
        driver,
        driver.job.progress.step + 1,
        driver.job.progress.step + 12,
        generation=plan.generation,
    )
    driver.tick()
    assert driver.job.layouts.current == plan and driver.job.plan.desired is None, "it stays so"
    say(driver, OrderKind.CORDON_RANK, f"{JOB}/3", is_on=False)
    driver.tick()
    baseline = driver.job.plan.desired
    assert baseline is not None and first is not None and baseline.standing_by == ()
    assert (baseline.pipelines, baseline.experts) == (first.pipelines, first.experts)
