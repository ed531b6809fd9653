"""A live job whose ranks tell no compute times is watched as a whole; no rank of it is accused."""

from collections.abc import Callable

import numpy as np
import pytest

from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.events import OfferPlan, StepSummary
from pacekeeper.core.incidents.findings import Blindness, CoverageState, Finding, FindingKind, Tier
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.predictor.job_level.online import LEAST_STEPS, LOOK_STEPS
from support.examples import seeds
from support.machine_driver import JOB, QUICK, Driver, attachment, step
from support.scrapes import value

RANKS = range(4)
FAULT, LASTED = 300, 150


class Foreign:
    """A trainer that tells how long its steps took, and their lengths if `tells_lengths`.

    A step takes 50 ms, 50 us for each token and 1 ns for each squared one.
    """

    def __init__(self, seed: int = 0, *, tells_lengths: bool = True) -> None:
        self.draw = np.random.default_rng(seed)
        self.tells_lengths = tells_lengths
        self.driver = Driver(config=QUICK)
        self.driver.agent("node-0")
        self.attach()
        self.number = 0
        self.plans = 0

    def attach(self) -> None:
        self.driver.report(attached=[attachment(rank, model=None) for rank in RANKS])

    def steps(
        self, count: int, *, slowdown: float = 1.0, tokens: Callable[[int], int] = lambda _: 4000
    ) -> None:
        for _ in range(count):
            self.driver.now_s += 0.3
            self.driver.report(*self.ends(slowdown, tokens(self.number)))
            self.plans += len(self.driver.all_said(OfferPlan))
            self.number += 1

    def ends(self, slowdown: float, tokens: int) -> list[Record]:
        squares = tokens * 500
        took_s = (0.05 + 5e-5 * tokens + 1e-9 * squares) * slowdown
        took_s *= float(np.exp(self.draw.normal(0.0, 0.01)))
        if not self.tells_lengths:
            tokens = squares = 0
        return [
            StepRecord(
                rank=rank, step=self.number, generation=0, duration_s=took_s, tokens=tokens,
                sum_len_squared=squares,
            )
            for rank in RANKS
        ]  # fmt: skip

    @property
    def watch(self) -> str:
        return self.driver.job.coverage.state.value

    @property
    def found(self) -> list[Finding]:
        return [incident.finding for incident in self.driver.job.incidents]


def test_a_step_is_judged_once_the_last_rank_has_ended_it() -> None:
    job = Foreign()
    job.steps(20)
    *ends, last = job.ends(1.0, 4000)
    job.driver.report(*ends)
    assert not job.driver.all_said(StepSummary)
    job.driver.report(last)
    (summary,) = job.driver.all_said(StepSummary)
    assert summary.step == job.number


def test_its_state_is_its_own_and_says_what_would_be_seen() -> None:
    job = Foreign()
    job.steps(LEAST_STEPS - 1)
    assert (job.driver.job.coverage.state, job.driver.job.coverage.blind) == (
        CoverageState.MEASURING,
        None,
    )
    assert f"{LEAST_STEPS - 1} of {LEAST_STEPS} step times" in job.driver.job.coverage.reason
    job.steps(1 + LOOK_STEPS)
    state = job.driver.job
    assert (state.coverage.state, state.coverage.blind) == (CoverageState.JOB_LEVEL, None)
    assert "no compute time" in state.coverage.reason and "able to see x1." in state.coverage.reason
    assert state.coverage.sensitivity is not None and state.coverage.sensitivity.slowdown < 1.1
    (summary,) = job.driver.all_said(StepSummary)
    assert (summary.watch, summary.tokens, summary.ranks) == (CoverageState.JOB_LEVEL, 4000, ())
    metrics = ControllerMetrics()
    metrics.update(job.driver.state)
    assert value(metrics, "job_info", job_name=JOB, watch="job_level") == 1.0


@pytest.mark.parametrize("seed", seeds(3))
def test_a_lasting_slowdown_is_the_jobs_and_no_ranks_and_is_closed_when_it_is_over(
    seed: int,
) -> None:
    job = Foreign(seed)
    job.steps(FAULT)
    assert job.found == []
    job.steps(LASTED, slowdown=1.2)
    (finding,) = job.found
    assert (finding.kind, finding.rank, finding.tier) == (FindingKind.HOST, None, Tier.PROBABLE)
    assert abs(finding.onset_step - FAULT) <= LOOK_STEPS
    assert finding.step - FAULT <= 60
    assert finding.slowdown == pytest.approx(1.2, rel=0.02)
    assert job.watch == "degraded"
    job.steps(60)
    (incident,) = job.driver.job.incidents
    assert not incident.is_open
    assert incident.actions[-1].startswith("all ranks are back at their expected time")
    assert job.watch == "job_level"
    assert job.driver.job.detection.evidence.slow == {} and job.plans == 0
    assert (
        job.driver.job.detection.measured.judgement is None
        and not job.driver.job.detection.measured.others
    )


