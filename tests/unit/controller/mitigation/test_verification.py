"""A plan is judged by the steps under it: told, and undone where it brought nothing."""

from dataclasses import replace

import pytest

from pacekeeper.controller.mitigation import migration_costs, verification
from pacekeeper.controller.mitigation.migration_costs import MoveCosts, costs_of
from pacekeeper.controller.policy.inputs import snapshot_of
from pacekeeper.controller.state.events import SaveDecision, SaveIncident
from pacekeeper.controller.state.job_parts import MeasuredMove
from pacekeeper.controller.state.plan_phase import Forecast, InForce, Judged, Rollback, Verdict
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.records import PlanAppliedRecord, Record, StepRecord
from support.job_parts import forecast_of
from support.machine_driver import FIRST, Driver, applied, step, with_plan


def lasting(duration_s: float, records: list[Record]) -> list[Record]:
    """The same step, only its whole time is another."""
    return [
        replace(record, duration_s=duration_s) if isinstance(record, StepRecord) else record
        for record in records
    ]


def under_plan() -> Driver:
    """Rank 2 is slow; a plan for it came into force after some slow steps."""
    driver = with_plan()
    plan = driver.job.plan.desired
    assert plan is not None
    for _ in range(3):
        driver.report(*step(driver.job.progress.step + 1, slow=2))
    assert driver.job.plan.desired == plan, "nobody has taken it yet"
    driver.report(*applied(plan))
    assert driver.job.layouts.current == plan
    return driver


def run(driver: Driver, steps: int, duration_s: float) -> None:
    """Under the layout in force; rank 2 stays as slow as it was."""
    for _ in range(steps):
        assert driver.job.layouts.current is not None
        driver.now_s += 0.2
        records = step(
            driver.job.progress.step + 1, generation=driver.job.layouts.current.generation, slow=2
        )
        driver.report(*lasting(duration_s, records))
        if driver.job.plan.desired is not None:
            return


def test_a_plan_that_brings_what_was_forecast_is_told_on_the_incident() -> None:
    driver = under_plan()
    promise = forecast_of(driver.job)
    assert promise is not None and promise.base == FIRST
    assert promise.before_s >= 0.18 > promise.planned_s  # as measured since the onset
    undone = Rollback(plan=FIRST, measured_s=0.0, planned_s=0.0, count=1, until_s=0.0)
    known = replace(driver.job, plan=replace(driver.job.plan, rollbacks={promise.level: undone}))
    driver.state = replace(driver.state, jobs={**driver.state.jobs, known.name: known})
    run(driver, verification.JUDGED_STEPS - 1, promise.planned_s)
    assert not driver.all_said(SaveIncident)
    run(driver, 1, promise.planned_s)
    current = driver.job.plan.current
    assert isinstance(current, Judged) and current.verdict is Verdict.AS_FORECAST
    assert driver.job.plan.rollbacks == {}, "what a kind brings at last counts"
    (saved,) = driver.all_said(SaveIncident)
    assert saved.incident.actions[-1].startswith("generation 2 brings as forecast: a step takes")
    assert f"without it {promise.before_s * 1e3:.0f}" in driver.texts


def test_a_plan_that_brings_less_stays() -> None:
    driver = under_plan()
    promise = forecast_of(driver.job)
    assert promise is not None
    run(
        driver,
        verification.JUDGED_STEPS,
        promise.before_s - 0.2 * (promise.before_s - promise.planned_s),
    )
    assert "generation 2 brings less than forecast" in driver.texts
    current = driver.job.plan.current
    assert isinstance(current, Judged) and current.verdict is Verdict.LESS
    assert driver.job.plan.desired is None


def test_a_plan_that_brings_nothing_is_undone_and_plans_of_its_kind_wait() -> None:
    driver = under_plan()
    promise = forecast_of(driver.job)
    assert promise is not None
    level = promise.level
    run(driver, verification.JUDGED_STEPS + 3, 0.3)
    assert "generation 2 brings nothing: a step takes 300 ms" in "\n".join(
        action for incident in driver.job.incidents for action in incident.actions
    )
    (stored,) = driver.all_said(SaveDecision)
    assert stored.decision.level is MitigationLevel.ROLL_BACK
    back = driver.job.plan.desired
    assert back == replace(FIRST, generation=3)
    driver.report(*applied(back))
    assert driver.job.layouts.current == back and forecast_of(driver.job) is None
    assert driver.job.layouts.baseline is not None, "the next plan will want a way home"
    run(driver, 8, 0.18)
    assert driver.job.plan.last_decision is not None
    assert driver.job.plan.last_decision.level is not level
    assert f"no {level} plan for" in driver.job.plan.last_decision.reason
    assert "plan 2 was undone: it took a step to 300 ms" in driver.job.plan.last_decision.reason


