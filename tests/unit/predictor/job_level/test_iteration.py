"""Iterations beside their longest paths: what explains them, and what is evidence."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.cost.iteration import IterationPaths
from pacekeeper.predictor.detector.global_slowdown import GlobalSlowdownChange
from pacekeeper.predictor.job_level.iteration import (
    LEARNT_STEPS,
    LEAST_STEPS,
    IterationState,
    update_iteration,
)

EVEN = IterationPaths(
    expected_s=1.0,
    observed_s=1.0,
    even_stages_s=1.0,
    even_microbatches_s=1.0,
    heaviest_stage=0,
    longest_microbatch=0,
)


def run(
    state: IterationState,
    first: int,
    end: int,
    *,
    paths: IterationPaths = EVEN,
    extra_s: float = 0.1,
    is_explained: bool = False,
) -> tuple[IterationState, list[GlobalSlowdownChange]]:
    news = []
    for step in range(first, end):
        rng = np.random.default_rng(step)
        state, change = update_iteration(
            state,
            paths,
            step=step,
            generation=1,
            duration_s=paths.observed_s + extra_s + 0.004 * rng.standard_normal(),
            is_explained=is_explained,
        )
        news.append(change)
    return state, news


def test_nothing_is_predicted_before_enough_steps() -> None:
    state, _ = run(IterationState(), 0, LEAST_STEPS)
    assert state.newest is None
    state, _ = run(state, LEAST_STEPS, LEAST_STEPS + 1)
    assert state.newest is not None
    assert state.newest.expected_s == pytest.approx(1.1, rel=0.01)


def test_the_parts_of_an_iteration_add_up() -> None:
    state, _ = run(IterationState(), 0, 100)
    uneven = replace(
        EVEN,
        expected_s=1.5,
        observed_s=1.7,
        even_stages_s=1.2,
        even_microbatches_s=1.4,
        heaviest_stage=3,
        longest_microbatch=2,
    )
    state, _ = run(state, 100, 101, paths=uneven, extra_s=0.3)
    report = state.newest
    assert report is not None
    assert (report.stages_s, report.microbatches_s) == pytest.approx((0.3, 0.1))
    total_s = uneven.expected_s + report.slow_s + report.beyond_s + report.unexplained_s
    assert total_s == pytest.approx(report.duration_s)
    assert report.unexplained_s == pytest.approx(0.2, abs=0.02)
    text = str(report)
    for part in ("stage 3", "number 2", "slower than expected", "not explained by computing"):
        assert part in text


def test_time_that_another_finding_explains_is_neither_learnt_nor_evidence() -> None:
    state, _ = run(IterationState(), 0, 100)
    after, news = run(state, 100, 200, extra_s=0.5, is_explained=True)
    assert (after.beyond_s, after.pace) == (state.beyond_s, state.pace)
    assert not any(change.found for change in news)
    assert after.newest is not None and after.newest.unexplained_s == pytest.approx(0.4, abs=0.03)


def test_while_its_own_finding_is_open_nothing_is_learnt_of_it() -> None:
    state, _ = run(IterationState(), 0, 150)
    state, news = run(state, 150, 400, extra_s=0.4)
    assert sum(change.found is not None for change in news) == 1
    assert state.pace.is_open
    assert LEAST_STEPS <= len(state.beyond_s) < LEARNT_STEPS
    assert state.newest is not None
    assert state.newest.unexplained_s == pytest.approx(0.3, abs=0.03)
    state, news = run(state, 400, 800)
    assert any(change.is_over for change in news)
    assert not state.pace.is_open
