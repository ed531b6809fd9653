"""Slowdowns that begin in the first steps of a job: named soon, and nobody beside them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Blindness, CoverageState
from pacekeeper.predictor.assurance.sensitivity import blindness
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.cost.model import fit
from pacekeeper.predictor.detector.state import Evidence, begin
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import seeds
from support.synthetic_job import DEVICE_CLOCK, SyntheticJob

CONFIG = DetectorConfig()
SEEDS = 12


def job_of(seed: int, *, num_ranks: int, num_microbatches: int = 1) -> SyntheticJob:
    return SyntheticJob(
        seed=seed, num_ranks=num_ranks, num_microbatches=num_microbatches, **DEVICE_CLOCK
    )


def named(
    job: SyntheticJob, evidence: Evidence, num_steps: int, slow: Mapping[int, float]
) -> tuple[Evidence, list[int | None]]:
    """The ranks that are named within so many steps."""
    ranks: list[int | None] = []
    for _ in range(num_steps):
        evidence, judgement = update_evidence(CONFIG, evidence, job.next(slow))
        ranks += [finding.rank for finding in judgement.findings]
    return evidence, ranks


@pytest.mark.parametrize("num_microbatches", [1, 8])
@pytest.mark.parametrize("slowdown", [1.6, 2.5])
@pytest.mark.parametrize("seed", [*seeds(SEEDS), 23, 55])  # the last: peers of it were named too
def test_a_slow_rank_among_eight_is_named_after_three_healthy_steps(
    seed: int, slowdown: float, num_microbatches: int
) -> None:
    job = job_of(seed, num_ranks=8, num_microbatches=num_microbatches)
    evidence, early = named(job, begin(), 3, {})
    _, ranks = named(job, evidence, 4, {seed % 8: slowdown})
    assert early == []
    assert ranks == [seed % 8]


@pytest.mark.parametrize("slowdown", [1.6, 2.5])
@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_the_peer_of_a_slow_rank_is_not_named_before_the_pace_of_both_is_known(
    seed: int, slowdown: float
) -> None:
    job = job_of(seed, num_ranks=2, num_microbatches=8)
    evidence, _ = named(job, begin(), 4, {})
    _, ranks = named(job, evidence, 12, {0: slowdown})
    assert set(ranks) <= {0}


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_it_is_named_when_it_becomes_slow_too_once_that_is_known(seed: int) -> None:
    job = job_of(seed, num_ranks=2, num_microbatches=8)
    evidence, _ = named(job, begin(), 40, {})
    evidence, first = named(job, evidence, 6, {0: 1.6})
    _, second = named(job, evidence, 6, {0: 1.6, 1: 1.6})
    assert (first, second) == ([0], [1])


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_nobody_recovers_beside_a_peer_that_became_slow_too_before_that_is_known(seed: int) -> None:
    job = job_of(seed, num_ranks=2, num_microbatches=8)
    evidence, _ = named(job, begin(), 4, {})
    evidence, _ = named(job, evidence, 4, {0: 1.6})
    before = set(evidence.slow)
    for _ in range(20):
        evidence, judgement = update_evidence(CONFIG, evidence, job.next({0: 1.6, 1: 1.6}))
        assert judgement.recovered == ()
    assert before <= set(evidence.slow)
    blind = blindness(CONFIG, evidence, (0, 1), step=job.step)
    assert not before or (blind is not None and blind.why is Blindness.NO_PEERS)


@pytest.mark.parametrize("seed", seeds(SEEDS))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_last_rank_is_known_by_its_own_steps_beside_ranks_that_were_slow_early(
    seed: int, num_ranks: int
) -> None:
    """All but one become slow before the role's pace is known; then they heal, and it is slow."""
    job, last = job_of(seed, num_ranks=num_ranks, num_microbatches=8), num_ranks - 1
    evidence, _ = named(job, begin(), 6, {})
    for first in range(1, num_ranks):
        evidence, _ = named(job, evidence, 3, dict.fromkeys(range(first), 1.5))
    evidence, _ = named(job, evidence, 50, dict.fromkeys(range(last), 1.5))
    assert set(evidence.slow) == set(range(last))
    evidence, found = named(job, evidence, 10, {last: 1.5})
    assert (found, set(evidence.slow)) == ([last], {last})
    evidence, _ = named(job, evidence, 10, {})
    assert not evidence.slow


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_where_most_ranks_are_slow_from_the_start_the_other_is_noted(seed: int) -> None:
    """Nothing tells them from a job with one fast rank, which is healthy, too."""
    job, evidence = job_of(seed, num_ranks=4), begin()
    for _ in range(60):
        evidence, judgement = update_evidence(CONFIG, evidence, job.next({0: 1.5, 2: 1.5, 3: 1.5}))
    assert (judgement.watch, dict(evidence.slow)) == (CoverageState.HEALTHY, {})
    assert "rank 1 is x1.5" in judgement.reason or "rank 1 is x1.4" in judgement.reason
    evidence, judgement = update_evidence(CONFIG, begin(), job.next())
    for _ in range(60):
        evidence, judgement = update_evidence(CONFIG, evidence, job.next())
        assert "faster" not in judgement.reason


def num_learnt(num_first: int, times: Array, seed: int) -> int:
    """Of how many steps a model has learnt whose job's first steps took `times` as long [ranks]."""
    job, evidence = SyntheticJob(seed=seed, num_ranks=len(times), noise=0.005), begin()
    for step in range(CONFIG.skip_steps + CONFIG.warmup_steps):
        sample = job.next()
        if step < num_first:
            sample = replace(sample, observed_s=sample.observed_s * times)
        evidence, _ = update_evidence(CONFIG, evidence, sample)
    return evidence.fitted_steps


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_first_steps_are_learnt_from_unless_they_took_longer_than_others(seed: int) -> None:
    whole = CONFIG.skip_steps + CONFIG.warmup_steps
    assert num_learnt(0, np.ones(4), seed) == whole
    for times in (np.full(4, 1.5), np.array([1.0, 1.0, 1.0, 1.12]), np.array([1.5, 1.0, 1.0, 1.0])):
        assert num_learnt(1, times, seed) == whole - 1
        assert num_learnt(2, times, seed) == CONFIG.warmup_steps


def test_a_fault_that_begins_within_a_short_history_is_not_its_noise() -> None:
    ratios = []
    for seed in range(30):
        job = job_of(seed, num_ranks=2)
        healthy = [job.next() for _ in range(6)]
        slow = [replace(s, observed_s=s.observed_s * np.array([1.0, 1.5])) for s in healthy[3:]]
        ratios.append(fit([*healthy[:3], *slow]).sigma / fit(healthy).sigma)
    assert np.median(ratios) < 3.0  # 11 where the fault counts as noise