def test_a_kind_that_is_undone_again_waits_twice_as_long() -> None:
    driver = with_plan()
    forecast = Forecast(
        plan=FIRST, level=MitigationLevel.MOVE_LAYERS, base=FIRST, before_s=1.0, planned_s=0.5,
        slow={},
    )  # fmt: skip
    failed = Judged(forecast=forecast, verdict=Verdict.NOTHING, measured_s=2.0)
    job = replace(driver.job, plan=replace(driver.job.plan, current=failed))
    back = Decision(level=MitigationLevel.ROLL_BACK, layout=FIRST, reason="")
    once = verification.note_rollback(job, back, 100.0)
    assert once.plan.rollbacks[MitigationLevel.MOVE_LAYERS].until_s == 160.0
    again = verification.note_rollback(once, back, 200.0)
    second = again.plan.rollbacks[MitigationLevel.MOVE_LAYERS]
    assert second.until_s == 320.0 and second.count == 2
    other = Decision(level=MitigationLevel.BATCH_SHARES, layout=FIRST, reason="")
    assert verification.note_rollback(job, other, 100.0).plan.rollbacks == {}


def test_where_a_rank_is_slower_by_now_nothing_is_judged() -> None:
    driver = under_plan()
    promise = forecast_of(driver.job)
    assert promise is not None
    for slow in ({2: promise.slow[2] / 1.2}, {}):
        current = InForce(plan=promise.plan, forecast=replace(promise, slow=slow))
        job = replace(driver.job, plan=replace(driver.job.plan, current=current))
        judged, said = verification.judge(job)
        assert isinstance(judged.plan.current, Judged) and not said
        assert judged.plan.current.verdict is Verdict.INCOMPARABLE
        assert judged.plan.failed is None


def test_steps_of_before_the_fault_say_nothing_of_the_job_without_the_plan() -> None:
    job = with_plan().job
    plan, decision = job.plan.desired, job.plan.last_decision
    assert plan is not None and decision is not None
    incidents = tuple(
        replace(i, finding=replace(i.finding, onset_step=job.progress.step - 1))
        for i in job.incidents
    )
    job = replace(
        job,
        incidents=incidents,
        progress=replace(job.progress, recent_step_s=(9.0, 9.0, 9.0, 0.2, 0.25)),
    )
    in_force = verification.in_force(job, plan)
    assert in_force is not None
    promise = in_force.forecast
    assert promise is not None and promise.before_s == 0.25
    gain_s = decision.current_step_s - decision.planned_step_s
    assert promise.planned_s == pytest.approx(0.25 - gain_s)
    assert snapshot_of(job, 0.0, {}).step_s == 0.25
    unmeasured = replace(job, progress=replace(job.progress, recent_step_s=()))
    assert verification.in_force(unmeasured, plan) == InForce(plan=plan, forecast=None)
    assert verification.in_force(job, replace(plan, generation=9)) is None, "not ours"


def told(rank: int, layout: Layout, *, duration_s: float, moved_bytes: int) -> PlanAppliedRecord:
    return PlanAppliedRecord(
        rank=rank, step=0, generation=layout.generation, previous_generation=1,
        duration_s=duration_s, moved_bytes=moved_bytes, is_regroup=False, layout_crc=0,
    )  # fmt: skip


def test_a_move_takes_as_long_as_its_slowest_rank_and_is_counted_once() -> None:
    job = with_plan().job
    plan = replace(FIRST, generation=2)
    records = [
        told(0, plan, duration_s=0.2, moved_bytes=30),
        told(3, plan, duration_s=0.5, moved_bytes=10),
    ]
    taken = migration_costs.record_moves(migration_costs.record_moves(job, records), records[:1])
    assert taken.plan.moves == {
        2: MeasuredMove(ranks=frozenset({0, 3}), duration_s=0.5, total_bytes=40, busiest_bytes=30)
    }
    assert (
        migration_costs.record_moves(job, [*records, records[0]]).plan.moves == taken.plan.moves
    ), "in one report, too"
    regroup = replace(records[0], generation=3, is_regroup=True)
    first = replace(records[0], generation=4, previous_generation=0)
    assert migration_costs.record_moves(taken, [regroup, first]) is taken
    many = [replace(records[0], generation=5 + i) for i in range(40)]
    assert sorted(migration_costs.record_moves(taken, many).plan.moves) == list(range(29, 45))


def test_costs_are_as_measured_and_as_set_until_then() -> None:
    config = PolicyConfig(plan_s=0.1, move_s_per_byte=1e-3)
    still, one = (
        MeasuredMove(duration_s=0.4),
        MeasuredMove(duration_s=2.4, total_bytes=100, busiest_bytes=25),
    )
    assert costs_of([], config) == MoveCosts(
        pause_s=0.1, total_s_per_byte=1e-3, busiest_s_per_byte=1e-3
    )
    assert costs_of([still], config).pause_s == 0.4
    longer = MeasuredMove(duration_s=0.9)  # moves of nothing say nothing of bytes
    measured = costs_of([still, one, longer, still], config)
    assert measured.total_s_per_byte == pytest.approx(0.02)
    assert measured.busiest_s_per_byte == pytest.approx(0.08)
    assert costs_of([one], config).pause_s == 0.1
