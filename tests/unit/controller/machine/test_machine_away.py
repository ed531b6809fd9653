"""Ranks nobody tells of: lost while the controller was down, under another node, never seen."""

import json
import zlib
from dataclasses import replace

import pytest

from pacekeeper.controller.api.messages import job_view
from pacekeeper.controller.state.events import (
    ForgetLayouts,
    NodeAttached,
    NodeDetached,
    OfferPlan,
)
from pacekeeper.core.incidents.findings import CoverageState, FindingKind, MitigationLevel
from pacekeeper.core.incidents.rank_failures import failed_ranks
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import PlanAppliedRecord
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
    with_plan,
)

WITHOUT_NODE_1 = shrink(FIRST, dead=[2, 3], generation=2, floor=FLOOR)


def states(driver: Driver) -> dict[int, str]:
    return {rank.rank: rank.state for rank in job_view(driver.state, driver.job).ranks}


def lost_while_down() -> Driver:
    """Node 1 dies while the controller is down; the others go on and tell it when it is back."""
    driver = started(QUICK)
    train(driver, 0, WARM)
    driver.start_again()
    driver.agent("node-0")
    greeting = [attachment(0), attachment(1)]
    driver.report(*applied(WITHOUT_NODE_1), attached=greeting, layouts=[WITHOUT_NODE_1])
    return driver


def test_a_node_that_was_lost_while_the_controller_was_down_is_buried() -> None:
    driver = lost_while_down()
    assert driver.job.dead == (2, 3)
    (found,) = driver.job.incidents
    assert (found.finding.kind, failed_ranks(found.rank_failures)) == (FindingKind.DEATH, ((2, 3),))
    assert not found.is_open
    assert states(driver) == {0: "alive", 1: "alive", 2: "dead", 3: "dead"}


def test_the_job_ends_with_the_last_of_those_that_went_on() -> None:
    driver = lost_while_down()
    driver.report(exited(0, signal=0), exited(1, signal=0))
    driver.tick()
    assert driver.job.coverage.state is CoverageState.ENDED
    assert driver.job.ended_s == driver.now_s


def test_where_no_rank_is_known_to_run_the_watch_is_blind() -> None:
    driver = started(QUICK)
    train(driver, 0, WARM)
    driver.start_again()
    driver.agent("node-0")
    driver.report(attached=[attachment(0), attachment(1)])
    driver.report(exited(0, signal=0), exited(1, signal=0))
    driver.tick()
    assert driver.job.coverage.state is CoverageState.BLIND
    assert driver.job.coverage.reason == (
        "no rank is known to run; ranks 2 and 3 have not attached"
    )


def test_plans_go_to_the_node_that_an_agent_attached_a_rank_from_last() -> None:
    driver = started(QUICK)
    train(driver, 0, WARM)
    driver.event(NodeDetached(node="node-1", agent_incarnation="a"))
    driver.event(NodeAttached(node="node-b", product_version="1", agent_incarnation="b"))
    driver.report(attached=[attachment(2), attachment(3)], node="node-b")
    train(driver, WARM, WARM + 12, slow=2)
    (offer,) = driver.all_said(OfferPlan)
    assert offer.nodes == ("node-0", "node-b")
    assert driver.job.progress.step >= WARM, "it is the same life of the job"


@pytest.mark.parametrize("has_layout", [True, False])
def test_ranks_that_never_attach_are_named(has_layout: bool) -> None:
    driver = Driver(config=QUICK)
    driver.agent("node-0")
    own = [attachment(0), attachment(1)]
    driver.report(attached=own, layouts=[FIRST] if has_layout else [])
    driver.report(*applied(FIRST, ranks=(0, 1)))
    for number in range(40):
        driver.now_s += 1.0
        driver.report(*step(number, ranks=(0, 1)))
        driver.tick(0.0)
    assert driver.job.coverage.state is CoverageState.BLIND
    assert "ranks 2 and 3 have not attached" in driver.job.coverage.reason
    assert states(driver) == {0: "alive", 1: "alive", 2: "unknown", 3: "unknown"}


def test_a_layout_for_what_is_over_is_still_one_after_a_restart() -> None:
    driver = started(QUICK)
    survivors = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
    driver.report(exited(1))
    driver.report(*applied(survivors), layouts=[survivors])
    assert driver.job.layouts.is_provisional
    driver.start_again()
    assert driver.job.layouts.is_provisional


@pytest.mark.parametrize("is_its_own", [True, False])
def test_survivors_of_an_older_version_write_another_text_of_their_layout(is_its_own: bool) -> None:
    driver = started(QUICK)
    survivors = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
    text = json.dumps(json.loads(encode_layout(survivors))).encode()
    crc = zlib.crc32(text if is_its_own else text + b" ")
    told = [one for one in applied(survivors) if isinstance(one, PlanAppliedRecord)]
    records = tuple(replace(one, layout_crc=crc) for one in told)
    driver.report(exited(1))
    driver.take(JobReport(job=JOB, records=records, layouts=((2, text),)))
    assert (driver.job.layouts.current == survivors) == is_its_own


def test_what_each_loss_takes_is_remembered_and_what_a_plan_leaves_out_is_no_loss() -> None:
    driver = started(QUICK)
    assert not driver.job.losses
    first = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
    driver.report(exited(1))
    driver.report(*applied(first), layouts=[first])
    assert [*driver.job.losses] == [1 / 4]
    second = shrink(first, dead=[3], generation=3, floor=FLOOR)
    driver.report(exited(3))
    driver.report(*applied(second), layouts=[second])
    assert [*driver.job.losses] == [1 / 4, 1 / 3]


def test_a_job_that_begins_anew_has_no_layouts_of_before() -> None:
    driver = started(QUICK)
    train(driver, 0, 3)
    driver.report(attached=[attachment(0, pid=900)])
    assert [told.job for told in driver.all_said(ForgetLayouts)] == [driver.job.name]


def test_an_offer_is_given_up_when_nobody_is_slow_any_more() -> None:
    driver = with_plan()
    plan, last = driver.job.plan.desired, driver.job.progress.step
    assert plan is not None
    for number in range(last + 1, last + 20):
        driver.now_s += 0.2
        driver.report(*step(number))
        driver.tick(0.0)
    assert not driver.job.detection.evidence.slow
    assert driver.job.plan.desired is None


def test_a_probe_that_is_not_answered_keeps_no_cheap_plan_waiting() -> None:
    alone = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=1, domain_of=NODE_OF)
    driver = started(QUICK, alone, can_probe=True)
    train(driver, 0, WARM)
    train(driver, WARM, WARM + 20, slow=2)
    assert driver.job.detection.probe is not None, "what is costly is asked about first"
    assert driver.job.plan.last_decision is not None
    assert driver.job.plan.last_decision.level is MitigationLevel.BATCH_SHARES
    plan = driver.job.plan.desired
    assert plan is not None
    driver.report(*applied(plan))
    driver.tick()
    assert driver.job.layouts.current == plan
    assert driver.job.detection.probe is not None, "the same ranks may still answer"
