"""However often ranks refuse, no kind of plan is offered again before its wait is over."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.mitigation.backoff import FIRST_WAIT_S, LONGEST_WAIT_S
from pacekeeper.core.incidents.findings import MitigationLevel
from support.examples import examples
from support.machine_driver import refused, train, with_plan

moves = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.3, 20.0, 59.0, 61.0, 300.0])),
    min_size=1,
    max_size=24,
)


@settings(max_examples=examples(25), deadline=None)
@given(moves)
def test_no_kind_of_plan_comes_back_before_its_wait_is_over(
    story: list[tuple[bool, float]],
) -> None:
    driver = with_plan()
    free_s: dict[MitigationLevel, float] = {}
    refusals: dict[MitigationLevel, int] = {}
    said = driver.job.plan.desired
    for is_refused, after_s in story:
        plan, decision = driver.job.plan.desired, driver.job.plan.last_decision
        if plan is not None and plan != said:
            assert decision is not None
            assert driver.job.plan.offer is not None
            assert driver.job.plan.offer.offered_s >= free_s.get(decision.level, 0.0)
            said = plan
        if plan is not None and decision is not None and is_refused:
            driver.report(refused(plan, 1, "can not"))
            number = refusals[decision.level] = refusals.get(decision.level, 0) + 1
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1))
            free_s[decision.level] = driver.now_s + wait_s
        driver.tick(after_s)
        train(driver, driver.job.progress.step + 1, driver.job.progress.step + 2, slow=2)
