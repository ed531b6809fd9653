"""The controller's machine and the decisions it asks for: what they are worth when they come."""

from dataclasses import replace

import pytest

from pacekeeper.controller.machine.machine import DECIDE_WITHIN_S
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.inputs import snapshot_of
from pacekeeper.controller.state.events import (
    DecisionMade,
    NodeDetached,
    OfferPlan,
    RequestDecision,
    SaveDecision,
)
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Decision, Exposure, FindingKind, MitigationLevel
from pacekeeper.core.layout.resize.shrink import shrink
from support.machine_driver import (
    FIRST,
    FLOOR,
    JOB,
    NODE_OF,
    QUICK,
    WARM,
    Driver,
    applied,
    attachment,
    exited,
    started,
    step,
    train,
)


def asking() -> tuple[Driver, RequestDecision]:
    """Rank 2 was found slow, and the decision on it is asked for."""
    driver = started(QUICK)
    train(driver, 0, WARM)
    driver.is_deciding = False
    while not driver.job.open_incidents:
        driver.report(*step(driver.job.progress.step + 1, slow=2))
        if not driver.job.open_incidents:
            for question in driver.all_said(RequestDecision):
                driver.answer(question)
    (question,) = driver.all_said(RequestDecision)
    assert question.view.slow
    return driver, question


def assert_dropped(driver: Driver, question: RequestDecision) -> None:
    driver.answer(question)
    assert driver.job.plan.desired is None or driver.job.plan.desired.generation != 2
    assert not driver.all_said(SaveDecision)
    assert not driver.all_said(OfferPlan)


def test_a_decision_is_acted_on_when_it_comes_not_before() -> None:
    driver, question = asking()
    assert (question.view.layout, question.view.next_generation) == (FIRST, 2)
    assert question.view.node_of == NODE_OF
    assert driver.job.plan.desired is None
    driver.answer(question)
    (offer,) = driver.all_said(OfferPlan)
    assert (offer.layout.generation, offer.base_generation) == (2, 1)
    driver.answer(question)  # said twice
    assert driver.said == ()


def test_a_decision_knows_the_racks_that_were_told_last() -> None:
    driver, question = asking()
    assert question.view.rack_of == {}
    driver.agent("node-0", rack="r0")
    assert snapshot_of(driver.job, 0.0, driver.state.nodes).rack_of == {0: "r0", 1: "r0"}
    driver.agent("node-1", rack="r1")
    driver.agent("node-0", rack="r2")
    told = {0: "r2", 1: "r2", 2: "r1", 3: "r1"}
    assert snapshot_of(driver.job, 0.0, driver.state.nodes).rack_of == told
    driver.event(NodeDetached(node="node-1", agent_incarnation="a"))
    assert snapshot_of(driver.job, 0.0, driver.state.nodes).rack_of == told, "it has not moved"


def test_while_one_is_made_steps_are_judged_and_no_other_is_asked_for() -> None:
    driver, question = asking()
    before = driver.job.progress.step
    for number in range(before + 1, before + 6):
        driver.report(*step(number, slow=2))
        assert not driver.all_said(RequestDecision)
        driver.tick()
        assert not driver.all_said(RequestDecision)
    assert driver.job.progress.step == before + 5
    if driver.job.detection.evidence.slow == question.view.slow:
        driver.answer(question)
        assert driver.all_said(OfferPlan), "steps alone do not make it worthless"


def test_a_decision_for_a_layout_that_is_gone_is_dropped_and_asked_for_anew() -> None:
    driver, question = asking()
    theirs = replace(FIRST, generation=2)
    driver.report(*applied(theirs), layouts=[theirs])
    assert driver.job.layouts.current == theirs
    driver.answer(question)
    assert not driver.all_said(OfferPlan)
    assert "decision dropped" in driver.texts
    driver.is_deciding = True
    while driver.job.plan.desired is None:
        driver.report(*step(driver.job.progress.step + 1, generation=2, slow=2))
        assert driver.job.progress.step < 60, "nobody asks again"
    assert driver.job.plan.desired.generation == 3


def test_a_decision_whose_number_survivors_took_is_dropped() -> None:
    driver, question = asking()
    driver.report(layouts=[replace(FIRST, generation=2)])  # written, and run by nobody yet
    assert_dropped(driver, question)
    assert driver.job.layouts.newest_generation == 2


def test_a_decision_that_uses_a_dead_rank_is_dropped() -> None:
    driver, question = asking()
    driver.report(exited(0))
    assert_dropped(driver, question)


def test_a_decision_on_a_rank_that_is_well_again_is_dropped() -> None:
    driver, question = asking()
    while driver.job.detection.evidence.slow:
        driver.report(*step(driver.job.progress.step + 1))
        assert driver.job.progress.step < 60, "it never recovers"
    assert_dropped(driver, question)
    kinds = [(i.finding.kind, i.is_open) for i in driver.job.incidents]
    assert kinds == [(FindingKind.DEVICE, False)]


