"""The controller's machine: what it offers, what deaths and silence change."""

from dataclasses import replace

import pytest

from pacekeeper.controller.mitigation import rollout
from pacekeeper.controller.state.events import (
    NodeAttached,
    NodeDetached,
    NotifyDeaths,
    NotifySuspects,
    OfferPlan,
    SaveIncident,
)
from pacekeeper.controller.state.state import RankStatus
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import CoverageState, FindingKind, MitigationLevel
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.records import EXIT_UNKNOWN
from support.layouts import with_shares
from support.machine_driver import (
    FIRST,
    FLOOR,
    QUICK,
    WARM,
    applied,
    exited,
    started,
    step,
    steps_of,
    train,
    with_plan,
)


class TestOffers:
    def test_an_offer_is_said_again_each_second_until_it_is_observed(self) -> None:
        driver = with_plan()
        plan = driver.job.plan.desired
        assert plan is not None
        driver.tick(0.5)
        assert not driver.all_said(OfferPlan)
        driver.tick(0.6)
        (again,) = driver.all_said(OfferPlan)
        assert (again.layout, again.base_generation) == (plan, 1)
        driver.report(*applied(plan))
        driver.tick(5.0)
        assert not driver.all_said(OfferPlan)

    def test_an_offer_that_is_large_for_many_nodes_is_said_again_less_often(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        num_hosts = sum(len(hosts) for layer in FIRST.experts for hosts in layer)
        bytes_to_all = 2 * num_hosts * rollout.HOST_BYTES
        monkeypatch.setattr(rollout, "OFFERED_BYTES_PER_S", bytes_to_all / 5.0)
        driver = with_plan()
        told_s = []
        for tick in range(1, 60):
            driver.tick(0.2)
            if driver.all_said(OfferPlan):
                told_s.append(round(0.2 * tick))
        assert told_s == [5, 10]

    def test_an_offer_nobody_takes_is_given_up_and_made_anew_under_a_new_number(self) -> None:
        driver = with_plan()
        driver.tick(61.0)
        assert "plan=2 given up" in driver.texts
        driver.report(*step(driver.job.progress.step + 1, slow=2))
        (offer,) = driver.all_said(OfferPlan)
        assert (offer.layout.generation, offer.base_generation) == (3, 1)

    def test_where_steps_are_long_an_offer_waits_for_some_of_them(self) -> None:
        driver = with_plan()
        steps_of(driver, 30.0)
        driver.tick(239.0)
        assert driver.job.plan.desired is not None
        driver.tick(2.0)
        assert "plan=2 given up: not applied for 4 min" in driver.texts

    def test_an_offer_that_survivors_overtook_is_given_up(self) -> None:
        driver = with_plan()
        survivors = shrink(FIRST, dead=[1], generation=3, floor=FLOOR)
        driver.report(exited(1), *applied(survivors), layouts=[survivors])
        assert driver.job.layouts.current == survivors
        assert driver.job.plan.desired is None
        driver.tick(2.0)
        assert not [o for o in driver.all_said(OfferPlan) if o.base_generation == 1]

    def test_an_offer_made_for_a_layout_that_is_gone_is_given_up(self) -> None:
        driver = with_plan()
        same_ranks = replace(FIRST, generation=2)  # theirs took the number of ours
        driver.report(*applied(same_ranks), layouts=[same_ranks])
        assert driver.job.layouts.current == same_ranks
        assert driver.job.layouts.reason.startswith("the survivors")
        driver.tick(2.0)
        assert all(o.base_generation == 2 for o in driver.all_said(OfferPlan))

    def test_an_offer_is_given_up_when_an_older_one_is_taken_after_all(self) -> None:
        driver = with_plan()
        older = driver.job.plan.desired
        assert older is not None
        driver.tick(61.0)
        driver.report(*step(driver.job.progress.step + 1, slow=2))
        assert driver.job.plan.desired is not None
        assert driver.job.plan.desired.generation == 3
        driver.report(*applied(older))
        assert driver.job.layouts.current == older
        assert driver.job.layouts.reason.startswith("rank 2 takes 1.")
        driver.tick(0.2)
        assert "plan=3 given up" in driver.texts

    def test_the_same_facts_are_not_decided_on_twice(self) -> None:
        driver = started(replace(QUICK, policy=PolicyConfig(mode="observe")))
        train(driver, 0, WARM)
        train(driver, WARM, WARM + 8, slow=2)
        assert driver.job.open_incidents
        before = driver.state.num_asked
        for _ in range(5):
            driver.tick()
        assert driver.state.num_asked == before
        driver.report(*step(WARM + 8, slow=2))
        driver.tick()
        assert driver.state.num_asked == before + 1

    def test_an_offer_with_a_dead_rank_is_given_up(self) -> None:
        driver = with_plan()
        driver.report(exited(0))
        driver.tick(0.2)
        assert "plan=2 given up" in driver.texts
        assert driver.job.plan.desired is None

    def test_the_way_home_is_given_up_when_a_rank_is_slow_again(self) -> None:
        """Nobody has taken it yet; it would give that rank its full part."""
        driver = with_plan()
        plan = driver.job.plan.desired
        assert plan is not None
        driver.report(*applied(plan))
        first = driver.job.progress.step + 1
        while driver.job.plan.desired is None:
            assert driver.job.progress.step < first + 40
            driver.report(*step(driver.job.progress.step + 1, generation=plan.generation))
            driver.tick(0.2)
        assert driver.job.plan.last_decision is not None
        assert driver.job.plan.last_decision.level is MitigationLevel.RETURN_HOME
        while not driver.job.detection.evidence.slow:
            assert driver.job.progress.step < first + 80
            driver.report(*step(driver.job.progress.step + 1, slow=2, generation=plan.generation))
        driver.tick(0.2)
        assert "plan=3 given up" in driver.texts

    def test_plans_keep_their_distance(self) -> None:
        rare = replace(QUICK, policy=PolicyConfig(min_steps_between_plans=20))
        driver = with_plan(rare)
        plan, first = driver.job.plan.desired, driver.job.progress.step
        assert plan is not None
        driver.report(*applied(plan))
        while driver.job.plan.desired is None:
            # Much slower than the plan was made for.
            driver.report(*step(driver.job.progress.step + 1, generation=2, slow=2, slowdown=4.0))
            assert driver.job.progress.step <= first + 20, "nobody looks again"
        assert driver.job.progress.step == first + 20


class TestSuspects:
    def test_all_nodes_are_told_who_stands_beside_a_slow_rank_and_when_nobody_does(self) -> None:
        driver = with_plan()
        driver.tick(1.1)
        (told,) = driver.all_said(NotifySuspects)
        assert (told.nodes, told.ranks) == (("node-0", "node-1"), (2, 3)), "rank 2 is slow"
        driver.report(exited(3))
        driver.tick(1.1)  # the plan is given up
        driver.tick(1.1)
        assert [told.ranks for told in driver.all_said(NotifySuspects)] == [(2,)], "the living"

    def test_a_large_job_is_told_again_less_often_and_of_news_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rollout, "NODES_PER_S", 2 / 5.0)  # there are two
        driver = with_plan()
        told = []
        for _ in range(11):
            driver.tick(1.1)
            told.append([one.ranks for one in driver.all_said(NotifySuspects)])
        assert told == [[(2, 3)], *[[]] * 4, [(2, 3)], *[[]] * 4, [(2, 3)]]
        driver.report(exited(3))
        driver.tick(1.1)  # the plan is given up
        driver.tick(1.1)
        assert [one.ranks for one in driver.all_said(NotifySuspects)] == [(2,)]

    def test_a_death_makes_nobody_suspect(self) -> None:
        driver = started()
        driver.report(exited(1))
        driver.tick(1.1)
        assert not driver.all_said(NotifySuspects)


