"""The controller's machine, event by event."""

from dataclasses import replace

import pytest

from pacekeeper.controller import machine, steps
from pacekeeper.controller.events import (
    NodeAttached,
    NodeDetached,
    NodeReported,
    NotifyDeaths,
    OfferPlan,
    SaveDecision,
    SaveIncident,
    SaveJob,
    SaveLayout,
    StepSummary,
)
from pacekeeper.controller.policy import View, decide
from pacekeeper.controller.state import RankLife
from pacekeeper.core.config import ControllerConfig, DetectorConfig, PolicyConfig
from pacekeeper.core.findings import Decision, FindingKind, Rung, Watch
from pacekeeper.core.records import ExpertLoadRecord, PlanAppliedRecord, StepRecord
from pacekeeper.core.reports import JobReport, NodeReport
from pacekeeper.core.shrink import shrink
from pacekeeper.predictor.evidence import Evidence, Judgement, fold
from support.machine_driver import (
    FIRST,
    JOB,
    UNIX_OFFSET_S,
    Driver,
    applied,
    attachment,
    exited,
    started,
    step,
    train,
)

QUICK = ControllerConfig(detector=DetectorConfig(warmup_steps=8))
WARM = 12  # steps after which the cost model is fitted


def with_plan(config: ControllerConfig = QUICK) -> Driver:
    """Rank 2 is slow and a plan for it was just offered."""
    driver = started(config)
    train(driver, 0, WARM)
    train(driver, WARM, WARM + 12, slow=2)
    assert driver.job.desired is not None
    return driver


def _re_measured(
    folded: tuple[Evidence, Judgement], changed: dict[int, float]
) -> tuple[Evidence, Judgement]:
    return folded[0], replace(folded[1], changed=changed)


class TestLayouts:
    def test_first_layout_is_in_force_when_all_ranks_run_it(self) -> None:
        driver = started()
        assert driver.job.layout == FIRST
        (saved,) = driver.all_said(SaveLayout)
        assert saved.layout == FIRST
        assert driver.all_said(SaveJob)
        assert "generation=1 in force" in driver.texts

    def test_it_is_not_while_one_rank_has_not_said_so(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(rank) for rank in range(4)], layouts=[FIRST])
        driver.report(*applied(FIRST, ranks=[0, 1, 2]))
        assert driver.job.layout is None
        driver.report(*applied(FIRST, ranks=[3]))
        assert driver.job.layout == FIRST

    def test_a_layout_file_may_come_after_those_who_run_it(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(rank) for rank in range(4)])
        driver.report(*applied(FIRST))
        assert driver.job.layout is None
        driver.report(layouts=[FIRST])
        assert driver.job.layout == FIRST

    def test_another_layout_under_the_same_number_is_not_taken_for_it(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(rank) for rank in range(4)], layouts=[FIRST])
        strangers = [
            replace(record, layout_crc=record.layout_crc ^ 1)
            for record in applied(FIRST)
            if isinstance(record, PlanAppliedRecord)
        ]
        driver.report(*strangers)
        assert driver.job.layout is None

    def test_steps_say_which_layout_runs_where_the_announcement_was_lost(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(rank) for rank in range(4)], layouts=[FIRST])
        driver.report(*step(0))
        assert driver.job.layout == FIRST

    def test_an_unreadable_layout_is_said_and_nothing_else(self) -> None:
        driver = started()
        before = driver.job
        part = JobReport(job=JOB, layouts=((2, b"not json"),))
        whole = NodeReport(sequence=2, sent_mono_s=0.0, jobs=(part,))
        driver.event(NodeReported(node="node-0", agent_life="a", report=whole))
        assert "layout=2 unreadable" in driver.texts
        assert driver.job == before