def test_a_decision_for_an_earlier_life_of_the_job_is_dropped() -> None:
    driver, question = asking()
    driver.report(attached=[attachment(rank, pid=900 + rank) for rank in range(4)])
    driver.report(*applied(FIRST), layouts=[FIRST])
    assert driver.job.layouts.current == FIRST
    assert_dropped(driver, question)
    assert driver.said == ()


def test_a_decision_for_a_job_nobody_knows_changes_nothing() -> None:
    driver, _ = asking()
    before = driver.state
    driver.event(DecisionMade(job="other", asked=1, decision=None))
    assert (driver.state, driver.said) == (before, ())


def test_where_none_could_be_made_the_next_facts_are_decided_on() -> None:
    driver, question = asking()
    driver.event(DecisionMade(job=JOB, asked=question.asked, decision=None))
    assert driver.said == ()
    driver.tick()
    assert not driver.all_said(RequestDecision), "the same question would fail again"
    driver.report(*step(driver.job.progress.step + 1, slow=2))
    assert driver.all_said(RequestDecision)


def test_an_answer_that_never_comes_is_not_waited_for() -> None:
    driver, question = asking()
    driver.tick(DECIDE_WITHIN_S + 1.0)
    assert "no decision for 120 s" in driver.texts
    driver.report(*step(driver.job.progress.step + 1, slow=2))
    (again,) = driver.all_said(RequestDecision)
    assert again.asked > question.asked
    driver.answer(question)
    assert driver.said == (), "too late"
    driver.answer(again)
    assert driver.all_said(OfferPlan)


@pytest.mark.parametrize("dead", [1, 3])
def test_survivors_are_decided_for_though_a_decision_was_under_way(dead: int) -> None:
    driver, question = asking()
    survivors = shrink(FIRST, dead=[dead], generation=2, floor=FLOOR)
    driver.report(exited(dead), *applied(survivors), layouts=[survivors])
    driver.answer(question)
    driver.is_deciding = True
    config = replace(QUICK, policy=PolicyConfig(min_steps_between_plans=1))
    driver.config = config
    for number in range(driver.job.progress.step + 1, driver.job.progress.step + 12):
        driver.report(*step(number, ranks=survivors.ranks, generation=2, slow=2))
        if driver.job.plan.desired is not None:
            break
    assert driver.job.plan.desired is not None
    assert driver.job.plan.desired.ranks == survivors.ranks


ALONE = Exposure(num_nodes=1, min_nodes=2)
LESS = Exposure(num_experts=3, required="2 nodes")


def answered(driver: Driver, decision: Decision) -> str:
    """What the log says when the next question is answered so."""
    while not (questions := driver.all_said(RequestDecision)):
        driver.report(*step(driver.job.progress.step + 1, slow=2))
    driver.event(DecisionMade(job=JOB, asked=questions[-1].asked, decision=decision))
    return driver.texts


def nothing(exposure: Exposure | None) -> Decision:
    return Decision(
        level=MitigationLevel.NOTHING, layout=None, reason="it would not pay", exposure=exposure
    )


def test_what_stands_exposed_is_said_with_the_first_decision_and_when_it_changes() -> None:
    driver, _ = asking()
    assert answered(driver, nothing(ALONE)).endswith(f"it would not pay{ALONE.text}")
    assert answered(driver, nothing(ALONE)) == "", "nothing of it is news"
    assert driver.job.plan.last_decision is not None
    assert driver.job.plan.last_decision.reason == "it would not pay"
    assert driver.job.plan.last_decision.text.endswith(ALONE.text), "who asks is told what stands"
    assert answered(driver, nothing(None)) == "", "nobody looked: it is as it was"
    assert answered(driver, nothing(ALONE)) == ""
    assert answered(driver, nothing(LESS)).endswith(f"it would not pay{LESS.text}")


def test_a_plan_says_what_it_leaves_exposed_only_where_that_is_news() -> None:
    driver, question = asking()
    decided = decide(question.view, driver.config.policy)
    before = replace(driver.job, plan=replace(driver.job.plan, last_decision=nothing(ALONE)))
    driver.state = replace(driver.state, jobs={JOB: before})
    for told in (replace(decided, exposure=ALONE), replace(decided, exposure=LESS)):
        state = driver.state
        driver.event(DecisionMade(job=JOB, asked=question.asked, decision=told))
        (saved,) = driver.all_said(SaveDecision)
        is_news = told.exposure != ALONE
        assert saved.decision.reason == decided.reason + (LESS.text if is_news else "")
        assert driver.job.layouts.offer_reasons[2] == saved.decision.reason
        driver.state = state