class TestDeaths:
    def test_a_death_is_an_incident_and_all_nodes_are_told_until_survivors_go_on(self) -> None:
        driver = started()
        driver.report(exited(1))
        (opened,) = [c.incident for c in driver.all_said(SaveIncident)]
        assert (opened.finding.kind, opened.finding.rank) == (FindingKind.DEATH, 1)
        assert "signal 9" in opened.finding.reason
        (notice,) = driver.all_said(NotifyDeaths)
        assert (notice.nodes, notice.ranks) == (("node-0", "node-1"), (1,))
        driver.tick(1.1)
        assert driver.all_said(NotifyDeaths) == [notice]
        driver.tick(0.3)
        assert not driver.all_said(NotifyDeaths)
        survivors = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
        driver.report(*applied(survivors), layouts=[survivors])
        (closed,) = [c.incident for c in driver.all_said(SaveIncident)]
        assert not closed.is_open
        assert "survivors 0, 2 and 3" in closed.actions[0]
        driver.tick(5.0)
        assert not driver.all_said(NotifyDeaths)

    def test_the_same_exit_twice_is_one_death(self) -> None:
        driver = started()
        driver.report(exited(1), exited(1))
        driver.report(exited(1))
        assert len(driver.job.incidents) == 1

    def test_an_exit_of_another_process_is_nobody_here(self) -> None:
        driver = started()
        driver.report(exited(1, pid=999))
        assert not driver.job.incidents

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            (7, "ended by exit code 7 (lost state)"),
            (75, "ended by exit code 75"),
            (EXIT_UNKNOWN, "its process ended after its launcher was killed"),
        ],
    )
    def test_a_failure_code_is_a_death_too(self, code: int, said: str) -> None:
        driver = started()
        driver.report(exited(1, signal=0, exit_code=code))
        assert driver.job.incidents[0].finding.reason.endswith(said)

    def test_a_clean_exit_is_the_end_not_a_death(self) -> None:
        driver = started()
        driver.report(*(exited(rank, signal=0) for rank in range(4)))
        driver.tick()
        assert not driver.job.incidents
        assert {rank.status for rank in driver.job.ranks.values()} == {RankStatus.FINISHED}
        assert driver.job.coverage.state == CoverageState.ENDED

    def test_who_is_left_out_by_the_others_is_dead(self) -> None:
        driver = started()
        survivors = shrink(FIRST, dead=[3], generation=2, floor=FLOOR)
        driver.report(*applied(survivors), layouts=[survivors])
        (incident,) = driver.job.incidents
        assert (incident.finding.rank, incident.is_open) == (3, False)
        assert "went on without it" in incident.finding.reason

    def test_a_second_death_stays_open_until_its_own_survivors_go_on(self) -> None:
        driver = started()
        first = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
        driver.report(exited(1), *applied(first, ranks=[0, 2, 3]))
        driver.report(exited(2))
        driver.report(layouts=[first])
        assert [i.unresolved_ranks for i in driver.job.open_incidents] == [((2, 2),)]
        second = shrink(first, dead=[2], generation=3, floor=FLOOR)
        driver.report(*applied(second), layouts=[second])
        assert not driver.job.open_incidents

    def test_the_way_home_ends_with_a_death(self) -> None:
        driver = with_plan()
        driver.report(exited(0))
        assert driver.job.layouts.baseline is None

    def test_a_slow_rank_that_dies_is_no_longer_slow(self) -> None:
        driver = with_plan()
        driver.report(exited(2))
        kinds = {i.finding.kind: i.is_open for i in driver.job.incidents}
        assert kinds == {FindingKind.DEVICE: False, FindingKind.DEATH: True}
        assert not driver.job.detection.evidence.slow

    def test_survivors_of_a_death_get_a_better_layout_at_once(self) -> None:
        driver = started()
        for number in range(6):
            driver.report(*step(number))
        lopsided = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)
        lopsided = with_shares(lopsided, 0.5, 0.25, 0.25)
        driver.report(exited(1), *applied(lopsided), layouts=[lopsided])
        for number in range(6, 10):
            driver.report(*step(number, ranks=[0, 2, 3], generation=2))
            if driver.job.plan.desired is not None:
                break
        assert driver.job.plan.desired is not None
        assert driver.job.plan.desired.ranks == (0, 2, 3)


