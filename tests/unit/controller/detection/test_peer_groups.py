"""Ranks are judged beside those of their own role; who is alone in one is not watched: said."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pacekeeper.core.incidents.findings import Blindness, CoverageState, FindingKind
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from support.machine_driver import QUICK, Driver, attachment, exited

WARM = 14  # steps after which all roles have a cost model


class Pipeline:
    """A foreign trainer whose last stage does `heavy` times the work per token."""

    def __init__(self, roles: Sequence[str], *, heavy: float = 1.35) -> None:
        self.roles, self.heavy = roles, heavy
        self.slow_role = ""
        self.dead = set[int]()
        self.random = random.Random(1)
        self.driver = Driver(config=QUICK)
        self.driver.agent("node-0")
        self.attach()
        self.number = 0

    def attach(self) -> None:
        world = len(self.roles)
        own = [
            replace(attachment(0, model=None), rank=r, world_size=world, pid=100 + r, role=role)
            for r, role in enumerate(self.roles)
        ]
        self.driver.report(attached=own)

    def steps(self, count: int, *, slow: int | None = None) -> None:
        for _ in range(count):
            self.driver.now_s += 0.2
            self.driver.report(*self.step(slow))
            self.number += 1

    def kill(self, *ranks: int) -> None:
        self.dead.update(ranks)
        self.driver.report(*(exited(rank) for rank in ranks))

    def step(self, slow: int | None) -> list[Record]:
        records: list[Record] = []
        for rank, role in enumerate(self.roles):
            if rank in self.dead:
                continue
            tokens = 1000 + self.random.randrange(200)
            work = self.heavy if role == max(self.roles) else 1.0
            pace = (1.6 if rank == slow else 1.0) * self.random.gauss(1.0, 0.01)
            pace *= 1.4 if role == self.slow_role else 1.0
            records += [
                MicroBatchRecord(
                    rank=rank,
                    step=self.number,
                    micro_batch=0,
                    generation=0,
                    compute_s=1e-4 * tokens * work * pace,
                    tokens=tokens,
                    sum_len_squared=tokens * 100,
                    expert_rows=0,
                    num_active_experts=0,
                ),
                StepRecord(
                    rank=rank, step=self.number, generation=0, duration_s=0.2, tokens=tokens
                ),
            ]
        return records


FOUR_STAGES = ("s0", "s0", "s1", "s1", "s2", "s2", "s3", "s3")
TWO_STAGES = ("s0",) * 4 + ("s1",) * 4


@pytest.mark.parametrize("heavy", [1.35, 2.0])
def test_a_role_with_more_work_accuses_nobody(heavy: float) -> None:
    pipeline = Pipeline(FOUR_STAGES, heavy=heavy)
    pipeline.steps(WARM + 40)
    job = pipeline.driver.job
    assert job.incidents == ()
    assert (job.coverage.state, job.coverage.blind) == (CoverageState.HEALTHY, None)
    assert all(job.detection.measured.of(rank).slowdown is not None for rank in range(8))


@pytest.mark.parametrize("victim", [1, 6])
def test_a_slow_rank_is_named_beside_its_own_role(victim: int) -> None:
    pipeline = Pipeline(TWO_STAGES)
    pipeline.steps(WARM)
    pipeline.steps(4, slow=victim)
    (incident,) = pipeline.driver.job.incidents
    assert incident.finding.rank == victim
    assert incident.finding.slowdown == pytest.approx(1.6, rel=0.05)
    assert pipeline.driver.job.coverage.state is CoverageState.DEGRADED
    assert set(pipeline.driver.job.detection.evidence.slow) == {victim}
    pipeline.steps(12)
    assert not pipeline.driver.job.open_incidents, "it is seen to be over"


def test_ranks_that_are_alone_in_their_role_are_said_to_be_unwatched() -> None:
    pipeline = Pipeline(("s0", "s0", "s0", "head", "tail"))
    pipeline.steps(WARM + 5)
    job = pipeline.driver.job
    assert (job.coverage.state, job.coverage.blind) == (CoverageState.BLIND, Blindness.NO_PEERS)
    assert job.coverage.reason.startswith("ranks 3 and 4 ")


def test_an_open_finding_is_remembered_by_its_role_after_a_restart() -> None:
    pipeline = Pipeline(TWO_STAGES)
    pipeline.steps(WARM)
    pipeline.steps(4, slow=6)
    pipeline.driver.start_again()
    pipeline.driver.agent("node-0")
    pipeline.attach()
    pipeline.steps(WARM + 4, slow=6)
    assert len(pipeline.driver.job.incidents) == 1, "it is not found a second time"
    assert pipeline.driver.job.open_incidents, "nor taken for healthy"
    pipeline.steps(12)
    assert not pipeline.driver.job.open_incidents


def test_each_role_has_its_part_of_the_alarms_of_a_job_day() -> None:
    one, four = Pipeline(("s0",) * 8), Pipeline(FOUR_STAGES)
    for pipeline in (one, four):
        pipeline.steps(WARM)
    limits = one.driver.job.detection.evidence.limits
    assert limits is not None
    assert four.driver.job.detection.by_role.keys() == {"s0", "s1", "s2", "s3"}
    for kept in four.driver.job.detection.by_role.values():
        assert kept.limits is not None
        # A quarter of the ranks with a quarter of the alarms: each chart is as strict as before.
        for own, whole in zip(kept.limits.rules, limits.rules, strict=True):
            assert own.h == pytest.approx(whole.h, rel=0.03)


def test_canaries_go_through_all_roles() -> None:
    pipeline = Pipeline(TWO_STAGES)
    config = replace(QUICK, detector=replace(QUICK.detector, canary_period_steps=10))
    pipeline.driver.config = config
    seen = set()
    for _ in range(140):
        pipeline.steps(1)
        last = pipeline.driver.job.detection.canaries.last
        if last is not None:
            assert last.is_found
            seen.add(last.rank)
    assert {pipeline.roles[rank] for rank in seen} == {"s0", "s1"}
    assert len(seen) > 4, "each rank has its turn"


def test_a_role_whose_ranks_become_slower_together_is_one_incident_of_no_rank() -> None:
    pipeline = Pipeline(["stage-0"] * 3 + ["stage-1"] * 3)
    pipeline.steps(WARM + 10)
    pipeline.heavy *= 1.4
    pipeline.steps(12)
    (incident,) = pipeline.driver.job.open_incidents
    assert (incident.finding.kind, incident.finding.rank) == (FindingKind.HOST, None)
    assert incident.finding.reason.startswith("role stage-1: the job became slower: 3 ranks")
    assert 1.3 < incident.finding.slowdown < 1.5
    pipeline.heavy /= 1.4
    pipeline.steps(14)
    assert pipeline.driver.job.open_incidents == ()


@pytest.mark.parametrize("role", ["stage-0", "stage-1"])
def test_a_role_that_is_slow_as_a_whole_is_remembered_after_a_restart(role: str) -> None:
    pipeline = Pipeline(["stage-0"] * 3 + ["stage-1"] * 3)
    pipeline.steps(WARM + 10)
    pipeline.slow_role = role
    pipeline.steps(12)
    (found,) = pipeline.driver.job.open_incidents
    assert found.finding.role == role
    pipeline.driver.start_again()
    pipeline.driver.agent("node-0")
    pipeline.attach()
    pipeline.steps(WARM + 20)
    (still,) = pipeline.driver.job.open_incidents
    assert still.incident_id == found.incident_id, "neither closed nor found again"
    assert pipeline.driver.job.coverage.state is CoverageState.DEGRADED
    pipeline.slow_role = ""
    pipeline.steps(14)
    assert pipeline.driver.job.open_incidents == ()
    assert len(pipeline.driver.job.incidents) == 1


def test_a_role_whose_ranks_all_died_keeps_nothing_open_and_lends_no_noise() -> None:
    pipeline = Pipeline(["stage-0"] * 3 + ["stage-1"] * 3)
    pipeline.steps(WARM + 10)
    pipeline.slow_role = "stage-0"
    pipeline.steps(12)
    assert [i.finding.kind for i in pipeline.driver.job.open_incidents] == [FindingKind.HOST]
    pipeline.kill(0, 1, 2)
    pipeline.steps(WARM + 10)
    assert pipeline.driver.job.detection.by_role.keys() == {"stage-1"}
    (slow,) = (i for i in pipeline.driver.job.incidents if i.finding.kind is FindingKind.HOST)
    assert slow.closed_unix_s is not None
    assert slow.actions[-1] == "all ranks of role stage-0 died"
