"""All ranks slower at once: a finding of the job or a stage, of no rank, if not their work's."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.job_level.global_slowdown import global_slowdowns
from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.predictor.recorded.trace import ComputeTable, LayoutTable, Trace
from support.examples import seeds
from support.slow_ranks import FIRST_STEP, pipeline, slowed, summed, table_of, timed

ONSET = 20


def job(*, seed: int = 0, num_stages: int = 1, tells_work: bool = True, steps: int = 40) -> Trace:
    return pipeline(
        seed=seed, num_dp=8, num_stages=num_stages, num_steps=steps, documents=0.1,
        tells_work=tells_work,
    )  # fmt: skip


def since(trace: Trace, factor: float, *, stage: int | None = None) -> Trace:
    table = table_of(trace)
    hit = table.step >= FIRST_STEP + ONSET
    if stage is not None:
        hit &= table.rank // 8 == stage
    return timed(trace, np.where(hit, factor, 1.0))


def with_work(trace: Trace, factors: Array) -> Trace:
    """The trace with each row's tokens and squared lengths multiplied, and its time with them."""
    table = table_of(trace)
    more = replace(
        table, tokens=table.tokens * factors, sum_len_squared=table.sum_len_squared * factors
    )
    return timed(replace(trace, compute=more), factors)


@pytest.mark.parametrize("factor", [1.06, 1.3, 2.0])
def test_everybody_slower_is_one_finding_of_the_job_and_of_no_rank(factor: float) -> None:
    verdict = analyze(since(job(), factor))
    (anomaly,) = verdict.anomalies
    assert (anomaly.kind, anomaly.rank, anomaly.stage) == (AnomalyKind.HOST, None, None)
    assert (anomaly.first_step, anomaly.last_step) == (FIRST_STEP + ONSET, None)
    assert anomaly.low < factor < anomaly.high
    assert "8 of 8 ranks together" in anomaly.reason


def test_it_may_pass_again() -> None:
    trace = job()
    for rank in range(8):
        trace = slowed(trace, rank, 1.2, first=10, last=24)
    (anomaly,) = global_slowdowns(trace).anomalies
    assert (anomaly.first_step, anomaly.last_step) == (FIRST_STEP + 10, FIRST_STEP + 24)


@pytest.mark.parametrize("seed", seeds(4))
def test_more_work_is_nobodys_fault(seed: int) -> None:
    trace = job(seed=seed)
    more = np.where(table_of(trace).step >= FIRST_STEP + ONSET, 1.3, 1.0)
    assert global_slowdowns(with_work(trace, more)).anomalies == ()
    assert global_slowdowns(trace).anomalies == () and global_slowdowns(trace).notes == ()


def test_work_that_is_not_told_makes_it_a_note() -> None:
    verdict = global_slowdowns(since(job(tells_work=False), 1.3))
    assert verdict.anomalies == ()
    (note,) = verdict.notes
    assert "8 of 8 ranks together computed x1.299" in note and "not told: not judged" in note


def test_a_step_that_does_not_tell_its_work_does_not_hide_the_others() -> None:
    trace = since(job(), 1.3)
    table = table_of(trace)
    tokens = np.where(table.step == FIRST_STEP + 5, np.nan, table.tokens)
    (anomaly,) = global_slowdowns(replace(trace, compute=replace(table, tokens=tokens))).anomalies
    assert anomaly.first_step == FIRST_STEP + ONSET


def test_a_stage_is_judged_beside_the_others() -> None:
    trace = job(num_stages=3, tells_work=False)
    (anomaly,) = global_slowdowns(since(trace, 1.2, stage=1)).anomalies
    assert (anomaly.kind, anomaly.rank, anomaly.stage) == (AnomalyKind.HOST, None, 1)
    assert anomaly.first_step == FIRST_STEP + ONSET
    # Two that become faster make the third one slower beside them, and by no clock.
    faster = since(since(trace, 0.8, stage=0), 0.8, stage=2)
    assert global_slowdowns(faster).anomalies == ()


def test_most_of_a_stage_is_the_stages_matter_and_a_few_are_not() -> None:
    def slow(count: int) -> Trace:
        trace = job(num_stages=2, tells_work=False)
        for rank in range(count):
            trace = slowed(trace, rank, 1.3, first=ONSET)
        return trace

    (anomaly,) = global_slowdowns(slow(6)).anomalies
    assert anomaly.stage == 0 and "6 of 8 ranks of stage 0" in anomaly.reason
    assert global_slowdowns(slow(3)).anomalies == ()


def test_another_pace_in_another_layout_is_not_judged() -> None:
    trace = since(summed(job(tells_work=False)), 1.3)
    table = table_of(trace)
    told: ComputeTable = replace(table, tokens=np.full(len(table.step), 100.0))
    steps = np.unique(table.step)
    layouts = LayoutTable(step=steps, generation=1 + (steps >= FIRST_STEP + ONSET))
    assert len(global_slowdowns(replace(trace, compute=told)).anomalies) == 1
    assert global_slowdowns(replace(trace, compute=told, layouts=layouts)).anomalies == ()


def test_noise_that_all_ranks_share_is_within_the_false_alarms_that_are_stated() -> None:
    found = 0
    for seed in range(60):
        trace = job(seed=seed, num_stages=2)
        steps = np.random.default_rng(seed).normal(0.0, 0.03, 40)
        found += bool(
            global_slowdowns(
                timed(trace, np.exp(steps[table_of(trace).step - FIRST_STEP]))
            ).anomalies
        )
    assert found <= 3
