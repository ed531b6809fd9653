"""The controller's machine, event by event."""

from dataclasses import replace

import pytest

from pacekeeper.controller.detection import peer_groups
from pacekeeper.controller.machine.steps import MAX_PENDING_STEPS, MAX_ROWS_PER_RANK
from pacekeeper.controller.state.events import (
    NodeReported,
    OfferPlan,
    SaveDecision,
    SaveIncident,
    SaveJob,
    SaveLayout,
    StepSummary,
)
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import CoverageState, FindingKind, MitigationLevel
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import (
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    StepRecord,
)
from pacekeeper.predictor.detector.state import Evidence, Judgement
from pacekeeper.predictor.detector.update import update_evidence
from support.machine_driver import (
    FIRST,
    FLOOR,
    JOB,
    QUICK,
    UNIX_OFFSET_S,
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


def _re_measured(
    folded: tuple[Evidence, Judgement], changed: dict[int, float]
) -> tuple[Evidence, Judgement]:
    return folded[0], replace(folded[1], changed=changed)


class TestLayouts:
    def test_first_layout_is_in_force_when_all_ranks_run_it(self) -> None:
        driver = started()
        assert driver.job.layouts.current == FIRST
        (saved,) = driver.all_said(SaveLayout)
        assert saved.layout == FIRST
        assert driver.all_said(SaveJob)
        assert "generation=1 in force" in driver.texts

    def test_it_is_not_while_one_rank_has_not_said_so(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(rank) for rank in range(4)], layouts=[FIRST])
        driver.report(*applied(FIRST, ranks=[0, 1, 2]))
        assert driver.job.layouts.current is None
        driver.report(*applied(FIRST, ranks=[3]))
        assert driver.job.layouts.current == FIRST

    def test_a_layout_file_may_come_after_those_who_run_it(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(rank) for rank in range(4)])
        driver.report(*applied(FIRST))
        assert driver.job.layouts.current is None
        driver.report(layouts=[FIRST])
        assert driver.job.layouts.current == FIRST

    def test_another_layout_under_the_same_number_is_not_taken_for_it(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(rank) for rank in range(4)], layouts=[FIRST])
        strangers = [
            replace(record, layout_crc=record.layout_crc ^ 1)
            for record in applied(FIRST)
            if isinstance(record, PlanAppliedRecord)
        ]
        driver.report(*strangers)
        assert driver.job.layouts.current is None

    def test_steps_say_which_layout_runs_where_the_announcement_was_lost(self) -> None:
        driver = Driver()
        driver.report(attached=[attachment(rank) for rank in range(4)], layouts=[FIRST])
        driver.report(*step(0))
        assert driver.job.layouts.current == FIRST

    def test_an_unreadable_layout_is_said_and_nothing_else(self) -> None:
        driver = started()
        before = driver.job
        part = JobReport(job=JOB, layouts=((2, b"not json"),))
        whole = NodeReport(sequence=2, sent_mono_s=0.0, jobs=(part,))
        driver.event(NodeReported(node="node-0", agent_incarnation="a", report=whole))
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
        assert driver.job.progress.tokens_per_s == pytest.approx(5120 / 0.12)
        assert driver.job.coverage.state == CoverageState.MEASURING

    def test_what_is_said_twice_counts_once(self) -> None:
        once, twice = started(QUICK), started(QUICK)
        for number in range(WARM + 4):
            records = step(number, slow=1 if number >= WARM else None)
            once.report(*records)
            twice.report(*records, *records)
            twice.report(*records)
        assert twice.job.workload.loads == once.job.workload.loads
        assert twice.job.progress.step == once.job.progress.step
        assert twice.job.incidents == once.job.incidents
        assert twice.job.ranks == once.job.ranks
        assert once.job.workload.tokens_per_step == twice.job.workload.tokens_per_step

    def test_a_later_complete_step_gives_up_an_earlier_incomplete_one(self) -> None:
        driver = started()
        driver.report(*step(0, ranks=[0, 1, 2]))
        driver.report(*step(1))
        assert (driver.job.progress.step, driver.job.progress.pending) == (1, {})
        driver.report(*step(0, ranks=[3]))
        assert not driver.all_said(StepSummary)

    def test_work_on_an_older_layout_accuses_nobody(self) -> None:
        driver = started(QUICK)
        train(driver, 0, WARM)
        newer = replace(FIRST, generation=2)
        driver.report(*applied(newer), layouts=[newer])
        assert driver.job.layouts.current == newer
        for number in range(WARM, WARM + 10):
            driver.report(*step(number, generation=1, slow=2, slowdown=3.0))
            assert not driver.all_said(StepSummary)
        assert not driver.job.incidents

    def test_a_redone_step_counts_under_its_new_generation(self) -> None:
        driver = started()
        half = [r for r in step(0, slow=2) if not hasattr(r, "duration_s")]
        driver.report(*half)
        survivors = shrink(FIRST, dead=[3], generation=2, floor=FLOOR)
        driver.report(exited(3))
        driver.report(
            *applied(survivors), *step(0, ranks=[0, 1, 2], generation=2), layouts=[survivors]
        )
        (summary,) = driver.all_said(StepSummary)
        assert (summary.generation, summary.ranks) == (2, (0, 1, 2))
        assert max(summary.observed_s) < 0.11

    def test_work_of_a_rank_that_died_before_the_end_does_not_count(self) -> None:
        driver = started()
        half = [r for r in step(0, ranks=[3]) if not isinstance(r, StepRecord)]
        driver.report(*half, *step(0, ranks=[0, 1, 2]))
        assert not driver.all_said(StepSummary)
        driver.report(exited(3), *step(0, ranks=[0]))
        (summary,) = driver.all_said(StepSummary)
        assert summary.ranks == (0, 1, 2)
        assert driver.job.progress.tokens_per_s == pytest.approx(3 * 1280 / 0.12)

    def test_who_tells_of_a_step_without_end_is_bounded_and_the_last_of_it_counts(self) -> None:
        driver = started()
        work = step(0, ranks=[0])[0]
        assert isinstance(work, MicroBatchRecord)
        told = MAX_ROWS_PER_RANK // 3
        for number in range(20):
            more = [replace(work, generation=number * told + i) for i in range(told)]
            driver.take(JobReport(job=JOB, micro_batches=(table_from_records(more),)))
            draft = driver.job.progress.pending[0]
            rows = sum(map(len, draft.tables))
            assert sum(draft.num_rows[0].values()) == rows <= MAX_ROWS_PER_RANK
        assert 20 * told - 1 in draft.num_rows[0]

    def test_who_tells_too_much_of_a_step_takes_nothing_from_the_others(self) -> None:
        driver = started()
        work = [record for record in step(0) if isinstance(record, MicroBatchRecord)]
        driver.take(JobReport(job=JOB, micro_batches=(table_from_records(work),)))
        flood = [replace(work[0], micro_batch=i % 2) for i in range(4 * MAX_ROWS_PER_RANK)]
        for _ in range(2):
            driver.take(JobReport(job=JOB, micro_batches=(table_from_records(flood),)))
        draft = driver.job.progress.pending[0]
        assert draft.num_rows == {0: {1: len(flood)}} | {rank: {1: 1} for rank in (1, 2, 3)}
        assert sum(map(len, draft.tables)) == len(flood) + 3
        driver.report(*(record for record in step(0) if isinstance(record, StepRecord)))
        (summary,) = driver.all_said(StepSummary)
        assert summary.ranks == (0, 1, 2, 3)

    def test_of_steps_that_do_not_end_the_newest_are_kept_whoever_tells_of_them(self) -> None:
        driver = started()
        work = [record for record in step(0) if isinstance(record, MicroBatchRecord)]
        many = [replace(work[0], step=number) for number in range(1, 100)]
        driver.take(JobReport(job=JOB, micro_batches=(table_from_records(many),)))
        assert list(driver.job.progress.pending) == [*range(100 - MAX_PENDING_STEPS, 100)]
        strange = [replace(work[0], step=number, rank=77) for number in range(100, 300)]
        strange.append(replace(work[1], step=99))
        driver.take(JobReport(job=JOB, micro_batches=(table_from_records(strange),)))
        assert len(driver.job.progress.pending) == MAX_PENDING_STEPS
        assert driver.job.progress.pending[99].num_rows == {0: {1: 1}, 1: {1: 1}}

    def test_what_a_rank_did_before_a_step_was_redone_does_not_count(self) -> None:
        driver = started()
        survivors = shrink(FIRST, dead=[3], generation=2, floor=FLOOR)
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
        assert (driver.job.progress.step, driver.job.workload.loads) == (0, ())
        driver.report(*step(1, hot=2.0))
        assert driver.job.workload.loads == ((5120.0, 2560.0, 2560.0, 2560.0),)
        driver.report(*step(2))
        assert driver.job.workload.loads[0][0] == pytest.approx(5120.0 - 0.1 * 2560.0)

    def test_records_of_an_unknown_rank_are_ignored(self) -> None:
        driver = Driver()
        driver.report(*step(0))
        assert driver.job.progress.pending == {}


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
        assert "rank 2 takes 1." in decided.decision.reason
        assert driver.job.coverage.state == CoverageState.DEGRADED

    def test_a_plan_that_all_run_becomes_the_layout_and_is_noted(self) -> None:
        driver = with_plan()
        plan = driver.job.plan.desired
        assert plan is not None
        driver.report(*applied(plan))
        assert (driver.job.layouts.current, driver.job.plan.desired) == (plan, None)
        (noted,) = [c.incident for c in driver.all_said(SaveIncident)]
        assert "generation 2" in noted.actions[0]
        assert driver.job.layouts.reason in noted.actions[0]
        assert driver.job.layouts.baseline == FIRST

    def test_after_recovery_the_layout_goes_home(self) -> None:
        driver = with_plan()
        plan, number = driver.job.plan.desired, driver.job.progress.step + 1
        assert plan is not None
        driver.report(*applied(plan))
        while driver.job.open_incidents:
            # The slow rank is as fast as the others again, whatever its work.
            driver.report(*step(number, generation=2))
            number += 1
            assert number < 100, "it never recovers"
        train(driver, number, number + 6, generation=2)
        baseline = driver.job.plan.desired
        assert baseline is not None
        assert (baseline.generation, baseline.ranks) == (3, FIRST.ranks)
        assert (baseline.experts, baseline.batch_shares) == (FIRST.experts, FIRST.batch_shares)
        driver.report(*applied(baseline))
        assert driver.job.layouts.baseline is None
        assert not driver.job.open_incidents
        assert driver.job.incidents[0].finding.slowdown == pytest.approx(1.6, rel=0.1)

    def test_home_is_the_layout_before_the_first_of_several_findings(self) -> None:
        driver = with_plan()
        assert driver.job.plan.desired is not None
        driver.report(*applied(driver.job.plan.desired))
        number = driver.job.progress.step
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
        assert driver.job.layouts.baseline == FIRST

    def test_home_is_forgotten_where_nothing_was_done(self) -> None:
        driver = started(replace(QUICK, policy=PolicyConfig(mode="observe")))
        train(driver, 0, WARM)
        train(driver, WARM, WARM + 12, slow=2)
        assert (len(driver.job.open_incidents), driver.job.layouts.baseline) == (1, FIRST)
        train(driver, WARM + 12, WARM + 50)
        assert (len(driver.job.open_incidents), driver.job.layouts.baseline) == (0, None)

    def test_a_plan_around_a_slow_rank_is_undone_even_where_the_way_home_is_lost(self) -> None:
        driver = with_plan()
        survivors = shrink(FIRST, dead=[0], generation=3, floor=FLOOR)
        driver.report(exited(0), *applied(survivors), layouts=[survivors])
        number = driver.job.progress.step
        while driver.job.plan.desired is None:
            number += 1
            driver.report(*step(number, ranks=[1, 2, 3], generation=3, slow=2))
            assert number < 60, "no plan for the survivors"
        around = driver.job.plan.desired
        driver.report(*applied(around))
        while driver.job.open_incidents:
            number += 1
            driver.report(*step(number, ranks=[1, 2, 3], generation=around.generation))
            assert number < 90, "it never recovers"
        # At once: not only when the layout has grown old enough for hot experts' sake.
        assert driver.job.plan.desired is not None
        assert len(set(driver.job.plan.desired.rows_of(30).values())) == 1

    def test_history_keeps_the_slowdown_of_a_finding_that_is_ending(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = with_plan()
        for told, kept in ((1.9, 1.9), (1.05, 1.9)):
            monkeypatch.setattr(
                peer_groups,
                "update_evidence",
                lambda *x, told=told: _re_measured(update_evidence(*x), {2: told}),
            )
            driver.report(*step(driver.job.progress.step + 1, slow=2))
            assert driver.job.incidents[0].finding.slowdown == kept

    def test_observing_decides_and_offers_nothing(self) -> None:
        driver = started(replace(QUICK, policy=PolicyConfig(mode="observe")))
        train(driver, 0, WARM)
        said = ""
        for number in range(WARM, WARM + 12):
            driver.report(*step(number, slow=2))
            assert not driver.all_said(OfferPlan)
            said += driver.texts
        assert driver.job.plan.last_decision is not None
        assert driver.job.plan.last_decision.level is MitigationLevel.BATCH_SHARES
        assert said.count("decision=batch_shares") == 1
        assert driver.job.layouts.newest_generation == 1

    def test_a_trainer_without_model_shape_is_watched_but_never_moved(self) -> None:
        driver = Driver(config=QUICK)
        driver.report(attached=[attachment(rank, model=None) for rank in range(4)])
        for number in range(WARM + 12):
            driver.report(*step(number, slow=2 if number >= WARM else None))
        assert [i.finding.rank for i in driver.job.open_incidents] == [2]
        assert driver.job.plan.desired is None
