"""The detector with micro-batches: as sure within one step as it was after several."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding
from pacekeeper.predictor.detector.state import Evidence, begin
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import seeds
from support.synthetic_job import CPU_CLOCK, DEVICE_CLOCK, Noise, SyntheticJob

CONFIG = DetectorConfig()
HEALTHY_STEPS, PARTS = 40, 8


def run(
    job: SyntheticJob, num_steps: int, evidence: Evidence, slow: Mapping[int, float] | None = None
) -> tuple[Evidence, list[Finding]]:
    found: list[Finding] = []
    for _ in range(num_steps):
        evidence, judgement = update_evidence(CONFIG, evidence, job.next(slow))
        found += judgement.findings
    return evidence, found


@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("slowdown", [1.25, 1.6])
def test_a_slow_device_is_named_by_the_micro_batches_of_its_first_slow_step(
    seed: int, slowdown: float
) -> None:
    job, rank = SyntheticJob(seed=seed, num_microbatches=PARTS, **DEVICE_CLOCK), seed % 4
    evidence, early = run(job, HEALTHY_STEPS, begin())
    evidence, found = run(job, 1, evidence, {rank: slowdown})
    assert early == []
    assert [finding.rank for finding in found] == [rank]
    assert found[0].onset_step == found[0].step == HEALTHY_STEPS
    assert found[0].slowdown == pytest.approx(slowdown, rel=0.06)
    assert "micro-batches" in found[0].reason


@pytest.mark.parametrize("seed", seeds(6))
def test_a_fault_that_begins_within_a_step_is_measured_by_the_micro_batches_after_it(
    seed: int,
) -> None:
    job, rank = SyntheticJob(seed=seed, num_microbatches=PARTS, **DEVICE_CLOCK), seed % 4
    evidence, _ = run(job, HEALTHY_STEPS, begin())
    evidence, judgement = update_evidence(CONFIG, evidence, job.next({rank: 1.8}, slow_from_part=3))
    assert [finding.rank for finding in judgement.findings] == [rank]
    assert judgement.findings[0].slowdown == pytest.approx(1.8, rel=0.1)


@pytest.mark.parametrize("seed", seeds(6))
def test_micro_batches_of_a_healthy_job_accuse_nobody_through_changing_layouts(seed: int) -> None:
    job = SyntheticJob(seed=seed, num_microbatches=PARTS, **DEVICE_CLOCK)
    evidence, found = run(job, HEALTHY_STEPS, begin())
    for _ in range(6):
        job.shuffle()
        evidence, more = run(job, 15, evidence)
        found += more
    assert found == []


@pytest.mark.parametrize("seed", seeds(4))
def test_with_a_noisy_clock_no_single_step_names_anybody(seed: int) -> None:
    noise: Noise = {**CPU_CLOCK, "noise": 0.25}
    job = SyntheticJob(seed=seed, num_microbatches=PARTS, **noise)
    evidence, found = run(job, 120, begin())
    assert found == []
    evidence, judgement = update_evidence(CONFIG, evidence, job.next({0: 2.5}))
    assert judgement.findings == ()
    _, found = run(job, 8, evidence, {0: 2.5})
    assert [finding.rank for finding in found] == [0]


def test_two_micro_batches_of_a_step_are_no_jury() -> None:
    job = SyntheticJob(seed=4, num_microbatches=PARTS, **DEVICE_CLOCK)
    evidence, _ = run(job, HEALTHY_STEPS, begin())
    evidence, judgement = update_evidence(
        CONFIG, evidence, job.next({1: 3.0}, slow_from_part=PARTS - 2)
    )
    assert judgement.findings == ()


def test_one_wild_micro_batch_accuses_nobody() -> None:
    job = SyntheticJob(seed=3, num_microbatches=PARTS, **DEVICE_CLOCK)
    evidence, _ = run(job, HEALTHY_STEPS, begin())
    sample = job.next({2: 9.0}, slow_from_part=PARTS - 1)
    evidence, judgement = update_evidence(CONFIG, evidence, sample)
    assert judgement.findings == ()


def test_a_slow_rank_of_two_thousand_is_named_within_the_step_and_nobody_else() -> None:
    job = SyntheticJob(seed=5, num_ranks=2_000, num_microbatches=PARTS, **DEVICE_CLOCK)
    evidence, early = run(job, 24, begin())
    _, found = run(job, 1, evidence, {1234: 1.2})
    assert early == []
    assert [finding.rank for finding in found] == [1234]


def test_without_all_micro_batches_the_step_is_judged_as_a_whole() -> None:
    job = SyntheticJob(seed=6, num_microbatches=PARTS, **DEVICE_CLOCK)
    evidence, _ = run(job, HEALTHY_STEPS, begin())
    found: list[Finding] = []
    for _ in range(3):
        sample = replace(job.next({1: 1.6}), parts=None)
        evidence, judgement = update_evidence(CONFIG, evidence, sample)
        found += judgement.findings
    assert [finding.rank for finding in found] == [1]
    assert found[0].step == HEALTHY_STEPS + CONFIG.min_steps - 1
