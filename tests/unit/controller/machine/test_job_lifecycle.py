"""Jobs end, and what is known of them leaves the memory; who asks soon still finds them."""

from dataclasses import replace

import pytest

from pacekeeper.controller.api.messages import job_view
from pacekeeper.controller.machine import job_lifecycle
from pacekeeper.controller.machine.job_lifecycle import DAY_S, KEEP_SILENT_S
from pacekeeper.controller.state import state
from pacekeeper.controller.state.events import (
    ForgetJob,
    NodeDetached,
    SaveIncident,
    SaveJob,
)
from pacekeeper.controller.state.state import RankStatus
from pacekeeper.core.config.controller import ControllerConfig, RetentionConfig
from pacekeeper.core.incidents.findings import CoverageState, Finding, FindingKind, Incident, Tier
from support.machine_driver import (
    FIRST,
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
    with_plan,
)

KEEP_ENDED_S = RetentionConfig().ended_job_days * DAY_S


def ended() -> Driver:
    """A slow rank, a plan for it, then everybody finishes."""
    driver = with_plan()
    driver.report(*[exited(rank, signal=0) for rank in range(4)])
    driver.tick()
    return driver


def watch_of(driver: Driver) -> CoverageState:
    return driver.job.coverage.state


class TestEnding:
    def test_what_was_measured_is_dropped_and_what_happened_is_not(self) -> None:
        driver = ended()
        job = driver.job
        assert (job.coverage.state, job.coverage.reason) == (
            CoverageState.ENDED,
            "no rank runs any more",
        )
        assert job.detection.evidence.model is None and not job.detection.evidence.history
        assert (job.progress.pending, dict(job.heard_s), job.workload.loads, job.layouts.known) == (
            {},
            {},
            (),
            {},
        )
        assert job.plan.desired is None and job.layouts.baseline is None and not job.plan.asked
        assert [i.finding.kind for i in job.incidents] == [FindingKind.DEVICE]
        assert job.layouts.current == FIRST
        view = job_view(driver.state, job)
        assert (view.watch, view.tokens_per_s, view.step) == ("ended", 0.0, job.progress.step)
        assert [rank.state for rank in view.ranks] == ["finished"] * 4

    def test_a_finding_can_not_outlive_its_job_a_death_is_left_to_be_seen(self) -> None:
        driver = with_plan()
        driver.report(exited(0), *[exited(rank, signal=0) for rank in range(1, 4)])
        driver.tick()
        is_open = {i.finding.kind: i.is_open for i in driver.job.incidents}
        assert is_open == {FindingKind.DEVICE: False, FindingKind.DEATH: True}
        (closed,) = [c.incident for c in driver.all_said(SaveIncident)]
        assert closed.actions[-1] == "the job ended"

    def test_it_is_said_and_stored_once(self) -> None:
        driver = ended()
        assert "watch=ended was=" in driver.texts
        assert driver.all_said(SaveJob)
        driver.tick()
        assert driver.said == ()

    def test_one_that_still_runs_keeps_the_job_alive(self) -> None:
        driver = started(QUICK)
        train(driver, 0, WARM)
        driver.report(*[exited(rank, signal=0) for rank in range(3)])
        driver.tick()
        assert watch_of(driver) != CoverageState.ENDED
        assert driver.job.detection.evidence.model is not None

    def test_a_stored_job_that_was_over_is_ended_not_blind(self) -> None:
        driver = ended()
        driver.start_again()
        assert watch_of(driver) == CoverageState.BLIND
        driver.tick()
        assert watch_of(driver) == CoverageState.ENDED
        view = job_view(driver.state, driver.job)
        assert [rank.state for rank in view.ranks] == ["finished"] * 4
        assert [i.incident_id for i in driver.job.incidents] == [1]

    def test_a_stored_job_with_a_rank_that_lived_is_blind_until_it_is_heard(self) -> None:
        driver = with_plan()
        driver.report(exited(0))
        driver.start_again()
        driver.report(attached=[attachment(0)])  # the dead one is told first
        driver.tick()
        assert watch_of(driver) == CoverageState.BLIND

    def test_an_agent_that_says_the_dead_again_brings_nobody_back(self) -> None:
        driver = ended()
        driver.start_again()
        driver.report(attached=[attachment(rank) for rank in range(4)], layouts=[FIRST])
        driver.tick()
        assert watch_of(driver) == CoverageState.ENDED
        assert {rank.status for rank in driver.job.ranks.values()} == {RankStatus.FINISHED}

    def test_a_rank_that_comes_late_wakes_the_job(self) -> None:
        driver = Driver(config=QUICK)
        driver.agent("node-0")
        driver.report(attached=[attachment(0)], layouts=[FIRST])
        driver.report(exited(0, signal=0))
        driver.tick()
        assert watch_of(driver) == CoverageState.ENDED
        driver.report(attached=[attachment(rank) for rank in range(1, 4)])
        driver.report(*applied(FIRST, ranks=range(1, 4)))
        driver.tick()
        assert driver.job.ended_s is None
        for number in range(WARM):
            driver.report(*step(number, ranks=range(1, 4)))
        driver.tick()
        assert watch_of(driver) == CoverageState.HEALTHY

    def test_a_new_life_begins_where_the_old_one_ended(self) -> None:
        driver = ended()
        driver.report(attached=[attachment(rank, pid=900 + rank) for rank in range(4)])
        driver.report(*applied(FIRST), layouts=[FIRST])
        driver.tick()
        assert driver.job.ended_s is None
        assert driver.job.living == (0, 1, 2, 3)
        train(driver, 0, WARM)
        assert watch_of(driver) == CoverageState.HEALTHY