class TestSteps:
    def test_a_complete_step_is_summed_up(self) -> None:
        driver = started()
        driver.report(*step(0, ranks=[0, 1]))
        assert not driver.all_said(StepSummary)
        driver.report(*step(0, ranks=[2, 3]), node="node-1")
        (summary,) = driver.all_said(StepSummary)
        assert (summary.step, summary.generation, summary.tokens) == (0, 1, 5120)
        assert summary.ranks == (0, 1, 2, 3)
        assert summary.expected_s == ()
        assert summary.loss == 2.0
        assert driver.job.tokens_per_s == pytest.approx(5120 / 0.12)
        assert driver.job.watch == Watch.MEASURING

    def test_what_is_said_twice_counts_once(self) -> None:
        once, twice = started(QUICK), started(QUICK)
        for number in range(WARM + 4):
            records = step(number, slow=1 if number >= WARM else None)
            once.report(*records)
            twice.report(*records, *records)
            twice.report(*records)
        assert twice.job.loads == once.job.loads
        assert twice.job.step == once.job.step
        assert twice.job.incidents == once.job.incidents
        assert twice.job.ranks == once.job.ranks
        assert once.job.tokens_per_step == twice.job.tokens_per_step

    def test_a_later_complete_step_gives_up_an_earlier_incomplete_one(self) -> None:
        driver = started()
        driver.report(*step(0, ranks=[0, 1, 2]))
        driver.report(*step(1))
        assert (driver.job.step, driver.job.pending) == (1, {})
        driver.report(*step(0, ranks=[3]))
        assert not driver.all_said(StepSummary)

    def test_work_on_an_older_layout_accuses_nobody(self) -> None:
        driver = started(QUICK)
        train(driver, 0, WARM)
        newer = replace(FIRST, generation=2)
        driver.report(*applied(newer), layouts=[newer])
        assert driver.job.layout == newer
        for number in range(WARM, WARM + 10):
            driver.report(*step(number, generation=1, slow=2, slowdown=3.0))
            assert not driver.all_said(StepSummary)
        assert not driver.job.incidents

    def test_a_redone_step_counts_under_its_new_generation(self) -> None:
        driver = started()
        half = [r for r in step(0, slow=2) if not hasattr(r, "duration_s")]
        driver.report(*half)
        survivors = shrink(FIRST, dead=[3], generation=2)
        driver.report(exited(3))
        driver.report(
            *applied(survivors), *step(0, ranks=[0, 1, 2], generation=2), layouts=[survivors]
        )
        (summary,) = driver.all_said(StepSummary)
        assert (summary.generation, summary.ranks) == (2, (0, 1, 2))
        assert max(summary.observed_s) < 0.11

    def test_what_a_rank_did_before_a_step_was_redone_does_not_count(self) -> None:
        driver = started()
        survivors = shrink(FIRST, dead=[3], generation=2)
        driver.report(exited(3), *applied(survivors), layouts=[survivors])
        driver.report(*step(0, ranks=[0, 1], generation=2))
        driver.report(*(r for r in step(0, ranks=[0], slow=0) if not isinstance(r, StepRecord)))
        driver.report(*step(0, ranks=[2], generation=2))
        (summary,) = driver.all_said(StepSummary)
        assert max(summary.observed_s) < 0.11

    def test_without_a_layout_the_whole_world_is_waited_for(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(0, model=None), attachment(1, model=None)])
        driver.report(*step(0, ranks=[0, 1]))
        assert not driver.all_said(StepSummary)
        driver.report(attached=[attachment(2, model=None), attachment(3, model=None)])
        driver.report(*step(0, ranks=[2, 3]))
        assert driver.all_said(StepSummary)

    def test_loads_of_a_part_of_the_ranks_are_not_learnt(self) -> None:
        driver = started()
        lost = [r for r in step(0) if not (isinstance(r, ExpertLoadRecord) and r.rank == 3)]
        driver.report(*lost)
        assert (driver.job.step, driver.job.loads) == (0, ())
        driver.report(*step(1, hot=2.0))
        assert driver.job.loads == ((5120.0, 2560.0, 2560.0, 2560.0),)
        driver.report(*step(2))
        assert driver.job.loads[0][0] == pytest.approx(5120.0 - 0.1 * 2560.0)

    def test_records_of_an_unknown_rank_are_ignored(self) -> None:
        driver = Driver()
        driver.report(*step(0))
        assert driver.job.pending == {}


