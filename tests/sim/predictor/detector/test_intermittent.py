"""A rank that is slow now and then costs the job time, and is named; wild steps are not."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, Tier
from pacekeeper.predictor.detector import intermittent
from pacekeeper.predictor.detector.state import Judgement, begin
from pacekeeper.predictor.detector.thresholds import START_STEPS
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import seeds
from support.synthetic_job import CPU_CLOCK, DEVICE_CLOCK, Noise, SyntheticJob

CONFIG = DetectorConfig()
FAULT, LIFT, STEPS = 60, 160, 240
VICTIM = 1


def play(job: SyntheticJob, every: int, slowdown: float) -> list[Judgement]:
    """Healthy steps, the victim slow in one of `every` steps, healthy steps again."""
    evidence, said = begin(), []
    for step in range(STEPS):
        is_slow = FAULT <= step < LIFT and step % every == 0
        sample = job.next({VICTIM: slowdown} if is_slow else None)
        evidence, judgement = update_evidence(CONFIG, evidence, sample)
        said.append(judgement)
    return said


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("num_microbatches", [1, 8])
@pytest.mark.parametrize(
    ("clock", "slowdown", "within"),
    [(DEVICE_CLOCK, 1.3, 24), (DEVICE_CLOCK, 2.0, 24), (CPU_CLOCK, 2.0, 60)],
)
@pytest.mark.parametrize("every", [2, 3])
def test_it_is_named_alone_and_once_or_twice_and_recovers(
    seed: int, num_microbatches: int, clock: Noise, slowdown: float, within: int, every: int
) -> None:
    job = SyntheticJob(seed=seed, num_microbatches=num_microbatches, **clock)
    said = play(job, every, slowdown)
    found = [finding for judgement in said for finding in judgement.findings]
    assert {finding.rank for finding in found} == {VICTIM}
    assert FAULT <= found[0].step <= FAULT + within
    # Opened at its first slow step by micro-batches, and closed before two more have shown what it
    # is; from then on it stays open.
    assert len(found) <= 2
    ends = [judgement.step for judgement in said if judgement.recovered]
    assert len(ends) == len(found)
    assert LIFT <= ends[-1] <= LIFT + 32


@pytest.mark.parametrize("seed", seeds(6))
def test_what_is_told_is_the_mean_that_the_job_loses(seed: int) -> None:
    said = play(SyntheticJob(seed=seed, **DEVICE_CLOCK), 3, 2.0)
    (found,) = [finding for judgement in said for finding in judgement.findings]
    assert found.slowdown == pytest.approx(1.33, rel=0.1)
    assert "of them slow by" in found.reason and f"rank {VICTIM}" in found.reason


@pytest.mark.parametrize("seed", seeds(6))
def test_a_slowdown_that_lasts_is_told_as_such_once_it_is_one(seed: int) -> None:
    job, evidence = SyntheticJob(seed=seed, **DEVICE_CLOCK), begin()
    for step in range(200):
        is_slow = step >= FAULT and (step % 3 == 0 or step >= 100)
        sample = job.next({VICTIM: 2.0} if is_slow else None)
        evidence, _ = update_evidence(CONFIG, evidence, sample)
    assert dict(evidence.slow) == {VICTIM: pytest.approx(2.0, rel=0.06)}


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize(("num_ranks", "every"), [(8, 5), (64, 8)])
def test_other_work_in_every_few_steps_is_told_as_such(
    seed: int, num_ranks: int, every: int
) -> None:
    """Rank 0 logs or evaluates from the first step on, and the trainer does not tell it."""
    job, evidence = SyntheticJob(seed=seed, num_ranks=num_ranks, **DEVICE_CLOCK), begin()
    found = list[Finding]()
    for step in range(32):
        sample = job.next({0: 1.3} if step % every == 0 else None)
        evidence, judgement = update_evidence(CONFIG, evidence, sample)
        found += judgement.findings
    assert {finding.rank for finding in found} == {0}
    assert f"once in every {every} steps" in found[0].reason
    assert found[0].tier is Tier.PROBABLE


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("share", [1 / 50, 1 / 20, 1 / 6])
def test_of_ranks_that_all_pause_now_and_then_only_the_one_that_stays_slow_is_named(
    seed: int, share: float
) -> None:
    """Each on its own, as processes that collect garbage: that is how this job is."""
    job, evidence = SyntheticJob(seed=seed, num_ranks=8, **DEVICE_CLOCK), begin()
    random, named, num_pairs = np.random.default_rng(seed), Counter[int | None](), 0
    was_slow = np.zeros(8, dtype=np.bool_)
    for step in range(LIFT + 32):
        sample = job.next({VICTIM: 1.3} if step >= LIFT else None)
        is_slow = random.random(len(sample.ranks)) < share
        num_pairs += int((is_slow & was_slow).sum())
        was_slow = is_slow
        sample = replace(sample, observed_s=sample.observed_s * np.where(is_slow, 1.3, 1.0))
        evidence, judgement = update_evidence(CONFIG, evidence, sample)
        if step >= START_STEPS:  # which show that ranks pause
            named.update(finding.rank for finding in judgement.findings)
        assert step != LIFT - 1 or not named
    assert set(named) == {VICTIM}
    assert num_pairs or share < 1 / 20  # a rank paused in two steps in a row


def test_a_rank_with_more_noise_than_its_peers_is_as_often_fast() -> None:
    """Five times as much: its charts may name it, now and then slow it is hardly ever."""
    named = 0
    for seed in range(10):
        job, random = SyntheticJob(seed=seed, num_ranks=8), np.random.default_rng(seed)
        evidence, is_named = begin(), False
        for _ in range(400):
            sample = job.next(None)
            times = np.where(np.arange(8) == VICTIM, np.exp(random.normal(0.0, 0.1)), 1.0)
            sample = replace(sample, observed_s=sample.observed_s * times)
            evidence, judgement = update_evidence(CONFIG, evidence, sample)
            is_named |= any("of them slow by" in finding.reason for finding in judgement.findings)
        named += is_named
    assert named <= 3  # 7 where only its peers count


@pytest.mark.parametrize("usual", [0.02, 0.1])
def test_spells_at_the_usual_share_are_beyond_chance_as_rarely_as_asked(usual: float) -> None:
    random, window, between = np.random.default_rng(1), 32, 1_000.0
    is_slow = random.random(100_000) < usual
    alarms, since = 0, 0
    for end in range(window, len(is_slow)):
        if end - since >= window and is_slow[end - 1]:
            run = is_slow[end - window : end]
            if intermittent.steps_beyond_chance(run, usual, between):
                alarms, since = alarms + 1, end
    assert alarms <= len(is_slow) / between
    often = np.arange(window) % 2 == 1
    assert intermittent.steps_beyond_chance(often, usual, between)


def test_the_chance_of_so_many_spells_counts_for_each_run_that_was_looked_at() -> None:
    is_slow = np.arange(32) % 8 == 7  # 4 spells, the first of them 25 steps ago
    one_run = float(binom.sf(3, 25, 0.01))
    assert not intermittent.steps_beyond_chance(is_slow, 0.01, 1.1 / (32 * one_run))
    assert intermittent.steps_beyond_chance(is_slow, 0.01, 0.9 / (32 * one_run)) == 25


@pytest.mark.parametrize("law", ["normal", "student", "pauses"])
def test_noise_that_all_ranks_have_alike_is_named_as_rarely_as_asked(law: str) -> None:
    """Heavy tails, or pauses (of a garbage collector) of each rank in one of twenty steps."""
    random, num_ranks, between = np.random.default_rng(3), 1_024, 2e4
    shape = (500, num_ranks)
    noise = random.standard_t(3, shape) if law == "student" else random.standard_normal(shape)
    residuals = 0.02 * noise + 0.2 * (random.random(shape) < (0.05 if law == "pauses" else 0.0))
    doubts, sigmas = np.full((32, num_ranks), 0.004), np.full(num_ranks, 0.02)
    alarms, since = 0, np.zeros(num_ranks)
    for end in range(32, len(residuals)):
        runs = intermittent.runs_beyond_chance(
            residuals[end - 32 : end],
            doubts=doubts,
            sigmas=sigmas,
            is_healthy=end - since >= 32,
            between=between,
        )
        since[list(runs)] = end
        alarms += len(runs)
    assert alarms <= residuals.size / between
    residuals[::-3, 7] += 0.2
    runs = intermittent.runs_beyond_chance(
        residuals[-32:], doubts=doubts, sigmas=sigmas, is_healthy=sigmas > 0.0, between=between
    )
    assert runs.keys() == {7}


def test_a_missing_step_does_not_end_a_spell() -> None:
    """Slow in the last eleven steps, told in every second of them; then between them fast."""
    lasting, told = np.zeros((31, 8)), np.arange(31) % 2 == 0
    lasting[20:, 0] = 0.2
    for other, is_named in ((np.nan, False), (0.0, True)):
        ratios = lasting.copy()
        ratios[~told, 0] = other
        runs = intermittent.runs_beyond_chance(
            ratios,
            doubts=np.zeros(ratios.shape),
            sigmas=np.full(8, 0.01),
            is_healthy=np.ones(8, dtype=np.bool_),
            between=1_000.0,
        )
        assert bool(runs) is is_named


def test_the_period_is_that_of_all_spells_or_none() -> None:
    steps = np.arange(100, 132)
    for every in (2, 5, 10):
        assert intermittent.period(steps % every == 0, steps) == every
    assert intermittent.period((steps % 5 == 0) | (steps % 5 == 1), steps) == 5, "of two steps"
    assert not intermittent.period((steps % 5 == 0) | (steps == 113), steps)
    assert not intermittent.period((steps % 5 == 0) & (steps != 115), steps), "one is left out"
    told = steps != 104  # the numbers count, not the places
    assert intermittent.period((steps % 10 == 0)[told], steps[told]) == 10


def test_a_slowdown_about_as_large_as_can_be_seen_is_one_spell() -> None:
    sigma = 0.02
    size = intermittent.LEAST_SIGMAS * sigma
    lasting = np.where(np.arange(32) % 2 == 0, 1.1, 0.9) * size
    intermittent_one = np.where(np.arange(32) % 2 == 0, 1.1, 0.1) * size
    for series, num_spells in ((lasting, 1), (intermittent_one, 16)):
        is_slow = intermittent.slow_steps(series, doubts=0.0, sigmas=sigma)
        assert intermittent.starts(is_slow).sum() == num_spells
        is_slow = intermittent.slow_steps(series, doubts=size, sigmas=sigma)
        assert not is_slow.any(), "within the doubt of the model"


@pytest.mark.parametrize("seed", seeds(6))
def test_named_by_its_first_slow_step_it_is_told_by_its_mean_later(seed: int) -> None:
    job, evidence = SyntheticJob(seed=seed, num_microbatches=8, **DEVICE_CLOCK), begin()
    told = []
    for step in range(FAULT + 32):
        sample = job.next({VICTIM: 2.0} if step >= FAULT and step % 4 == 0 else None)
        evidence, judgement = update_evidence(CONFIG, evidence, sample)
        told += [finding.slowdown for finding in judgement.findings]
    assert told[0] == pytest.approx(2.0, rel=0.15)
    assert dict(evidence.slow) == {VICTIM: pytest.approx(1.25, rel=0.12)}


def test_no_longer_slow_now_and_then_is_a_rank_that_was_quiet_for_too_long_for_it() -> None:
    every_third = np.arange(30) % 3 == 0
    quiet = np.zeros(32, dtype=np.bool_)
    assert intermittent.is_ongoing(every_third)
    assert intermittent.is_ongoing(np.concatenate([every_third, quiet[:6]]))
    assert not intermittent.is_ongoing(np.concatenate([every_third, quiet[:12]]))
    assert not intermittent.is_ongoing(np.concatenate([quiet[:5], ~quiet[:20]]))
    assert not intermittent.is_ongoing(quiet)