class TestSilence:
    def test_no_records_is_blind_not_healthy(self) -> None:
        driver = started(QUICK)
        train(driver, 0, WARM)
        seen = [driver.job.coverage.state]
        for after_s in (29.0, 2.0):
            driver.tick(after_s)
            seen.append(driver.job.coverage.state)
        assert seen == [CoverageState.HEALTHY, CoverageState.HEALTHY, CoverageState.BLIND]
        assert "watch=blind was=healthy" in driver.texts
        driver.tick(1.0)
        assert not driver.texts

    def test_one_silent_node_blinds_the_job(self) -> None:
        driver = started(QUICK)
        train(driver, 0, WARM)
        driver.now_s += 31.0
        driver.report(*step(WARM, ranks=[0, 1]))
        driver.tick(0.1)
        assert driver.job.coverage.state == CoverageState.BLIND
        assert "ranks 2 and 3" in driver.job.coverage.reason

    def test_an_agent_that_is_away_kills_nobody(self) -> None:
        driver = started()
        driver.event(NodeDetached(node="node-1", agent_incarnation="a"))
        assert not driver.state.nodes["node-1"].is_connected
        assert driver.job.living == (0, 1, 2, 3)
        assert driver.said == ()

    def test_the_end_of_an_older_stream_does_not_hide_the_newer_one(self) -> None:
        driver = started()
        driver.event(NodeAttached(node="node-1", product_version="1", agent_incarnation="b"))
        driver.event(NodeDetached(node="node-1", agent_incarnation="a"))
        assert driver.state.nodes["node-1"].is_connected