class TestFindings:
    def test_a_finding_opens_an_incident_and_a_plan_follows_at_once(self) -> None:
        driver = with_plan()
        (opened,) = [c.incident for c in driver.all_said(SaveIncident)]
        assert (opened.incident_id, opened.finding.kind) == (1, FindingKind.DEVICE)
        assert (opened.finding.rank, opened.is_open) == (2, True)
        assert opened.finding.slowdown == pytest.approx(1.6, rel=0.1)
        assert opened.opened_unix_s == driver.now_s + UNIX_OFFSET_S
        (offer,) = driver.all_said(OfferPlan)
        assert (offer.base_generation, offer.layout.generation) == (1, 2)
        assert offer.nodes == ("node-0", "node-1")
        shares = dict(offer.layout.batch_shares)
        assert shares[2] == min(shares.values()) < max(shares.values())
        (decided,) = driver.all_said(SaveDecision)
        assert "rank 2 is x1." in decided.decision.reason
        assert driver.job.watch == Watch.DEGRADED

    def test_a_plan_that_all_run_becomes_the_layout_and_is_noted(self) -> None:
        driver = with_plan()
        plan = driver.job.desired
        assert plan is not None
        driver.report(*applied(plan))
        assert (driver.job.layout, driver.job.desired) == (plan, None)
        (noted,) = [c.incident for c in driver.all_said(SaveIncident)]
        assert "generation 2" in noted.actions[0]
        assert driver.job.layout_reason in noted.actions[0]
        assert driver.job.home == FIRST

    def test_after_recovery_the_layout_goes_home(self) -> None:
        driver = with_plan()
        plan, number = driver.job.desired, driver.job.step + 1
        assert plan is not None
        driver.report(*applied(plan))
        while driver.job.open_incidents:
            # The slow rank is as fast as the others again, whatever its work.
            driver.report(*step(number, generation=2))
            number += 1
            assert number < 100, "it never recovers"
        train(driver, number, number + 6, generation=2)
        home = driver.job.desired
        assert home is not None
        assert (home.generation, home.ranks) == (3, FIRST.ranks)
        assert (home.experts, home.batch_shares) == (FIRST.experts, FIRST.batch_shares)
        driver.report(*applied(home))
        assert driver.job.home is None
        assert not driver.job.open_incidents
        assert driver.job.incidents[0].finding.slowdown == pytest.approx(1.6, rel=0.1)

    def test_home_is_the_layout_before_the_first_of_several_findings(self) -> None:
        driver = with_plan()
        assert driver.job.desired is not None
        driver.report(*applied(driver.job.desired))
        number = driver.job.step
        while len(driver.job.incidents) < 2:
            number += 1
            both = [
                record if record.rank != 0 else worse
                for record, worse in zip(
                    step(number, generation=2, slow=2),
                    step(number, generation=2, slow=0),
                    strict=True,
                )
            ]
            driver.report(*both)
            assert number < 60, "the second one is never found"
        assert [i.finding.rank for i in driver.job.open_incidents] == [2, 0]
        assert driver.job.home == FIRST

    def test_home_is_forgotten_where_nothing_was_done(self) -> None:
        driver = started(replace(QUICK, policy=PolicyConfig(mode="observe")))
        train(driver, 0, WARM)
        train(driver, WARM, WARM + 12, slow=2)
        assert (len(driver.job.open_incidents), driver.job.home) == (1, FIRST)
        train(driver, WARM + 12, WARM + 50)
        assert (len(driver.job.open_incidents), driver.job.home) == (0, None)

    def test_a_plan_around_a_slow_rank_is_undone_even_where_the_way_home_is_lost(self) -> None:
        driver = with_plan()
        survivors = shrink(FIRST, dead=[0], generation=3)
        driver.report(exited(0), *applied(survivors), layouts=[survivors])
        number = driver.job.step
        while driver.job.desired is None:
            number += 1
            driver.report(*step(number, ranks=[1, 2, 3], generation=3, slow=2))
            assert number < 60, "no plan for the survivors"
        around = driver.job.desired
        driver.report(*applied(around))
        while driver.job.open_incidents:
            number += 1
            driver.report(*step(number, ranks=[1, 2, 3], generation=around.generation))
            assert number < 90, "it never recovers"
        # At once: not only when the layout has grown old enough for hot experts' sake.
        assert driver.job.desired is not None
        assert len(set(driver.job.desired.rows_of(30).values())) == 1

    def test_history_keeps_the_slowdown_of_a_finding_that_is_ending(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = with_plan()
        for told, kept in ((1.9, 1.9), (1.05, 1.9)):
            monkeypatch.setattr(
                steps, "fold", lambda *x, told=told: _re_measured(fold(*x), {2: told})
            )
            driver.report(*step(driver.job.step + 1, slow=2))
            assert driver.job.incidents[0].finding.slowdown == kept

    def test_observing_decides_and_offers_nothing(self) -> None:
        driver = started(replace(QUICK, policy=PolicyConfig(mode="observe")))
        train(driver, 0, WARM)
        said = ""
        for number in range(WARM, WARM + 12):
            driver.report(*step(number, slow=2))
            assert not driver.all_said(OfferPlan)
            said += driver.texts
        assert driver.job.last_decision is not None
        assert driver.job.last_decision.rung is Rung.BATCH_SHARES
        assert said.count("decision=batch_shares") == 1
        assert driver.job.newest_generation == 1

    def test_a_trainer_without_model_shape_is_watched_but_never_moved(self) -> None:
        driver = Driver(config=QUICK)
        driver.report(attached=[attachment(rank, model=None) for rank in range(4)])
        for number in range(WARM + 12):
            driver.report(*step(number, slow=2 if number >= WARM else None))
        assert [i.finding.rank for i in driver.job.open_incidents] == [2]
        assert driver.job.desired is None


class TestOffers:
    def test_an_offer_is_said_again_each_second_until_it_is_observed(self) -> None:
        driver = with_plan()
        plan = driver.job.desired
        assert plan is not None
        driver.tick(0.5)
        assert not driver.all_said(OfferPlan)
        driver.tick(0.6)
        (again,) = driver.all_said(OfferPlan)
        assert (again.layout, again.base_generation) == (plan, 1)
        driver.report(*applied(plan))
        driver.tick(5.0)
        assert not driver.all_said(OfferPlan)

    def test_an_offer_nobody_takes_is_given_up_and_made_anew_under_a_new_number(self) -> None:
        driver = with_plan()
        driver.tick(61.0)
        assert "plan=2 given up: not taken" in driver.texts
        driver.report(*step(driver.job.step + 1, slow=2))
        (offer,) = driver.all_said(OfferPlan)
        assert (offer.layout.generation, offer.base_generation) == (3, 1)

    def test_an_offer_that_survivors_overtook_is_given_up(self) -> None:
        driver = with_plan()
        survivors = shrink(FIRST, dead=[1], generation=3)
        driver.report(exited(1), *applied(survivors), layouts=[survivors])
        assert driver.job.layout == survivors
        assert driver.job.desired is None
        driver.tick(2.0)
        assert not [o for o in driver.all_said(OfferPlan) if o.base_generation == 1]

    def test_an_offer_made_for_a_layout_that_is_gone_is_given_up(self) -> None:
        driver = with_plan()
        same_ranks = replace(FIRST, generation=2)  # theirs took the number of ours
        driver.report(*applied(same_ranks), layouts=[same_ranks])
        assert driver.job.layout == same_ranks
        assert driver.job.layout_reason.startswith("the survivors")
        driver.tick(2.0)
        assert all(o.base_generation == 2 for o in driver.all_said(OfferPlan))

    def test_an_offer_is_given_up_when_an_older_one_is_taken_after_all(self) -> None:
        driver = with_plan()
        older = driver.job.desired
        assert older is not None
        driver.tick(61.0)
        driver.report(*step(driver.job.step + 1, slow=2))
        assert driver.job.desired is not None
        assert driver.job.desired.generation == 3
        driver.report(*applied(older))
        assert driver.job.layout == older
        assert driver.job.layout_reason.startswith("rank 2 is x1.")
        driver.tick(0.2)
        assert "plan=3 given up: generation 2 came first" in driver.texts

    def test_the_same_facts_are_not_decided_on_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decided: list[int] = []

        def counted(view: View, config: PolicyConfig) -> Decision:
            decided.append(view.steps_since_plan)
            return decide(view, config)

        monkeypatch.setattr(machine, "decide", counted)
        driver = started(replace(QUICK, policy=PolicyConfig(mode="observe")))
        train(driver, 0, WARM)
        train(driver, WARM, WARM + 8, slow=2)
        assert driver.job.open_incidents
        before = len(decided)
        for _ in range(5):
            driver.tick()
        assert len(decided) == before
        driver.report(*step(WARM + 8, slow=2))
        driver.tick()
        assert len(decided) == before + 1

    def test_an_offer_with_a_dead_rank_is_given_up(self) -> None:
        driver = with_plan()
        driver.report(exited(0))
        driver.tick(0.2)
        assert "given up: ranks died meanwhile" in driver.texts
        assert driver.job.desired is None

    def test_plans_keep_their_distance(self) -> None:
        rare = replace(QUICK, policy=PolicyConfig(min_steps_between_plans=20))
        driver = with_plan(rare)
        plan, first = driver.job.desired, driver.job.step
        assert plan is not None
        driver.report(*applied(plan))
        while driver.job.desired is None:
            # Much slower than the plan was made for.
            driver.report(*step(driver.job.step + 1, generation=2, slow=2, slowdown=4.0))
            assert driver.job.step <= first + 20, "nobody looks again"
        assert driver.job.step == first + 20


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
        survivors = shrink(FIRST, dead=[1], generation=2)
        driver.report(*applied(survivors), layouts=[survivors])
        (closed,) = [c.incident for c in driver.all_said(SaveIncident)]
        assert not closed.is_open
        assert "survivors [0, 2, 3]" in closed.actions[0]
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

    def test_a_failure_code_is_a_death_too(self) -> None:
        driver = started()
        driver.report(exited(1, signal=0, exit_code=3))
        assert "exit code 3" in driver.job.incidents[0].finding.reason

    def test_a_clean_exit_is_the_end_not_a_death(self) -> None:
        driver = started()
        driver.report(*(exited(rank, signal=0) for rank in range(4)))
        driver.tick()
        assert not driver.job.incidents
        assert {rank.life for rank in driver.job.ranks.values()} == {RankLife.FINISHED}
        assert driver.job.watch == Watch.ENDED

    def test_who_is_left_out_by_the_others_is_dead(self) -> None:
        driver = started()
        survivors = shrink(FIRST, dead=[3], generation=2)
        driver.report(*applied(survivors), layouts=[survivors])
        (incident,) = driver.job.incidents
        assert (incident.finding.rank, incident.is_open) == (3, False)
        assert "went on without it" in incident.finding.reason

    def test_a_second_death_stays_open_until_its_own_survivors_go_on(self) -> None:
        driver = started()
        first = shrink(FIRST, dead=[1], generation=2)
        driver.report(exited(1), *applied(first, ranks=[0, 2, 3]))
        driver.report(exited(2))
        driver.report(layouts=[first])
        assert [i.finding.rank for i in driver.job.open_incidents] == [2]
        second = shrink(first, dead=[2], generation=3)
        driver.report(*applied(second), layouts=[second])
        assert not driver.job.open_incidents

    def test_the_way_home_ends_with_a_death(self) -> None:
        driver = with_plan()
        driver.report(exited(0))
        assert driver.job.home is None

    def test_a_slow_rank_that_dies_is_no_longer_slow(self) -> None:
        driver = with_plan()
        driver.report(exited(2))
        kinds = {i.finding.kind: i.is_open for i in driver.job.incidents}
        assert kinds == {FindingKind.DEVICE: False, FindingKind.DEATH: True}
        assert not driver.job.evidence.slow

    def test_survivors_of_a_death_get_a_better_layout_at_once(self) -> None:
        driver = started()
        for number in range(6):
            driver.report(*step(number))
        lopsided = shrink(FIRST, dead=[1], generation=2)
        lopsided = replace(lopsided, batch_shares=((0, 0.5), (2, 0.25), (3, 0.25)))
        driver.report(exited(1), *applied(lopsided), layouts=[lopsided])
        for number in range(6, 10):
            driver.report(*step(number, ranks=[0, 2, 3], generation=2))
            if driver.job.desired is not None:
                break
        assert driver.job.desired is not None
        assert driver.job.desired.ranks == (0, 2, 3)


class TestSilence:
    def test_no_records_is_blind_not_healthy(self) -> None:
        driver = started(QUICK)
        train(driver, 0, WARM)
        seen = [driver.job.watch]
        for after_s in (29.0, 2.0):
            driver.tick(after_s)
            seen.append(driver.job.watch)
        assert seen == [Watch.HEALTHY, Watch.HEALTHY, Watch.BLIND]
        assert "watch=blind was=healthy" in driver.texts
        driver.tick(1.0)
        assert not driver.texts

    def test_one_silent_node_blinds_the_job(self) -> None:
        driver = started(QUICK)
        train(driver, 0, WARM)
        driver.now_s += 31.0
        driver.report(*step(WARM, ranks=[0, 1]))
        driver.tick(0.1)
        assert driver.job.watch == Watch.BLIND
        assert "[2, 3]" in driver.job.watch_reason

    def test_an_agent_that_is_away_kills_nobody(self) -> None:
        driver = started()
        driver.event(NodeDetached(node="node-1", agent_life="a"))
        assert not driver.state.nodes["node-1"].is_connected
        assert driver.job.living == (0, 1, 2, 3)
        assert driver.said == ()

    def test_the_end_of_an_older_stream_does_not_hide_the_newer_one(self) -> None:
        driver = started()
        driver.event(NodeAttached(node="node-1", product_version="1", agent_life="b"))
        driver.event(NodeDetached(node="node-1", agent_life="a"))
        assert driver.state.nodes["node-1"].is_connected