class TestForgetting:
    def test_an_ended_job_can_be_asked_for_a_while_then_it_goes(self) -> None:
        driver = ended()
        driver.tick(KEEP_ENDED_S - 1.0)
        assert driver.job.incidents
        driver.tick(2.0)
        assert driver.state.jobs == {}
        assert driver.all_said(ForgetJob) == [ForgetJob(job=JOB)]
        assert "forgotten: it ended 3 days ago" in driver.texts
        driver.tick()
        assert driver.said == ()

    def test_the_newest_ended_jobs_stay_and_crowd_the_older_ones_out(self) -> None:
        few = ControllerConfig(retention=RetentionConfig(ended_jobs=2))
        driver = ended()
        driver.config = few
        for name in ("second", "third"):
            assert JOB in driver.state.jobs, "there is room"
            later = replace(driver.job, name=name, ended_s=driver.now_s + 1.0, incidents=())
            driver.state = replace(driver.state, jobs={**driver.state.jobs, name: later})
            driver.tick(2.0)
        assert set(driver.state.jobs) == {"second", "third"}
        assert driver.all_said(ForgetJob) == [ForgetJob(job=JOB)]
        assert f"job={JOB} forgotten: 2 jobs" in driver.texts

    def test_large_jobs_that_ended_leave_room_for_few(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_lifecycle, "ENDED_RANKS", 11)  # these have four each
        driver = ended()
        for at, name in enumerate(("second", "third", "running"), start=1):
            ended_s = None if name == "running" else driver.now_s + at
            job = replace(driver.job, name=name, ended_s=ended_s, incidents=())
            driver.state = replace(driver.state, jobs={**driver.state.jobs, name: job})
        driver.tick(10.0)
        assert JOB not in driver.state.jobs
        assert {"second", "third", "running"} == set(driver.state.jobs)

    def test_the_newest_ended_job_stays_however_large(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_lifecycle, "ENDED_RANKS", 1)
        driver = ended()
        driver.tick()
        assert JOB in driver.state.jobs

    def test_it_leaves_no_open_incident_behind(self) -> None:
        driver = started()
        driver.report(*[exited(rank) for rank in range(4)])
        driver.tick()
        assert [i.unresolved_ranks for i in driver.job.open_incidents] == [((0, 3),)]
        driver.tick(KEEP_ENDED_S + 1.0)
        (told,) = [command.incident for command in driver.all_said(SaveIncident)]
        assert not told.is_open and told.unresolved_ranks == ()

    def test_a_job_nobody_speaks_of_goes_one_that_is_spoken_of_stays(self) -> None:
        driver = started()
        driver.tick(KEEP_SILENT_S - 1.0)
        assert watch_of(driver) == CoverageState.BLIND
        driver.report(*step(0))
        driver.tick(2.0)
        driver.tick(KEEP_SILENT_S - 10.0)
        assert JOB in driver.state.jobs
        driver.tick(20.0)
        assert driver.state.jobs == {}
        assert f"job={JOB} forgotten" in driver.texts

    def test_the_silence_of_a_stored_job_begins_with_our_start(self) -> None:
        driver = started()
        driver.now_s = 9 * KEEP_SILENT_S
        driver.start_again()
        driver.tick()
        driver.tick(KEEP_SILENT_S - 10.0)
        assert JOB in driver.state.jobs
        driver.tick(20.0)
        assert driver.state.jobs == {}

    def test_nodes_that_are_away_for_long_go_those_that_stay_do_not(self) -> None:
        driver = started()
        driver.event(NodeDetached(node="node-1", agent_incarnation="a"))
        driver.tick(KEEP_SILENT_S + 1.0)
        assert set(driver.state.nodes) == {"node-0"}

    def test_a_forgotten_job_that_speaks_again_is_measured_anew(self) -> None:
        driver = started()
        driver.tick(KEEP_SILENT_S + 1.0)
        driver.report(attached=[attachment(rank) for rank in range(4)], layouts=[FIRST])
        driver.report(*applied(FIRST))
        assert driver.job.layouts.current == FIRST

    @pytest.mark.parametrize("num_open", [0, 2])
    def test_of_a_long_history_the_newest_incidents_and_all_open_ones_are_kept(
        self, num_open: int
    ) -> None:
        many = [incident(i, is_open=i < num_open) for i in range(state.KEPT_INCIDENTS + 10)]
        kept = state.newest_incidents(many)
        assert [i.incident_id for i in kept[:num_open]] == list(range(num_open))
        assert list(kept[num_open:]) == many[10:]


def incident(number: int, *, is_open: bool) -> Incident:
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.PROBABLE,
        rank=0,
        slowdown=2.0,
        onset_step=0,
        step=0,
        reason="",
    )
    made = Incident(incident_id=number, job=JOB, finding=finding, opened_unix_s=0.0)
    return made if is_open else replace(made, closed_unix_s=1.0)
