"""Slowdowns of a whole job: what accuses nobody, what is found, and what must not matter."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.job_level.detect import judge_job
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.predictor.stats.change_points import SPIKE_WINDOW
from support.examples import examples
from support.step_times import job, slowed, with_work

EDGE_STEPS = SPIKE_WINDOW // 2  # fewer steps beside a jump pass for a spike
FEW = settings(max_examples=examples(30), deadline=None)
seeds = st.integers(0, 10_000)
FLAT_S = np.full(1200, 0.06)
SCHEDULE = np.repeat([0, 1, 2], 500)
STAIRS_S = np.array([0.035, 0.060, 0.088])[SCHEDULE]


def others(pace_s: np.ndarray, seed: int, num: int = 3) -> list[Trace]:
    return [job(pace_s, seed=seed + 1 + i, resolution_s=1e-3) for i in range(num)]


def scaled(trace: Trace, by: float) -> Trace:
    assert trace.steps is not None
    steps = replace(trace.steps, duration_s=trace.steps.duration_s * by)
    return replace(trace, steps=steps, resolution_s=trace.resolution_s * by)


@FEW
@given(seeds, st.sampled_from([0.005, 0.02, 0.05]))
def test_a_schedule_that_replicates_share_accuses_nobody(seed: int, noise: float) -> None:
    trace = job(STAIRS_S, seed=seed, noise=noise, resolution_s=1e-3)
    assert judge_job(trace, replicates=others(STAIRS_S, seed)).anomalies == ()


@FEW
@given(seeds, st.sampled_from([0.005, 0.02, 0.05]))
def test_jumps_that_the_schedule_tells_accuse_nobody(seed: int, noise: float) -> None:
    trace = job(STAIRS_S, seed=seed, noise=noise, resolution_s=1e-3)
    assert judge_job(trace, schedule=SCHEDULE).anomalies == ()


@FEW
@given(seeds)
def test_jumps_of_an_unknown_workload_are_told_and_accuse_nobody(seed: int) -> None:
    verdict = judge_job(job(STAIRS_S, seed=seed, resolution_s=1e-3))
    assert verdict.anomalies == ()
    assert len([note for note in verdict.notes if "workload unknown" in note]) == 2


@FEW
@given(seeds, st.floats(0.0, 0.4))
def test_work_that_grows_steadily_accuses_nobody(seed: int, growth: float) -> None:
    pace_s = FLAT_S * np.linspace(1.0, 1.0 + growth, FLAT_S.size)
    trace = job(pace_s, seed=seed)
    assert judge_job(trace).anomalies == ()
    assert judge_job(trace, schedule=np.zeros(FLAT_S.size, dtype=np.intp)).anomalies == ()


@FEW
@given(seeds, st.integers(20, 1350), st.sampled_from([1.08, 1.1, 1.2, 1.6]))
@example(0, 450, 1.1)  # across a jump of the schedule
@example(0, 406, 1.2)  # its last six steps alone on the other side of one
def test_a_hundred_slow_steps_are_found_beside_replicates(
    seed: int, begin: int, slowdown: float
) -> None:
    pace_s = slowed(STAIRS_S, begin, begin + 100, slowdown)
    trace = job(pace_s, seed=seed, resolution_s=1e-3)
    (found,) = judge_job(trace, replicates=others(STAIRS_S, seed)).anomalies
    assert (found.kind, found.rank, found.tier) == (AnomalyKind.HOST, None, Tier.PROBABLE)
    assert abs(found.first_step - begin) <= EDGE_STEPS
    assert found.last_step is not None and abs(found.last_step - (begin + 99)) <= EDGE_STEPS
    assert found.slowdown == pytest.approx(slowdown, rel=0.02)
    assert found.low < found.slowdown < found.high


@FEW
@given(seeds, st.integers(40, 380), st.integers(0, 2), st.sampled_from([1.1, 1.2, 1.6]))
def test_a_hundred_slow_steps_of_a_work_class_are_found(
    seed: int, begin: int, work_class: int, slowdown: float
) -> None:
    begin += 500 * work_class
    trace = job(slowed(STAIRS_S, begin, begin + 100, slowdown), seed=seed, resolution_s=1e-3)
    (found,) = judge_job(trace, schedule=SCHEDULE).anomalies
    assert found.tier is Tier.PROBABLE
    assert abs(found.first_step - begin) <= EDGE_STEPS
    assert found.slowdown == pytest.approx(slowdown, rel=0.03)


@FEW
@given(seeds, st.integers(100, 1000))
def test_a_rise_that_goes_away_is_suspected_where_nothing_is_known(seed: int, begin: int) -> None:
    (found,) = judge_job(job(slowed(FLAT_S, begin, begin + 100, 1.1), seed=seed)).anomalies
    assert found.tier is Tier.SUSPECTED and "workload is unknown" in found.reason
    assert abs(found.first_step - begin) <= EDGE_STEPS


@FEW
@given(seeds, st.integers(5, 20), st.integers(60, 150), st.sampled_from(["work", "class", ""]))
def test_a_job_that_settles_after_few_fast_steps_accuses_nobody(
    seed: int, begin: int, settled: int, known: str
) -> None:
    """As a MoE job whose routing is even at first and after it has learnt to be."""
    trace = job(slowed(FLAT_S, begin, settled, 1.1), seed=seed, noise=0.005)
    alike = np.full(FLAT_S.size, 512.0)
    trace = with_work(trace, alike, alike) if known == "work" else trace
    schedule = np.zeros(FLAT_S.size, dtype=np.intp) if known == "class" else None
    verdict = judge_job(trace, schedule=schedule)
    assert verdict.anomalies == ()
    assert not known or any("slower from the start" in note for note in verdict.notes)


@FEW
@given(seeds, st.integers(350, 1100))
def test_a_slowdown_that_lasts_to_the_end_has_no_last_step(seed: int, begin: int) -> None:
    trace = job(slowed(FLAT_S, begin, FLAT_S.size, 1.15), seed=seed)
    (found,) = judge_job(trace, replicates=others(FLAT_S, seed)).anomalies
    assert found.last_step is None and abs(found.first_step - begin) <= EDGE_STEPS
    assert judge_job(trace).anomalies == ()  # it may be the schedule


@FEW
@given(seeds, st.sampled_from([1e-6, 0.5, 3.0, 1e4]))
def test_the_unit_of_time_does_not_matter(seed: int, by: float) -> None:
    trace = job(slowed(STAIRS_S, 700, 800, 1.1), seed=seed, resolution_s=1e-3)
    beside = others(STAIRS_S, seed)
    (told,) = judge_job(trace, replicates=beside).anomalies
    (same,) = judge_job(scaled(trace, by), replicates=[scaled(one, by) for one in beside]).anomalies
    assert (told.first_step, told.last_step) == (same.first_step, same.last_step)
    assert told.slowdown == pytest.approx(same.slowdown)


@FEW
@given(seeds, st.sampled_from([0.85, 1.02, 1.2]))
def test_replicates_on_other_devices_say_the_same(seed: int, by: float) -> None:
    trace = job(slowed(STAIRS_S, 700, 800, 1.1), seed=seed)
    (found,) = judge_job(
        trace, replicates=[scaled(one, by) for one in others(STAIRS_S, seed)]
    ).anomalies
    assert abs(found.first_step - 700) <= EDGE_STEPS


@FEW
@given(seeds, st.sampled_from([0.5, 1.9]), st.booleans())
def test_runs_on_another_number_of_devices_are_said_and_left_out(
    seed: int, by: float, has_others: bool
) -> None:
    """Their steps hold another share of what takes as long on any number, as evaluations."""
    pauses_s = np.where(np.arange(STAIRS_S.size) // 40 % 5 == 0, 0.02, 0.0)
    trace = job(STAIRS_S + pauses_s, seed=seed)
    foreign = others(STAIRS_S * by + pauses_s, seed)
    alike = others(STAIRS_S + pauses_s, seed + 10) if has_others else []
    verdict = judge_job(trace, replicates=[*foreign, *alike])
    assert verdict.anomalies == ()
    assert sum("left out" in note for note in verdict.notes) == 1


@FEW
@given(seeds, st.sampled_from([1.05, 1.1, 1.4]), st.booleans())
@example(764, 1.05, False)  # a block across an edge has about the pace of a slow one
@example(121, 1.4, True)  # three slow blocks between two that are hardly slow
def test_what_comes_and_goes_again_and_again_is_one_finding(
    seed: int, slowdown: float, has_others: bool
) -> None:
    random = np.random.default_rng(seed)
    pace_s, at, begun, ended = FLAT_S.copy(), 300, list[int](), list[int]()
    while at < 1100:
        begun.append(at)
        ended.append(at + int(random.integers(30, 70)))
        pace_s[begun[-1] : ended[-1]] *= slowdown
        at = ended[-1] + int(random.integers(30, 90))
    beside = others(FLAT_S, seed) if has_others else []
    found = judge_job(job(pace_s, seed=seed, noise=0.005), replicates=beside).anomalies
    assert len(found) == 1
    assert abs(found[0].first_step - begun[0]) <= EDGE_STEPS
    assert found[0].slowdown == pytest.approx(slowdown, rel=0.03)


def ramping(steps: np.ndarray, length: int) -> np.ndarray:
    return np.where(steps < length + 60, np.clip(steps / length, 0.0, 1.0), 0.0)


def fading(steps: np.ndarray, length: int) -> np.ndarray:
    return np.where(steps < 0, 0.0, np.clip(1.0 - (steps - 30) / length, 0.0, 1.0))


def overlapping(steps: np.ndarray, length: int) -> np.ndarray:
    second = steps - length // 2
    return 0.5 * ((steps >= 0) & (steps < 80)) + 0.5 * ((second >= 0) & (second < 80))


def alternating(steps: np.ndarray, length: int) -> np.ndarray:
    return np.where((steps >= 0) & (steps // (length // 2) % 2 == 0), 1.0, 0.0)


@FEW
@given(
    seeds,
    st.sampled_from([ramping, fading, overlapping, alternating]),
    st.integers(60, 120),
    st.sampled_from([1.1, 1.2, 1.4]),
    st.booleans(),
)
def test_slowdowns_of_any_course_are_found(
    seed: int,
    course: Callable[[np.ndarray, int], np.ndarray],
    length: int,
    slowdown: float,
    has_others: bool,
) -> None:
    part = course(np.arange(FLAT_S.size) - 400, length)
    trace = job(FLAT_S * (1.0 + (slowdown - 1.0) * part), seed=seed, noise=0.005)
    if has_others:
        found = judge_job(trace, replicates=others(FLAT_S, seed)).anomalies
    else:
        alike = np.full(FLAT_S.size, 512.0)
        found = judge_job(with_work(trace, alike, alike)).anomalies
    assert found
    for one in found:
        last = FLAT_S.size - 1 if one.last_step is None else one.last_step
        assert (part[one.first_step : last + 1] > 0.0).mean() > 0.4
        assert one.slowdown < slowdown * 1.03


@FEW
@given(seeds, st.integers(120, 200))
def test_what_has_a_period_from_the_start_is_a_note(seed: int, period: int) -> None:
    pace_s = np.where(np.arange(1200) % period >= period // 2, 0.066, 0.06)
    verdict = judge_job(job(pace_s, seed=seed, noise=0.005))
    assert verdict.anomalies == ()
    assert any("slower every" in note for note in verdict.notes)


@FEW
@given(seeds, st.integers(-60, 60), st.integers(1, 4))
def test_a_schedule_shifted_by_some_steps_accuses_nobody(seed: int, by: int, num: int) -> None:
    shifted_s = STAIRS_S[np.clip(np.arange(STAIRS_S.size) + by, 0, STAIRS_S.size - 1)]
    trace = job(shifted_s, seed=seed, resolution_s=1e-3)
    assert judge_job(trace, replicates=others(STAIRS_S, seed, num)).anomalies == ()


@FEW
@given(seeds, st.integers(100, 900), st.sampled_from([1.1, 1.3]))
def test_work_that_is_told_explains_its_time_and_no_more(
    seed: int, begin: int, slowdown: float
) -> None:
    random = np.random.default_rng(seed)
    tokens = random.uniform(1000, 4000, FLAT_S.size)
    squares = tokens * random.uniform(100, 900, FLAT_S.size)
    pace_s = 0.02 + 1e-5 * tokens + 2e-8 * squares
    healthy = with_work(job(pace_s, seed=seed), tokens, squares)
    assert judge_job(healthy).anomalies == ()
    slow = with_work(job(slowed(pace_s, begin, begin + 100, slowdown), seed=seed), tokens, squares)
    (found,) = judge_job(slow).anomalies
    assert found.tier is Tier.PROBABLE and "tokens" in found.reason
    assert abs(found.first_step - begin) <= EDGE_STEPS
    assert found.slowdown == pytest.approx(slowdown, rel=0.03)
