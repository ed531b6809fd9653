"""New lives: of the job under the same controller, and of the controller under the same job."""

from dataclasses import replace

from pacekeeper.controller.state.events import NotifyDeaths, OfferPlan, SaveJob
from pacekeeper.controller.state.state import RankStatus
from pacekeeper.controller.storage.restore import job_record
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import CoverageState
from pacekeeper.core.layout.resize.shrink import shrink
from support.machine_driver import (
    FIRST,
    FLOOR,
    JOB,
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


def killed_and_started(driver: Driver) -> Driver:
    """Another controller with what this one stored; agents have not come back yet."""
    again = Driver(config=driver.config, state=driver.state, now_s=5.0)
    again.start_again()
    return again


def come_back(driver: Driver) -> None:
    driver.agent("node-0")
    driver.agent("node-1")
    driver.report(attached=[attachment(0), attachment(1)], layouts=[FIRST])
    driver.report(attached=[attachment(2), attachment(3)], node="node-1")


def test_all_ranks_of_a_report_are_taken_in_and_stored_at_once() -> None:
    driver = Driver()
    driver.agent("node-0")
    driver.report(attached=[attachment(rank) for rank in range(4)])
    assert (driver.job.living, driver.job.world_size) == ((0, 1, 2, 3), 4)
    assert len(driver.all_said(SaveJob)) == 1, "one by one, thousands of ranks take seconds"
    driver.report(attached=[attachment(rank) for rank in range(4)])
    assert not driver.all_said(SaveJob), "said again, nothing is new"


def test_other_processes_under_the_same_name_are_a_new_life() -> None:
    driver = started(QUICK)
    train(driver, 0, WARM)
    train(driver, WARM, WARM + 12, slow=2)
    assert driver.job.open_incidents
    driver.report(attached=[attachment(0, pid=1), attachment(1, pid=2)], layouts=[FIRST])
    assert "started anew" in driver.texts
    assert not driver.job.open_incidents
    assert driver.job.incidents[0].actions == ("the job was started anew",)
    assert (driver.job.progress.step, driver.job.layouts.current, driver.job.plan.desired) == (
        -1,
        None,
        None,
    )
    assert driver.job.layouts.newest_generation == 1
    driver.report(attached=[attachment(2, pid=3), attachment(3, pid=4)], node="node-1")
    assert "started anew" not in driver.texts
    driver.report(*applied(FIRST))
    assert driver.job.layouts.current == FIRST
    driver.report(*step(0))
    assert driver.job.progress.step == 0


def test_late_words_of_the_old_life_do_not_end_the_new_one() -> None:
    driver = started()
    driver.report(*step(0))
    driver.report(attached=[attachment(0, pid=1), attachment(1, pid=2)])
    driver.report(*step(1, ranks=[2, 3]), node="node-1")
    assert driver.job.progress.pending == {}
    driver.report(attached=[attachment(2), attachment(3)], node="node-1")  # the old processes
    driver.report(attached=[attachment(2, pid=3), attachment(3, pid=4)], node="node-1")
    assert [driver.job.ranks[rank].attachment.pid for rank in range(4)] == [1, 2, 3, 4]
    driver.report(exited(2))
    assert not driver.job.incidents


def test_a_controller_started_anew_goes_on_where_the_old_one_stopped() -> None:
    before = started(QUICK)
    train(before, 0, WARM)
    train(before, WARM, WARM + 12, slow=2)
    plan = before.job.plan.desired
    assert plan is not None
    before.report(*applied(plan))
    number = before.job.progress.step + 1
    after = killed_and_started(before)
    assert after.job.layouts.current == plan
    assert after.job.layouts.baseline == FIRST
    assert after.job.coverage.state is CoverageState.BLIND
    assert after.state.next_incident_id == 2
    come_back(after)
    # Nobody says again which layout it runs: their steps do.
    after.report(*step(number, generation=2, slow=2))
    assert {rank.observed_generation for rank in after.job.ranks.values()} == {2}
    assert after.job.detection.evidence.slow.keys() == {2}
    for later in range(number + 1, number + 40):
        after.report(*step(later, generation=2))
        if after.job.plan.desired is not None:
            break
    baseline = after.job.plan.desired
    assert baseline is not None
    assert (baseline.generation, baseline.batch_shares) == (3, FIRST.batch_shares)
    assert len(after.job.incidents) == 1


def test_an_offer_taken_while_the_controller_was_away_is_ours() -> None:
    before = started(QUICK)
    train(before, 0, WARM)
    train(before, WARM, WARM + 12, slow=2)
    plan = before.job.plan.desired
    assert plan is not None
    after = killed_and_started(before)
    come_back(after)
    after.report(*applied(plan))
    assert after.job.layouts.current == plan
    assert "offered before a restart" in after.job.layouts.reason
    assert after.job.layouts.newest_generation == 2


def test_the_dead_stay_dead_over_a_restart() -> None:
    before = started()
    before.report(*step(0))
    survivors = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
    before.report(exited(1), *applied(survivors), layouts=[survivors])
    after = killed_and_started(before)
    come_back(after)  # the ring of the dead rank is still there, and so is its attachment
    assert after.job.ranks[1].status is RankStatus.DEAD
    assert after.job.living == (0, 2, 3)
    after.report(*step(1, ranks=[0, 2, 3], generation=2))
    assert after.job.progress.step == 1


def test_a_death_in_mid_regroup_is_still_told_after_a_restart() -> None:
    before = started()
    before.report(exited(1))
    after = killed_and_started(before)
    come_back(after)
    after.tick(1.1)
    assert [c.ranks for c in after.said if hasattr(c, "ranks")] == [(1,)]
    survivors = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
    after.report(*applied(survivors), layouts=[survivors])
    assert not after.job.open_incidents


def test_a_job_started_anew_while_the_controller_was_away_is_a_new_life() -> None:
    before = started()
    before.report(*step(0))
    newer = replace(FIRST, generation=5)
    before.report(*applied(newer), layouts=[newer])
    after = killed_and_started(before)
    after.agent("node-0")
    after.report(attached=[attachment(0, pid=1), attachment(1, pid=2)], layouts=[FIRST])
    assert "started anew" in after.texts
    after.report(attached=[attachment(2, pid=3), attachment(3, pid=4)], node="node-1")
    after.report(*applied(FIRST))
    assert after.job.layouts.current == FIRST
    assert after.job.layouts.newest_generation == 1


def test_what_is_stored_of_ranks_not_yet_back_is_stored_again() -> None:
    before = started()
    before.report(exited(1))
    after = killed_and_started(before)
    assert job_record(after.state, JOB).ranks == job_record(before.state, JOB).ranks


def launched(driver: Driver, run_id: int) -> None:
    """All four ranks of a launch with a number attach - always under the same pids."""
    for node, ranks in {"node-0": (0, 1), "node-1": (2, 3)}.items():
        driver.report(
            node=node,
            run_id=run_id,
            attached=[attachment(r, run_id=run_id) for r in ranks],
            layouts=[FIRST],
        )
    driver.report(*applied(FIRST), run_id=run_id)


def with_launch(run_id: int, config: ControllerConfig = QUICK) -> Driver:
    driver = Driver(config=config)
    driver.agent("node-0")
    driver.agent("node-1")
    launched(driver, run_id)
    return driver


class TestNumberedLives:
    """A launcher numbers the lives of a job: equal pids, absence and late words mislead nobody."""

    def test_equal_pids_are_no_proof_of_the_same_life(self) -> None:
        driver = with_launch(7)
        driver.report(*step(0), run_id=7)
        driver.report(exited(2), run_id=7)
        launched(driver, 8)
        assert driver.job.run_id == 8
        assert not driver.job.open_incidents
        assert (driver.job.progress.step, driver.job.dead) == (-1, ())
        driver.report(*step(0), run_id=8)
        assert driver.job.progress.step == 0

    def test_the_last_words_of_an_earlier_life_are_told_to_nobody(self) -> None:
        driver = with_launch(8)
        driver.report(*step(0), run_id=8)
        before = driver.state
        driver.report(exited(2), *step(1), run_id=7, attached=[attachment(3, run_id=7)])
        assert driver.state.jobs == before.jobs
        assert driver.said == ()

    def test_a_death_is_told_to_the_life_it_is_of(self) -> None:
        driver = with_launch(8)
        driver.report(*step(0), run_id=8)
        driver.report(exited(2), run_id=8)
        assert {notice.run_id for notice in driver.all_said(NotifyDeaths)} == {8}

    def test_a_plan_is_for_the_life_it_was_made_for(self) -> None:
        driver = with_launch(8)
        offers: list[OfferPlan] = []
        for number in range(WARM + 12):
            driver.now_s += 0.2
            driver.report(*step(number, slow=2 if number >= WARM else None), run_id=8)
            offers += driver.all_said(OfferPlan)
        assert {offer.run_id for offer in offers} == {8}

    def test_the_job_was_launched_again_while_the_controller_was_away(self) -> None:
        before = with_launch(7)
        before.report(*step(0), run_id=7)
        after = killed_and_started(before)
        after.agent("node-0")
        launched(after, 8)
        assert (after.job.run_id, after.job.progress.step) == (8, -1)
        assert after.job.layouts.current == FIRST

    def test_the_same_life_is_known_again_after_a_restart_whatever_its_pids(self) -> None:
        before = with_launch(7)
        before.report(*step(0), run_id=7)
        after = killed_and_started(before)
        after.agent("node-0")
        after.report(
            run_id=7, attached=[attachment(rank, run_id=7, pid=900 + rank) for rank in range(4)]
        )
        assert (after.job.run_id, after.job.progress.step) == (7, 0)
        assert "started anew" not in after.texts

    def test_old_words_after_a_restart_are_still_old(self) -> None:
        before = with_launch(8)
        before.report(*step(0), run_id=8)
        after = killed_and_started(before)
        after.agent("node-0")
        launched(after, 7)
        assert (after.job.run_id, after.job.ranks) == (8, {})
