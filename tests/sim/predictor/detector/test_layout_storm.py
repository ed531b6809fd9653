"""Plans that change every rank's work, faults in the middle of things: nobody wrongly named."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import CoverageState, Finding, Tier
from pacekeeper.predictor.detector.state import Evidence, begin
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import seeds
from support.synthetic_job import CPU_CLOCK, DEVICE_CLOCK, Noise, SyntheticJob

CONFIG = DetectorConfig()
CLOCKS = pytest.mark.parametrize("noise", [DEVICE_CLOCK, CPU_CLOCK], ids=["device", "cpu"])


def run(
    job: SyntheticJob,
    num_steps: int,
    slow: Mapping[int, float] | None = None,
    evidence: Evidence | None = None,
) -> tuple[Evidence, list[Finding], list[int]]:
    """(evidence, new findings, recovered ranks) after `num_steps` more steps."""
    evidence = begin() if evidence is None else evidence
    found: list[Finding] = []
    recovered: list[int] = []
    for _ in range(num_steps):
        evidence, judgement = update_evidence(CONFIG, evidence, job.next(slow))
        found += judgement.findings
        recovered += judgement.recovered
    return evidence, found, recovered


@CLOCKS
@pytest.mark.parametrize("seed", seeds(10))
def test_no_plan_ever_accuses_a_healthy_rank(seed: int, noise: Noise) -> None:
    job = SyntheticJob(seed=seed, **noise)
    evidence, found, _ = run(job, 30)
    for period in (3, 5, 8, 13, 21, 34):
        job.shuffle()
        evidence, more, _ = run(job, period, evidence=evidence)
        found += more
    assert found == []


@pytest.mark.parametrize("seed", seeds(10))
def test_no_plan_makes_a_slow_rank_look_well(seed: int) -> None:
    job, slow = SyntheticJob(seed=seed, **DEVICE_CLOCK), {seed % 4: 1.6}
    evidence, _, _ = run(job, 40)
    evidence, found, recovered = run(job, 10, slow, evidence)
    for replicas in (2, 3, 4, 1):
        job.plan(slow, replicas=replicas)
        evidence, more, over = run(job, 12, slow, evidence)
        found, recovered = found + more, recovered + over
    assert [finding.rank for finding in found] == [seed % 4]
    assert recovered == []


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", seeds(6))
def test_a_fault_that_begins_in_mid_step_is_measured_without_that_step(
    seed: int, part: float
) -> None:
    job, rank = SyntheticJob(seed=seed, **DEVICE_CLOCK), seed % 4
    evidence, _, _ = run(job, 40)
    evidence, early, _ = run(job, 1, {rank: 1.0 + 0.6 * part}, evidence)
    evidence, found, _ = run(job, 2, {rank: 1.6}, evidence)
    assert early == []
    assert [finding.rank for finding in found] == [rank]
    assert found[0].slowdown == pytest.approx(1.6, rel=0.08)


@pytest.mark.parametrize("num_healthy", [3, 4, 6, 10])
@pytest.mark.parametrize("seed", seeds(4))
def test_a_fault_that_begins_after_few_healthy_steps_is_named(seed: int, num_healthy: int) -> None:
    job, rank = SyntheticJob(seed=seed, **DEVICE_CLOCK), seed % 4
    evidence, _, _ = run(job, CONFIG.skip_steps + num_healthy)
    evidence, found, _ = run(job, 4, {rank: 1.6}, evidence)
    assert [finding.rank for finding in found] == [rank]
    assert found[0].slowdown == pytest.approx(1.6, rel=0.1)


@pytest.mark.parametrize("seed", seeds(8))
def test_on_a_quiet_clock_three_healthy_steps_and_two_slow_ones_suffice(seed: int) -> None:
    job, rank = SyntheticJob(seed=seed, noise=0.004), seed % 4
    evidence, _, _ = run(job, CONFIG.skip_steps + 3)
    evidence, found, _ = run(job, 2, {rank: 1.2}, evidence)
    assert [finding.rank for finding in found] == [rank]


@pytest.mark.parametrize("seed", seeds(8))
def test_a_rank_that_is_slow_from_the_first_step_is_named_beside_its_peers(seed: int) -> None:
    job, rank = SyntheticJob(seed=seed, num_ranks=8, noise=0.004), seed % 8
    _, found, _ = run(job, CONFIG.skip_steps + 5, {rank: 1.2})
    assert [finding.rank for finding in found] == [rank]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_in_small_jobs_the_slow_rank_is_named_and_no_other(num_ranks: int) -> None:
    for seed in range(8):
        job = SyntheticJob(seed=seed, num_ranks=num_ranks, **DEVICE_CLOCK)
        evidence, _, _ = run(job, 40)
        _, found, _ = run(job, 30, {seed % num_ranks: 1.6}, evidence)
        assert [finding.rank for finding in found] == [seed % num_ranks]


@pytest.mark.parametrize("seed", seeds(6))
def test_two_slow_of_four_at_once_are_both_named_and_measured(seed: int) -> None:
    job = SyntheticJob(seed=seed, **DEVICE_CLOCK)
    evidence, _, _ = run(job, 40)
    evidence, found, _ = run(job, 12, {0: 1.6, 3: 1.6}, evidence)
    assert sorted(finding.rank or 0 for finding in found) == [0, 3]
    assert evidence.slow == {0: pytest.approx(1.6, rel=0.1), 3: pytest.approx(1.6, rel=0.1)}


def test_what_has_been_seen_long_enough_beside_healthy_peers_is_confirmed() -> None:
    job = SyntheticJob(seed=1, **DEVICE_CLOCK)
    evidence, _, _ = run(job, 40)
    _, (fresh,), _ = run(job, 8, {2: 1.6}, evidence)
    assert fresh.tier is Tier.PROBABLE
    assert fresh.onset_step == 40
    _, (old,), _ = run(SyntheticJob(seed=1, **DEVICE_CLOCK), 20, {2: 1.6})
    assert old.tier is Tier.CONFIRMED
    assert "3 healthy peers" in old.reason
    pair = SyntheticJob(seed=1, num_ranks=2, **DEVICE_CLOCK)
    evidence, _, _ = run(pair, 40)
    _, (lonely,), _ = run(pair, 30, {1: 1.2}, evidence)
    assert lonely.tier is Tier.PROBABLE  # one peer can not confirm


def test_a_rank_that_lacks_steps_keeps_its_evidence() -> None:
    job = SyntheticJob(seed=4, noise=0.02, missing=0.5)
    evidence, healthy, _ = run(job, 60)
    _, found, _ = run(job, 30, {1: 1.4}, evidence)
    assert healthy == []
    assert [finding.rank for finding in found] == [1]


def test_a_rank_that_joins_late_is_judged_like_the_others() -> None:
    job = SyntheticJob(seed=5, **DEVICE_CLOCK)
    evidence = begin()
    for _ in range(40):
        sample = job.next()
        three = replace(
            sample,
            ranks=sample.ranks[:3],
            features=sample.features[:3],
            observed_s=sample.observed_s[:3],
        )
        evidence, _ = update_evidence(CONFIG, evidence, three)
    evidence, healthy, _ = run(job, 20, evidence=evidence)
    _, found, _ = run(job, 6, {3: 1.6}, evidence)
    assert healthy == []
    assert [finding.rank for finding in found] == [3]


def test_the_evidence_before_a_step_is_not_written_to() -> None:
    job = SyntheticJob(seed=6, **DEVICE_CLOCK)
    before, _, _ = run(job, 40)
    sample = job.next({0: 1.6})
    once, twice = update_evidence(CONFIG, before, sample), update_evidence(CONFIG, before, sample)
    assert once[1] == twice[1]
    assert once[0].charts.levels.tolist() == twice[0].charts.levels.tolist()


def test_suspicion_is_told_before_anybody_is_named() -> None:
    job = SyntheticJob(seed=7, **DEVICE_CLOCK)
    evidence, _, _ = run(job, 40)
    _, judgement = update_evidence(CONFIG, evidence, job.next({1: 1.6}))
    assert judgement.findings == ()
    assert judgement.watch is CoverageState.SUSPICIOUS
    assert "rank 1" in judgement.reason


@pytest.mark.parametrize("seed", seeds(6))
def test_a_rank_known_to_be_slow_is_no_witness_for_another(seed: int) -> None:
    job = SyntheticJob(seed=seed, num_ranks=3, **DEVICE_CLOCK)
    evidence, _, _ = run(job, 40)
    evidence, first, _ = run(job, 10, {0: 2.0}, evidence)
    _, second, _ = run(job, 20, {0: 2.0, 1: 1.3}, evidence)
    assert [finding.rank for finding in first + second] == [0, 1]
    assert second[0].slowdown == pytest.approx(1.3, rel=0.1)


def test_a_rank_without_peers_can_not_be_told_from_everybody() -> None:
    job = SyntheticJob(seed=8, num_ranks=1, **DEVICE_CLOCK)
    evidence, _, _ = run(job, 40)
    evidence, found, _ = run(job, 20, {0: 1.6}, evidence)
    _, judgement = update_evidence(CONFIG, evidence, job.next({0: 1.6}))
    assert found == []
    assert judgement.watch is CoverageState.SUSPICIOUS
    assert "rank 0 is x1.6" in judgement.reason and "no peer" in judgement.reason


@pytest.mark.parametrize("seed", seeds(12))
def test_on_a_noisy_clock_a_lifted_fault_is_over_within_a_few_steps(seed: int) -> None:
    job, rank = SyntheticJob(seed=seed, **CPU_CLOCK), seed % 4
    evidence, _, _ = run(job, 40)
    evidence, found, early = run(job, 30, {rank: 2.5}, evidence)
    evidence, more, recovered = run(job, 30, evidence=evidence)
    assert [finding.rank for finding in found] == [rank]
    assert (early, more) == ([], [])
    assert recovered == [rank]


@pytest.mark.parametrize("seed", [310027, 700370])
def test_the_first_plan_of_a_job_with_unusual_costs_accuses_nobody(seed: int) -> None:
    # Jobs in which many steps of few ranks once passed for knowledge of what a share costs.
    job = SyntheticJob(seed=seed, **DEVICE_CLOCK)
    evidence, found, _ = run(job, 16 if seed == 700370 else 40)
    for _ in range(3):
        job.shuffle()
        evidence, more, _ = run(job, 14, evidence=evidence)
        found += more
    assert found == []