def test_longer_sequences_explain_longer_steps() -> None:
    job = Foreign()
    job.steps(600, tokens=lambda number: 6000 if 200 <= number < 320 else 4000 + 37 * (number % 19))
    assert job.found == []
    assert job.driver.job.coverage.state is CoverageState.JOB_LEVEL


def test_without_lengths_it_is_blind_for_what_lasts_and_suspects_what_went_away() -> None:
    job = Foreign(tells_lengths=False)
    job.steps(FAULT)
    state = job.driver.job
    assert (state.coverage.state, state.coverage.blind) == (
        CoverageState.JOB_LEVEL,
        Blindness.NO_TIMES,
    )
    assert state.coverage.sensitivity is None
    job.steps(LASTED, slowdown=1.2)
    assert job.found == [], "a schedule may have done it"
    assert "workload unknown: the pace changed by x1.2" in job.driver.job.coverage.reason
    job.steps(LASTED)
    (incident,) = job.driver.job.incidents
    assert (incident.finding.tier, incident.finding.rank) == (Tier.SUSPECTED, None)
    assert not incident.is_open
    job.steps(100)
    assert len(job.found) == 1, "told once"


def test_work_that_is_told_some_steps_late_is_waited_for() -> None:
    job = Foreign()
    job.steps(4)
    assert job.driver.job.progress.step == -1
    late = [r for s in range(4) for r in step(s, generation=0) if isinstance(r, MicroBatchRecord)]
    job.driver.report(*late)
    assert job.driver.job.progress.step == 3
    assert job.driver.job.detection.whole.num_steps == 0
    assert job.driver.job.coverage.state is CoverageState.MEASURING


def test_the_first_work_told_ends_it_and_an_open_finding_is_that_of_all_ranks() -> None:
    job = Foreign()
    job.steps(FAULT)
    job.steps(LASTED, slowdown=1.2)
    job.driver.report(*step(job.number, generation=0))
    state = job.driver.job
    assert state.detection.tells_work and not state.detection.whole.is_open
    assert state.detection.evidence.common is not None and state.detection.evidence.common.is_open
    assert len(state.open_incidents) == 1


def test_times_that_come_back_take_an_open_finding_over() -> None:
    job = Foreign()
    job.driver.report(*step(0, generation=0))  # its clocks work for a step
    job.number = 1

    def untimed(slowdown: float) -> list[Record]:
        return [
            *job.ends(slowdown, 4000),
            *(
                MicroBatchRecord(
                    rank=rank, step=job.number, micro_batch=0, generation=0, compute_s=0.0,
                    tokens=1000, sum_len_squared=9000,
                )
                for rank in RANKS
            ),
        ]  # fmt: skip

    for number in range(1, FAULT + 100):
        job.number = number
        job.driver.now_s += 0.3
        job.driver.report(*untimed(1.2 if number >= FAULT else 1.0))
    assert [finding.kind for finding in job.found] == [FindingKind.HOST]
    job.driver.report(*step(job.number + 1, generation=0))
    state = job.driver.job
    assert not state.detection.whole.is_open
    assert state.detection.evidence.common is not None and state.detection.evidence.common.is_open


def test_after_a_restart_its_pace_is_measured_anew_and_that_is_said() -> None:
    job = Foreign()
    job.steps(FAULT)
    job.steps(LASTED, slowdown=1.2)
    job.driver.start_again()
    job.driver.agent("node-0")
    job.attach()
    job.steps(LEAST_STEPS, slowdown=1.2)
    (incident,) = job.driver.job.incidents
    assert not incident.is_open
    assert incident.actions[-1] == "its pace is measured anew"


def test_a_rank_that_tells_work_leaves_the_others_missing_and_not_unwatched() -> None:
    job = Foreign()
    for number in range(40):
        job.driver.now_s += 1.0
        records = [
            record
            for record in step(number, generation=0)
            if isinstance(record, StepRecord) or record.rank == 0
        ]
        job.driver.report(*records)
        job.driver.tick(0.0)
    assert (job.driver.job.coverage.state, job.driver.job.coverage.blind) == (
        CoverageState.BLIND,
        Blindness.NO_STEPS,
    )
