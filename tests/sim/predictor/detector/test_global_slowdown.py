"""A job whose ranks all become slower at once: found as that, not learnt, nobody's, and over."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind
from pacekeeper.predictor.cost.features import StepSample
from pacekeeper.predictor.detector.global_slowdown import HELD_STEPS
from pacekeeper.predictor.detector.state import Evidence, begin, model_of, restore
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import seeds
from support.synthetic_job import CPU_CLOCK, DEVICE_CLOCK, SyntheticJob

CONFIG = DetectorConfig()
FAULT, LIFT, STEPS = 80, 220, 300


@dataclass(kw_only=True)
class Watched:
    """What was said of all ranks together, by step."""

    evidence: Evidence = field(default_factory=begin)
    found: list[Finding] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    changed: list[tuple[int, float]] = field(default_factory=list)
    of_ranks: list[Finding] = field(default_factory=list)

    def see(self, sample: StepSample) -> None:
        self.evidence, judgement = update_evidence(CONFIG, self.evidence, sample)
        news = judgement.common
        self.found += [news.found] if news.found is not None else []
        self.over += [sample.step] if news.is_over else []
        self.changed += [(sample.step, news.changed)] if news.changed is not None else []
        self.of_ranks += judgement.findings


def everybody(sample: StepSample, factor: float) -> StepSample:
    return replace(sample, observed_s=sample.observed_s * factor)


def play(
    job: SyntheticJob,
    factor_at: Callable[[int], float],
    *,
    steps: int = STEPS,
    evidence: Evidence | None = None,
) -> Watched:
    watched = Watched(evidence=evidence or begin())
    for step in range(steps):
        watched.see(everybody(job.next(), factor_at(step)))
    return watched


def slow_between(factor: float) -> Callable[[int], float]:
    return lambda step: factor if FAULT <= step < LIFT else 1.0


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("factor", [1.15, 1.3, 2.0])
def test_it_is_found_within_a_few_steps_and_ends_when_it_ends(seed: int, factor: float) -> None:
    watched = play(SyntheticJob(seed=seed, **DEVICE_CLOCK), slow_between(factor))
    (found,) = watched.found
    assert (found.kind, found.rank) == (FindingKind.HOST, None)
    assert FAULT <= found.step < FAULT + 12
    assert abs(found.onset_step - FAULT) <= 2
    assert found.slowdown == pytest.approx(factor, rel=0.05)
    assert "the job became slower" in found.reason
    (over,) = watched.over
    assert LIFT <= over <= LIFT + 12
    assert watched.of_ranks == []


@pytest.mark.parametrize("seed", seeds(4))
def test_the_cost_model_does_not_learn_it(seed: int) -> None:
    job = SyntheticJob(seed=seed, **DEVICE_CLOCK)
    watched = play(job, slow_between(1.5), steps=LIFT)
    assert watched.over == []
    sample = job.next()
    ratio = sample.observed_s / model_of(watched.evidence).expected_s(sample.features)
    assert np.median(ratio) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("seed", seeds(6))
def test_a_healthy_job_of_any_clock_is_left_alone(seed: int) -> None:
    for clock in (DEVICE_CLOCK, CPU_CLOCK):
        job = SyntheticJob(seed=seed, **clock)
        watched = Watched()
        for step in range(STEPS):
            if step in (90, 150, 210):
                job.shuffle()
            watched.see(job.next())
        assert watched.found == []


@pytest.mark.parametrize("seed", seeds(4))
def test_nothing_is_learnt_while_it_may_be_about_to_be_found(seed: int) -> None:
    job, watched = SyntheticJob(seed=seed, **DEVICE_CLOCK), Watched()
    while not watched.found:
        watched.see(everybody(job.next(), 1.3 if job.step >= FAULT else 1.0))
    (found,) = watched.found
    learnt = {sample.step for sample in watched.evidence.history if sample.step < found.step}
    assert FAULT - 1 in learnt and learnt.isdisjoint(range(FAULT + 1, found.step))


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("slowdown", [1.15, 1.6])
def test_a_rank_that_is_slow_by_itself_is_not_everybody(seed: int, slowdown: float) -> None:
    for num_ranks in (2, 4):
        job, watched = SyntheticJob(seed=seed, num_ranks=num_ranks, **DEVICE_CLOCK), Watched()
        for step in range(160):
            watched.see(job.next({1: slowdown} if step >= FAULT else None))
        assert watched.found == []
        assert {finding.rank for finding in watched.of_ranks} == {1}


def test_more_work_in_every_step_is_explained() -> None:
    job, watched = SyntheticJob(seed=1, **DEVICE_CLOCK), Watched()
    for step in range(160):
        sample, often = job.next(), 1.0 + 0.3 * (step % 7) / 6
        often *= 1.5 if step >= FAULT else 1.0
        features = sample.features.copy()
        features *= often
        took_s = sample.observed_s * often  # all that the step is made of
        watched.see(replace(sample, features=features, observed_s=took_s))
    assert watched.found == []


def test_a_drift_is_learnt_and_not_found() -> None:
    watched = play(
        SyntheticJob(seed=2, **DEVICE_CLOCK), lambda step: 1.0 + 0.0005 * step, steps=600
    )
    assert watched.found == []


def test_what_is_not_worth_naming_is_learnt_in_the_end() -> None:
    job = SyntheticJob(seed=3, **DEVICE_CLOCK)
    steps = FAULT + 4 * HELD_STEPS
    watched = play(job, lambda step: 1.06 if step >= FAULT else 1.0, steps=steps)
    assert watched.found == []
    sample = everybody(job.next(), 1.06)
    ratio = sample.observed_s / model_of(watched.evidence).expected_s(sample.features)
    assert np.median(ratio) == pytest.approx(1.0, abs=0.03)


def test_one_that_grows_is_measured_again() -> None:
    watched = play(
        SyntheticJob(seed=4, **DEVICE_CLOCK),
        lambda step: 1.0 if step < FAULT else 1.3 if step < 150 else 2.0,
    )
    assert len(watched.found) == 1 and watched.over == []
    assert watched.changed[-1][1] == pytest.approx(2.0, rel=0.06)


def test_a_new_layout_settles_before_its_pace_is_judged() -> None:
    job, watched = SyntheticJob(seed=5, **DEVICE_CLOCK), Watched()
    for step in range(STEPS):
        if step == FAULT:
            job.plan()
        factor = 1.0 if step < FAULT else 1.15 if step < 160 else 1.5
        watched.see(everybody(job.next(), factor))
    (found,) = watched.found  # the layout's own pace is none
    assert 160 <= found.step < 175
    assert found.slowdown == pytest.approx(1.5 / 1.15, rel=0.05)


def test_after_a_restart_an_open_one_is_neither_learnt_nor_found_again() -> None:
    job = SyntheticJob(seed=6, **DEVICE_CLOCK)
    watched = play(
        job, lambda step: 1.4 if step < 100 else 1.0, steps=160,
        evidence=restore({}, everybody=1.4),
    )  # fmt: skip
    assert watched.found == []
    (over,) = watched.over
    assert 100 <= over <= 112
