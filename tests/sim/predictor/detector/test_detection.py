"""The detector on paper jobs: it names the right rank soon, and nobody else, under every clock."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import CoverageState, Finding
from pacekeeper.predictor.detector.state import Judgement, begin, forget, restore
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import seeds
from support.synthetic_job import CPU_CLOCK, DEVICE_CLOCK, SyntheticJob

CONFIG = DetectorConfig()
FAULT, LIFT, STEPS = 60, 130, 200


def play(job: SyntheticJob, slow: Mapping[int, float], *, plans: bool = True) -> list[Judgement]:
    """A healthy phase, a fault that is planned around and lifted, a healthy phase again."""
    evidence, said = begin(), []
    for step in range(STEPS):
        is_slow = FAULT <= step < LIFT
        if plans and step in (FAULT + 20, LIFT + 15):
            job.plan(slow if is_slow else None)
        evidence, judgement = update_evidence(CONFIG, evidence, job.next(slow if is_slow else None))
        said.append(judgement)
    return said


def findings(said: list[Judgement]) -> list[Finding]:
    return [finding for judgement in said for finding in judgement.findings]


@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize(("slowdown", "delay"), [(1.6, 2), (1.2, 5)])
def test_a_slow_device_is_named_at_once_and_alone(seed: int, slowdown: float, delay: int) -> None:
    rank = seed % 4
    said = play(SyntheticJob(seed=seed, **DEVICE_CLOCK), {rank: slowdown})
    (found,) = findings(said)
    assert found.rank == rank
    assert FAULT <= found.step < FAULT + delay
    assert found.slowdown == pytest.approx(slowdown, rel=0.06)
    assert f"rank {rank}" in found.reason
    (recovered,) = [j.step for j in said if j.recovered]
    assert LIFT <= recovered <= LIFT + 6


@pytest.mark.parametrize("seed", seeds(12))
def test_a_healthy_job_is_left_alone_through_changing_layouts(seed: int) -> None:
    said = play(SyntheticJob(seed=seed, **DEVICE_CLOCK), {seed % 4: 1.0})
    assert findings(said) == []
    assert {judgement.watch for judgement in said[CONFIG.warmup_steps + 4 :]} <= {
        CoverageState.HEALTHY,
        CoverageState.SUSPICIOUS,
    }


@pytest.mark.parametrize("seed", seeds(8))
def test_on_shared_cores_a_slow_rank_is_named_and_nobody_else(seed: int) -> None:
    rank = seed % 4
    found = findings(play(SyntheticJob(seed=seed, **CPU_CLOCK), {rank: 1.6}))
    assert [finding.rank for finding in found] == [rank]
    assert found[0].step < FAULT + 14


@pytest.mark.parametrize("seed", seeds(8))
def test_noise_of_shared_cores_accuses_nobody(seed: int) -> None:
    assert findings(play(SyntheticJob(seed=seed, **CPU_CLOCK), {})) == []


@pytest.mark.parametrize("seed", seeds(4))
def test_two_slow_ranks_of_eight_are_both_named(seed: int) -> None:
    job = SyntheticJob(seed=seed, num_ranks=8, **DEVICE_CLOCK)
    found = findings(play(job, {1: 1.5, 6: 2.0}))
    assert sorted(finding.rank or 0 for finding in found) == [1, 6]


@pytest.mark.parametrize("seed", range(20))  # 5, 11, ... named it, or took the others for well
def test_the_last_healthy_rank_is_named_when_it_is_slow_too_and_not_before(seed: int) -> None:
    job, draw = SyntheticJob(seed=seed, num_ranks=3, **DEVICE_CLOCK), np.random.default_rng(seed)
    evidence, host, named = begin(), 0.0, list[int | None]()

    def run(num_steps: int, *slow: int) -> None:
        """What all three share wanders by 4 %, and lasts."""
        nonlocal evidence, host
        for _ in range(num_steps):
            host = 0.9 * host + draw.normal(0.0, 0.04 * np.sqrt(1.0 - 0.9**2))
            sample = job.next(dict.fromkeys(slow, 1.5))
            sample = replace(sample, observed_s=sample.observed_s * np.exp(host))
            evidence, judgement = update_evidence(CONFIG, evidence, sample)
            named.extend(finding.rank for finding in judgement.findings)
            assert judgement.recovered == ()

    run(60)
    run(10, 0)
    run(70, 0, 1)
    assert named == [0, 1]
    run(30, 0, 1, 2)
    assert named == [0, 1, 2]


def test_when_everybody_is_late_nobody_is_named() -> None:
    said = play(SyntheticJob(seed=3, **DEVICE_CLOCK), dict.fromkeys(range(4), 1.5), plans=False)
    assert findings(said) == []
    late = said[FAULT + 5]
    assert late.watch is CoverageState.DEGRADED
    assert "all ranks together" in late.reason


def test_a_rank_slow_from_the_start_is_named_by_its_peers_after_the_warm_up() -> None:
    job, evidence = SyntheticJob(seed=5, **DEVICE_CLOCK), begin()
    found: list[Finding] = []
    for _ in range(40):
        evidence, judgement = update_evidence(CONFIG, evidence, job.next({2: 1.5}))
        found += judgement.findings
    assert [finding.rank for finding in found] == [2]
    assert found[0].step == CONFIG.skip_steps + CONFIG.warmup_steps - 1
    assert found[0].slowdown == pytest.approx(1.5, rel=0.1)


def test_a_fault_is_never_learnt_as_normal() -> None:
    job, evidence = SyntheticJob(seed=6, **DEVICE_CLOCK), begin()
    for step in range(400):
        evidence, judgement = update_evidence(
            CONFIG, evidence, job.next({1: 1.5} if step >= FAULT else None)
        )
    assert evidence.slow.keys() == {1}
    assert judgement.slowdown[1] == pytest.approx(1.5, rel=0.05)


def test_a_worse_fault_is_measured_again() -> None:
    job, evidence = SyntheticJob(seed=7, **DEVICE_CLOCK), begin()
    changes: list[float] = []
    for step in range(120):
        slowdown = 1.0 if step < FAULT else 1.3 if step < 90 else 2.0
        evidence, judgement = update_evidence(CONFIG, evidence, job.next({3: slowdown}))
        changes += [value for rank, value in judgement.changed.items() if rank == 3]
    assert changes[-1] == pytest.approx(2.0, rel=0.05)


def test_one_wild_step_accuses_nobody() -> None:
    job, evidence = SyntheticJob(seed=8, **DEVICE_CLOCK), begin()
    for step in range(100):
        evidence, judgement = update_evidence(
            CONFIG, evidence, job.next({0: 5.0} if step == FAULT else None)
        )
        assert judgement.findings == ()


def test_the_first_step_on_a_new_layout_is_judged_by_nobody() -> None:
    job, evidence = SyntheticJob(seed=9, **DEVICE_CLOCK), begin()
    for _ in range(40):
        evidence, _ = update_evidence(CONFIG, evidence, job.next())
    job.generation = 2
    _, judgement = update_evidence(CONFIG, evidence, job.next({0: 9.0}))
    assert judgement.findings == ()
    assert judgement.reason == "first step on a new layout"


def test_the_dead_are_forgotten_and_the_others_go_on() -> None:
    job, evidence = SyntheticJob(seed=10, **DEVICE_CLOCK), begin()
    for step in range(80):
        evidence, _ = update_evidence(
            CONFIG, evidence, job.next({2: 1.6} if step >= FAULT else None)
        )
    assert evidence.slow.keys() == {2}
    evidence = forget(evidence, [2])
    assert evidence.slow == {}
    assert evidence.charts.ranks == (0, 1, 3)


def test_after_a_restart_an_open_finding_is_neither_lost_nor_found_again() -> None:
    job, evidence = SyntheticJob(seed=11, **DEVICE_CLOCK), restore({1: 1.6})
    found: list[Finding] = []
    recovered: list[int] = []
    for step in range(80):
        evidence, judgement = update_evidence(
            CONFIG, evidence, job.next({1: 1.6} if step < 50 else None)
        )
        found += judgement.findings
        recovered += judgement.recovered
    assert found == []
    assert recovered == [1]


def test_a_step_with_a_missing_rank_is_judged_for_the_others() -> None:
    job, evidence = SyntheticJob(seed=12, **DEVICE_CLOCK), begin()
    for step in range(80):
        sample = job.next({0: 1.6} if step >= FAULT else None)
        if step % 3 == 0:
            sample = replace(
                sample,
                ranks=sample.ranks[:3],
                features=sample.features[:3],
                observed_s=sample.observed_s[:3],
            )
        evidence, judgement = update_evidence(CONFIG, evidence, sample)
        assert judgement.ranks == sample.ranks
    assert evidence.slow.keys() == {0}


def test_ten_thousand_ranks_are_folded_at_once() -> None:
    job, evidence = SyntheticJob(seed=13, num_ranks=10_000, **DEVICE_CLOCK), begin()
    found: list[Finding] = []
    for step in range(24):
        evidence, judgement = update_evidence(
            CONFIG, evidence, job.next({4321: 1.6} if step >= 20 else None)
        )
        found += judgement.findings
    assert [finding.rank for finding in found] == [4321]
    assert np.isfinite(judgement.slowdown).all()
