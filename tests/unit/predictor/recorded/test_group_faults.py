"""Ranks of one stage that slow together are each named while they are fewer than half of it."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.recorded.noise import noise_of
from pacekeeper.predictor.recorded.rank_slowdowns import rank_faults
from pacekeeper.predictor.recorded.residuals import Residuals
from pacekeeper.predictor.recorded.shift_scan import strongest_shifts
from pacekeeper.predictor.recorded.trace import Trace
from support.examples import seeds
from support.slow_ranks import FIRST_STEP, pipeline, slowed, summed, table_of, timed

ONSET = 8


def stage(num_ranks: int = 12, *, seed: int = 0, num_stages: int = 2, num_steps: int = 24) -> Trace:
    trace = pipeline(seed=seed, num_dp=num_ranks, num_stages=num_stages, num_steps=num_steps)
    return on_nodes(trace, 4)


def on_nodes(trace: Trace, ranks_per_node: int) -> Trace:
    workers = (replace(w, node=f"node-{w.stage}-{w.dp // ranks_per_node}") for w in trace.workers)
    return replace(trace, workers=tuple(workers))


def all_slowed(trace: Trace, ranks: range, factor: float, *, last: int | None = None) -> Trace:
    for rank in ranks:
        trace = slowed(trace, rank, factor, first=ONSET, last=last)
    return trace


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize(("count", "factor"), [(4, 1.3), (5, 1.1), (4, 1.05)])
def test_a_third_of_a_stage_is_named_rank_by_rank(seed: int, count: int, factor: float) -> None:
    found = rank_faults(all_slowed(stage(seed=seed), range(4, 4 + count), factor))
    assert sorted(t.rank for t in found if t.rank is not None) == list(range(4, 4 + count))
    for anomaly in found:
        assert anomaly.first_step == FIRST_STEP + ONSET and anomaly.last_step is None
        assert anomaly.low < factor < anomaly.high


def test_who_slowed_with_a_rank_and_on_which_node_is_said() -> None:
    found = rank_faults(all_slowed(stage(), range(4, 8), 1.2))
    first = next(anomaly for anomaly in found if anomaly.rank == 4)
    assert "together with ranks 5, 6, 7, all on node node-0-1; 8 peers of stage 0" in first.reason
    apart = rank_faults(all_slowed(on_nodes(stage(), 3), range(4, 8), 1.2))
    first = next(anomaly for anomaly in apart if anomaly.rank == 4)
    assert "together with ranks 5, 6, 7; " in first.reason


def test_a_group_that_recovers_has_an_end_and_accuses_nobody_else() -> None:
    found = rank_faults(all_slowed(stage(), range(8, 12), 1.15, last=ONSET + 7))
    ends = {(t.rank, t.first_step, t.last_step) for t in found}
    span = FIRST_STEP + ONSET, FIRST_STEP + ONSET + 7
    assert ends == {(rank, *span) for rank in range(8, 12)}


def test_a_single_stage_that_tells_only_sums_is_enough() -> None:
    trace = summed(pipeline(num_dp=12, num_stages=1, num_steps=30, documents=0.02))
    found = rank_faults(all_slowed(trace, range(4), 1.2))
    assert sorted(t.rank for t in found if t.rank is not None) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [6, 7, 10, 11])
def test_half_of_a_stage_or_more_accuses_nobody(count: int) -> None:
    assert rank_faults(all_slowed(stage(), range(count), 1.3)) == ()


def test_ranks_that_lose_more_and_more_are_no_group() -> None:
    trace = summed(pipeline(num_dp=12, num_stages=1, num_steps=30, documents=0.02))
    for rank in range(12):  # no gap between the slow ones and the others
        trace = slowed(trace, rank, 1.0 + 0.02 * rank, first=ONSET)
    assert "together" not in " ".join(anomaly.reason for anomaly in rank_faults(trace))


def test_ranks_whose_work_wanders_together_are_no_group() -> None:
    """Ranks that share experts or a data loader: what four of them share comes and goes."""
    found = 0
    for seed in range(10):
        trace = summed(pipeline(seed=seed, num_dp=12, num_stages=1, num_steps=40, documents=0.02))
        rng, table = np.random.default_rng(seed), table_of(trace)
        wander = np.zeros((40, 3))
        for step in range(1, 40):
            wander[step] = 0.9 * wander[step - 1] + 0.03 * rng.standard_normal(3)
        shared = np.exp(wander[table.step - FIRST_STEP, table.rank // 4])
        found += bool(rank_faults(timed(trace, shared)))
    assert found <= 1


def of_one_stage(seed: int, rise: float, *, alike: bool) -> Residuals:
    """Twelve ranks, of which four rise by `rise` in mid-record; `alike`: their noise is one."""
    rng, steps, group = np.random.default_rng(seed), 30, 4
    by_step = 0.004 * rng.standard_normal((steps, 12))
    by_step[:, :group] = 0.01 * rng.standard_normal((steps, 1 if alike else group))
    by_step[steps // 2 :, :group] += rise
    return Residuals.of_steps(by_step)


def test_ranks_of_a_group_that_move_as_one_count_as_one() -> None:
    """Each stands for itself; but any four of twelve might, and theirs is a single witness."""
    found = {True: 0, False: 0}
    for alike in found:
        for seed in range(8):
            residuals = of_one_stage(seed, 0.04, alike=alike)
            noise = noise_of(residuals, np.zeros(12, dtype=np.intp))
            shifts = strongest_shifts(residuals, noise, false_alarms=0.01, min_slowdown=1.01)
            found[alike] += bool(shifts)
    assert found[True] == 0 and found[False] > 4
