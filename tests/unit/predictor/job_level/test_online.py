"""The pace of a whole running job at the edges of what is remembered of it."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.detector.global_slowdown import GlobalSlowdownChange
from pacekeeper.predictor.job_level.blocks import BLOCK_STEPS
from pacekeeper.predictor.job_level.detect import judge_job
from pacekeeper.predictor.job_level.online import (
    LEAST_STEPS,
    WINDOW_STEPS,
    JobLevelState,
    JobStep,
    update_job_level,
)
from pacekeeper.predictor.recorded.trace import Trace
from support.examples import seeds
from support.step_times import job, slowed, with_work

FLAT_S = np.full(600, 0.06)


def told(trace: Trace) -> list[JobStep]:
    steps = trace.steps
    assert steps is not None
    tokens = np.nan_to_num(steps.tokens).astype(int).tolist()
    squares = np.nan_to_num(steps.sum_len_squared).astype(int).tolist()
    return [
        JobStep(step=s, generation=1, duration_s=d, tokens=t, sum_len_squared=q)
        for s, d, t, q in zip(
            steps.step.tolist(), steps.duration_s.tolist(), tokens, squares, strict=True
        )
    ]


def even(pace_s: Array, seed: int = 0) -> Trace:
    """All steps do the same work, and say so."""
    return with_work(job(pace_s, seed=seed), np.full(pace_s.size, 512.0), np.full(pace_s.size, 9e4))


def played(
    trace: Trace, pace: JobLevelState | None = None
) -> tuple[JobLevelState, list[GlobalSlowdownChange]]:
    pace, news = pace or JobLevelState(), []
    for one in told(trace):
        pace, said = update_job_level(pace, one)
        if said != GlobalSlowdownChange():
            news.append(said)
    return pace, news


@pytest.mark.parametrize("seed", seeds(4))
def test_it_finds_what_replay_finds(seed: int) -> None:
    trace = even(slowed(FLAT_S, 300, 450, 1.15), seed)
    (recorded,) = judge_job(trace).anomalies
    _, (opened, closed) = played(trace)
    assert opened.found is not None and closed.is_over
    assert abs(opened.found.onset_step - recorded.first_step) <= 3
    assert opened.found.slowdown == pytest.approx(recorded.slowdown, rel=0.02)


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("is_told", [True, False])
def test_what_comes_and_goes_again_and_again_is_found_live(seed: int, is_told: bool) -> None:
    random = np.random.default_rng(seed)
    pace_s, at = FLAT_S.copy(), 150
    while at < 550:
        end = at + int(random.integers(15, 60))
        pace_s[at:end] *= 1.2
        at = end + int(random.integers(15, 60))
    _, news = played(even(pace_s, seed) if is_told else job(pace_s, seed=seed))
    onsets = [one.found.onset_step for one in news if one.found is not None]
    assert onsets and 140 <= min(onsets) <= 260


@pytest.mark.parametrize("seed", seeds(4))
def test_a_second_slowdown_has_an_onset_and_a_size_of_its_own(seed: int) -> None:
    _, news = played(even(slowed(slowed(FLAT_S, 200, 300, 1.07), 350, 450, 1.05), seed))
    (first, second) = [one.found for one in news if one.found is not None]
    assert abs(first.onset_step - 200) <= 5 and abs(second.onset_step - 350) <= 5
    assert first.slowdown == pytest.approx(1.07, rel=0.01)
    assert second.slowdown == pytest.approx(1.05, rel=0.01)


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("every", [2, 3])
def test_the_size_of_what_comes_and_goes_is_that_of_its_slow_blocks(seed: int, every: int) -> None:
    step = np.arange(2 * WINDOW_STEPS)
    is_slow = (step >= 300) & (step < 1500) & (step // BLOCK_STEPS % every == 0)
    pace, config = JobLevelState(), DetectorConfig(false_alarms_per_job_day=100.0)
    sizes = list[float]()
    for one in told(even(np.where(is_slow, 0.066, 0.06), seed)):
        pace, news = update_job_level(pace, one, config)
        sizes += [] if news.found is None else [news.found.slowdown]
    assert sizes and sizes == pytest.approx([1.1] * len(sizes), rel=0.02)
    assert not pace.is_open


def test_a_finding_lasts_as_long_as_the_slowdown_far_beyond_what_is_remembered() -> None:
    pace_s = slowed(np.full(3 * WINDOW_STEPS, 0.06), 200, 3 * WINDOW_STEPS, 1.2)
    pace, news = played(even(pace_s))
    assert len(news) == 1 and pace.is_open
    assert pace.num_steps <= WINDOW_STEPS
    _, news = played(replace_steps(even(FLAT_S), 3 * WINDOW_STEPS), pace)
    assert [one.is_over for one in news] == [True]


def replace_steps(trace: Trace, first: int) -> Trace:
    assert trace.steps is not None
    return replace(trace, steps=replace(trace.steps, step=trace.steps.step + first))


def test_a_finding_that_becomes_worse_is_measured_again() -> None:
    pace_s = slowed(slowed(FLAT_S, 200, 600, 1.1), 400, 600, 1.3 / 1.1)
    pace, news = played(even(pace_s))
    assert news[0].found is not None and news[-1].changed is not None
    assert pace.slowdown > 1.15


def test_a_job_slow_from_its_first_steps_on_has_nothing_to_be_compared_with() -> None:
    _, news = played(even(slowed(FLAT_S, 20, 600, 1.3)))
    assert news == []


def test_steps_that_took_no_time_are_passed_over() -> None:
    pace_s = FLAT_S.copy()
    pace_s[: 2 * LEAST_STEPS] = 0.0
    pace, news = played(even(pace_s))
    assert news == [] and pace.sensitivity is not None


def test_another_layout_is_measured_anew() -> None:
    pace, _ = played(even(slowed(FLAT_S, 200, 600, 1.2)))
    assert pace.is_open
    pace, news = update_job_level(
        pace, JobStep(step=600, generation=2, duration_s=0.1, tokens=512, sum_len_squared=90_000)
    )
    assert news.is_over and news.why == "its pace is measured anew"
    assert pace.num_steps == 1


def test_steps_done_again_count_once() -> None:
    pace, _ = played(even(FLAT_S[:200]))
    pace, _ = played(replace_steps(even(FLAT_S[:50]), 100), pace)
    assert pace.num_steps == 150


@pytest.mark.parametrize("pause_s", [0.5, 0.0])
def test_slow_steps_after_each_evaluation_are_left_out(pause_s: float) -> None:
    pace_s, ended_s = np.full(600, 0.06), 1.0
    every = 60
    for at in range(every, 600, every):
        pace_s[at : at + 12] *= 1.3
    pace = JobLevelState()
    for at, one in enumerate(told(even(pace_s))):
        ended_s += one.duration_s + (pause_s if at and at % every == 0 else 0.0)
        pace, news = update_job_level(pace, replace(one, ended_s=ended_s))
        assert news.found is None
    remembered_s = pace.rows[:, 1]
    assert (remembered_s > 0.07).any() == (pause_s == 0.0)


def test_a_slowdown_that_begins_after_an_evaluation_is_found_once_steps_have_settled() -> None:
    ended_s, onsets, pace = 1.0, list[int](), JobLevelState()
    for at, one in enumerate(told(even(slowed(FLAT_S, 300, 450, 1.15)))):
        ended_s += one.duration_s + (3.0 if at and at % 100 == 0 else 0.0)
        pace, news = update_job_level(pace, replace(one, ended_s=ended_s))
        onsets += [] if news.found is None else [news.found.onset_step]
    (onset,) = onsets
    assert 300 <= onset <= 315


def test_pauses_that_are_frequent_leave_no_steps_out() -> None:
    ended_s, pace = 1.0, JobLevelState()
    for at, one in enumerate(told(even(FLAT_S))):
        ended_s += one.duration_s + (3.0 if at % 20 == 0 else 0.0)
        pace, _ = update_job_level(pace, replace(one, ended_s=ended_s))
    assert pace.num_steps == FLAT_S.size


def test_the_rate_of_false_alarms_that_is_asked_for_moves_the_threshold() -> None:
    found, pace_s = [], slowed(np.full(400, 1.0), 300, 400, 1.045)
    noisy_s = pace_s * np.exp(0.09 * np.random.default_rng(1).standard_normal(pace_s.size))
    for rate in (0.01, 1000.0):
        pace, config = JobLevelState(), DetectorConfig(false_alarms_per_job_day=rate)
        num_found = 0
        for one in told(even(noisy_s)):
            pace, news = update_job_level(pace, one, config)
            num_found += news.found is not None
        assert pace.sensitivity is not None
        found.append((num_found, pace.sensitivity.slowdown))
    assert found[0][0] <= found[1][0]
    assert found[0][1] > found[1][1], "what is surely found is larger where alarms must be rare"


@pytest.mark.parametrize(("onset", "is_found"), [(70, False), (100, True)])
def test_steps_that_tell_no_work_show_no_health(onset: int, is_found: bool) -> None:
    trace = even(slowed(FLAT_S, onset, 600, 1.5))
    assert trace.steps is not None
    tokens = np.where(trace.steps.step < 60, np.nan, trace.steps.tokens)
    pace, news = played(replace(trace, steps=replace(trace.steps, tokens=tokens)))
    assert bool(news) == is_found == pace.is_open
    assert pace.sensitivity is not None


def test_a_run_that_begins_anew_is_measured_anew() -> None:
    pace, _ = played(even(slowed(FLAT_S, 200, 600, 1.2)))
    assert pace.is_open
    pace, (closed,) = played(even(FLAT_S), pace)
    assert closed.is_over and closed.why == "its pace is measured anew"
    assert not pace.is_open
