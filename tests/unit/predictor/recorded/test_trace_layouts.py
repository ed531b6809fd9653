"""A new layout is another mixture of work: at what level a rank settles in it accuses nobody."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.recorded.rank_slowdowns import rank_faults
from pacekeeper.predictor.recorded.residuals import layouts_of
from pacekeeper.predictor.recorded.trace import LayoutTable, Trace
from support.examples import seeds
from support.slow_ranks import FIRST_STEP, pipeline, slowed, summed, table_of

NUM_STEPS, SECOND, THIRD = 90, 30, 60


def job(seed: int = 0) -> Trace:
    """Four ranks that do the same work, in three layouts."""
    trace = pipeline(seed=seed, num_dp=4, num_stages=1, num_steps=NUM_STEPS, documents=0.02)
    return laid_out(summed(trace))


def laid_out(trace: Trace) -> Trace:
    at = np.arange(NUM_STEPS)
    generation = 1 + (at >= SECOND) + (at >= THIRD)
    return replace(trace, layouts=LayoutTable(step=FIRST_STEP + at, generation=generation))


def shifted(trace: Trace, rank: int, factor: float) -> Trace:
    """A rank whose work the model misjudges in the second layout only."""
    return slowed(trace, rank, factor, first=SECOND, last=THIRD - 1)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_level_that_comes_and_goes_with_a_layout_accuses_nobody(seed: int) -> None:
    trace = shifted(job(seed), 2, 1.03)
    assert rank_faults(trace) == ()
    assert [t.rank for t in rank_faults(replace(trace, layouts=None))] == [2]


def test_the_mixed_first_step_of_a_layout_is_not_judged() -> None:
    mixed = slowed(job(), 1, 3.0, first=SECOND, last=SECOND)
    assert rank_faults(mixed) == ()
    assert layouts_of(mixed, np.unique(table_of(mixed).step)) == (
        (0, SECOND), (SECOND + 1, THIRD), (THIRD + 1, NUM_STEPS),
    )  # fmt: skip


def test_a_fault_within_a_layout_is_found_as_ever() -> None:
    (anomaly,) = rank_faults(slowed(job(), 3, 1.05, first=SECOND + 10, last=SECOND + 20))
    span = FIRST_STEP + SECOND + 10, FIRST_STEP + SECOND + 20
    assert (anomaly.rank, anomaly.first_step, anomaly.last_step) == (3, *span)


@pytest.mark.parametrize("factor", [1.05, 1.6])
def test_a_fault_that_outlasts_its_layout_is_one_finding_to_its_end(factor: float) -> None:
    trace = slowed(job(), 1, factor, first=SECOND - 10, last=THIRD + 14)
    (anomaly,) = rank_faults(trace)
    assert (anomaly.rank, anomaly.first_step) == (1, FIRST_STEP + SECOND - 10)
    assert anomaly.last_step == FIRST_STEP + THIRD + 14
    assert anomaly.slowdown == pytest.approx(factor, rel=0.02)


def test_a_fault_that_ends_with_its_layout_does_not_go_on() -> None:
    (anomaly,) = rank_faults(slowed(job(), 0, 1.2, first=SECOND - 10, last=SECOND - 1))
    assert (anomaly.rank, anomaly.last_step) == (0, FIRST_STEP + SECOND - 1)


def test_one_that_begins_with_a_layout_and_is_large_is_found_by_its_peers() -> None:
    (anomaly,) = rank_faults(slowed(job(), 2, 1.6, first=SECOND))
    assert (anomaly.rank, anomaly.last_step) == (2, None)
    assert anomaly.first_step in (FIRST_STEP + SECOND, FIRST_STEP + SECOND + 1)
    assert "where a layout begins" in anomaly.reason
