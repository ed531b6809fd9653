"""Uneven work is named by what is uneven, at its true cost; slow devices are not taken for it."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.imbalance.analyze import imbalances
from pacekeeper.predictor.imbalance.stages_and_microbatches import compute_rows, shared_work
from pacekeeper.predictor.imbalance.what_if import replayed
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind
from pacekeeper.predictor.recorded.trace import (
    Chunk,
    ComputeTable,
    OpType,
    Trace,
    Worker,
    compute_of,
)
from support.synthetic_trace import Compute, Job, WorkTime, only_rows, step_times, timeline

SEQUENCE, STAGE, EXPERT = (
    AnomalyKind.SEQUENCE_IMBALANCE,
    AnomalyKind.STAGE_IMBALANCE,
    AnomalyKind.EXPERT_IMBALANCE,
)
JOB = Job(pp=4, micro_batches=(8, 8, 8), steps=10)


def even(step: int, dp: int, stage: int, compute: Compute) -> float:
    return 0.1 if compute[0] is OpType.FORWARD else 0.2


@cache
def normal(step: int, dp: int, stage: int, series: int) -> Array:
    """Normal noise of each compute of a worker's step: [type, model chunk, micro-batch]."""
    return np.random.default_rng([step, dp, stage, series]).normal(size=(2, 2, 8))


def times(*causes: Callable[[int, int, int, Compute], float]) -> WorkTime:
    """Even work with causes multiplied in, and 1 % of noise."""

    @cache
    def time_of(step: int, dp: int, stage: int, compute: Compute) -> float:
        noise = 0.01 * normal(step, dp, stage, 0)[compute]
        factors = [cause(step, dp, stage, compute) for cause in causes]
        return float(even(step, dp, stage, compute) * math.prod(factors) * (1.0 + noise))

    return time_of


@cache
def length_of(step: int, dp: int, micro_batch: int) -> float:
    return float(np.random.default_rng([step, dp, micro_batch, 7]).lognormal(0.0, 0.35))


def length(step: int, dp: int, stage: int, compute: Compute) -> float:
    return length_of(step, dp, compute[2])


def mean_length_in(job: Job) -> WorkTime:
    """What each micro-batch of a step has once the step's work is spread evenly."""

    @cache
    def of_step(step: int) -> float:
        places = [(dp, at) for dp in range(job.dp) for at in range(job.micro_batches[dp])]
        return float(np.mean([length_of(step, *place) for place in places]))

    return lambda step, dp, stage, compute: of_step(step)


def heavy(step: int, dp: int, stage: int, compute: Compute) -> float:
    return 1.4 if stage == 3 else 1.0


def slow_rank(step: int, dp: int, stage: int, compute: Compute) -> float:
    return 2.0 if (dp, stage) == (1, 0) else 1.0


def slow_later(step: int, dp: int, stage: int, compute: Compute) -> float:
    return 1.6 if (dp, stage) == (1, 1) and step >= 3 else 1.0


def slow_node(step: int, dp: int, stage: int, compute: Compute) -> float:
    """All stages of a dp rank on one node."""
    return 1.5 if dp == 2 and step >= 4 else 1.0


@cache
def stutter(step: int, dp: int, stage: int, compute: Compute) -> float:
    """A node that holds a dp rank is slow as a whole in this step and not in that."""
    return float(np.random.default_rng([step, dp, 9]).lognormal(0.0, 0.3))


def jitter(step: int, dp: int, stage: int, compute: Compute) -> float:
    """Large noise that no two operations have in common."""
    return math.exp(0.2 * normal(step, dp, stage, 1)[compute])


def found_in(trace: Trace) -> tuple[Anomaly, ...]:
    replay = replayed(trace)[0]
    return imbalances(trace, replay)


@pytest.mark.parametrize(
    "causes",
    [(), (slow_rank,), (slow_later,), (slow_node,), (slow_rank, slow_node), (jitter,), (stutter,)],
    ids=lambda causes: "+".join(cause.__name__ for cause in causes) or "nothing",
)
def test_slow_devices_and_noise_are_not_uneven_work(causes: tuple[WorkTime, ...]) -> None:
    assert found_in(timeline(JOB, times(*causes))) == ()


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        *((JOB, fault) for fault in (None, slow_later, slow_node, jitter)),
        (Job(pp=2, micro_batches=(8, 4, 8), chunks=2), slow_node),
    ],
)
def test_long_sequences_are_named_at_what_they_cost(job: Job, fault: WorkTime | None) -> None:
    faults, job = () if fault is None else (fault,), replace(job, steps=20)
    (anomaly,) = found_in(timeline(job, times(length, *faults)))
    assert (anomaly.kind, anomaly.rank, anomaly.stage) == (SEQUENCE, None, None)
    assert (anomaly.tier, anomaly.first_step, anomaly.last_step) == (Tier.PROBABLE, 0, None)
    assert "stages agree" in anomaly.reason

    mean_length = mean_length_in(job)
    real_s = step_times(job, times(length, *faults))
    even_s = step_times(job, times(mean_length, *faults))
    cost = np.mean(real_s) / np.mean(even_s)
    assert anomaly.slowdown == pytest.approx(cost, rel=0.04)  # 0.01 without a fault beside it
    assert anomaly.low < anomaly.slowdown < anomaly.high


def test_a_heavy_stage_is_named_at_what_it_costs() -> None:
    (anomaly,) = found_in(timeline(JOB, times(heavy)))
    assert (anomaly.kind, anomaly.rank, anomaly.stage) == (STAGE, None, 3)
    assert anomaly.tier is Tier.PROBABLE
    evened = step_times(JOB, times(lambda *place: 1.1))
    cost = np.mean(step_times(JOB, times(heavy))) / np.mean(evened)
    assert anomaly.slowdown == pytest.approx(cost, rel=0.005)
    assert "1.27 times the mean work" in anomaly.reason  # 1.4 over the mean 1.1


def test_a_heavy_stage_is_seen_beside_a_slow_rank_of_it() -> None:
    def slow_in_it(step: int, dp: int, stage: int, compute: Compute) -> float:
        return 1.2 if (dp, stage) == (0, 3) else 1.0

    (anomaly,) = found_in(timeline(JOB, times(heavy, slow_in_it)))
    assert (anomaly.kind, anomaly.stage) == (STAGE, 3)
    evened = step_times(JOB, times(lambda *place: 1.1, slow_in_it))
    cost = np.mean(step_times(JOB, times(heavy, slow_in_it))) / np.mean(evened)
    assert anomaly.slowdown == pytest.approx(cost, rel=0.01)


def test_two_causes_share_the_whole_cost() -> None:
    anomalies = found_in(timeline(JOB, times(heavy, length)))
    assert {anomaly.kind for anomaly in anomalies} == {SEQUENCE, STAGE}
    assert anomalies[0].slowdown >= anomalies[1].slowdown

    mean_length = mean_length_in(JOB)
    evened = times(lambda *place: 1.1 * mean_length(*place))
    whole = np.mean(step_times(JOB, times(heavy, length))) / np.mean(step_times(JOB, evened))
    assert np.prod([anomaly.slowdown for anomaly in anomalies]) == pytest.approx(whole, rel=0.03)


def test_a_head_that_costs_the_same_for_all_is_a_heavy_stage_and_no_more() -> None:
    """Evening the stages keeps each micro-batch's work: half of the head for each of two stages."""
    job = Job(pp=2, micro_batches=(6, 6), steps=10)

    def with_head(step: int, dp: int, stage: int, compute: Compute) -> float:
        work = 1.0 + 0.02 * compute[2]
        return work + (0.8 if stage == 1 else 0.0)

    (anomaly,) = found_in(timeline(job, times(with_head)))
    evened = times(lambda step, dp, stage, compute: 1.4 + 0.02 * compute[2])
    cost = np.mean(step_times(job, times(with_head))) / np.mean(step_times(job, evened))
    assert (anomaly.kind, anomaly.stage) == (STAGE, 1)
    assert anomaly.slowdown == pytest.approx(cost, rel=0.003)


@pytest.mark.parametrize(("cause", "spread"), [(length, 0.35), (jitter, 0.0)])
def test_only_what_stages_share_is_the_work_of_a_micro_batch(
    cause: WorkTime, spread: float
) -> None:
    trace = timeline(replace(JOB, steps=20), times(cause))
    assert trace.compute is not None
    shared = shared_work(compute_rows(trace.compute, trace.workers))
    assert shared is not None
    log_work, found = shared
    assert np.std(log_work) == pytest.approx(spread, abs=0.03)
    assert (found.p_value < 1e-9) == (spread > 0.0)


def test_noise_in_few_micro_batches_is_rarely_taken_for_work() -> None:
    job = Job(pp=2, micro_batches=(2, 2), steps=4)
    named = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        table = timeline(job, even).compute
        assert table is not None
        noise = random.lognormal(0.0, 0.4, len(table.compute_s))
        trace = replace(
            timeline(job, even), ops=None, compute=replace(table, compute_s=table.compute_s * noise)
        )
        named += any(anomaly.kind is SEQUENCE for anomaly in imbalances(trace, None))
    assert named == 0


def test_with_one_rank_a_stage_a_heavy_stage_is_only_suspected() -> None:
    (anomaly,) = found_in(timeline(Job(micro_batches=(8,), steps=10), times(heavy)))
    assert (anomaly.kind, anomaly.tier) == (STAGE, Tier.SUSPECTED)
    assert "device" in anomaly.reason
    assert found_in(timeline(Job(micro_batches=(8,), steps=40), times(slow_late_alone))) == ()


def slow_late_alone(step: int, dp: int, stage: int, compute: Compute) -> float:
    return 1.5 if stage == 1 and step >= 10 else 1.0


def test_without_stages_forward_and_backward_bear_witness() -> None:
    job = Job(pp=1, micro_batches=(8,) * 6, steps=10)
    (anomaly,) = found_in(timeline(job, times(length)))
    assert (anomaly.kind, anomaly.tier) == (SEQUENCE, Tier.SUSPECTED)
    assert "forward and backward agree" in anomaly.reason

    def slow_in_both(step: int, dp: int, stage: int, compute: Compute) -> float:
        return 2.0 if dp == 1 else 1.0 + 0.1 * (dp == 2) * (step % 2)

    assert found_in(timeline(job, times(slow_in_both))) == ()


def test_numbers_of_ranks_and_half_of_the_steps_say_the_same() -> None:
    trace = timeline(replace(JOB, steps=24), times(heavy, length))
    ops = trace.ops
    assert ops is not None
    whole = found_in(trace)
    new = np.random.default_rng(1).permutation(len(trace.workers))
    moved_ops = replace(ops, rank=new[ops.rank])
    moved = replace(
        trace,
        workers=tuple(replace(w, rank=int(new[w.rank])) for w in trace.workers),
        ops=moved_ops,
        compute=compute_of(moved_ops),
    )
    for one, other in zip(whole, found_in(moved), strict=True):
        assert (one.kind, one.stage) == (other.kind, other.stage)
        assert one.slowdown == pytest.approx(other.slowdown)
    for kept in (ops.step < 12, ops.step >= 12):
        half = found_in(only_rows(trace, kept))
        assert [anomaly.kind for anomaly in half] == [anomaly.kind for anomaly in whole]
        assert half[0].first_step == int(ops.step[kept].min())


def test_without_a_timeline_the_busiest_rank_is_the_clock() -> None:
    trace = replace(timeline(JOB, times(heavy)), ops=None)
    (anomaly,) = imbalances(trace, None)
    assert (anomaly.kind, anomaly.stage) == (STAGE, 3)
    assert anomaly.slowdown == pytest.approx(1.4 / 1.1, rel=0.01)


def test_few_whole_steps_do_not_stand_for_the_run() -> None:
    """Of nearly all steps an operation is lost: the busiest ranks of all of them say what it costs,
    where the three that can be replayed would say it with a wide interval.
    """
    trace = timeline(replace(JOB, steps=24), times(length))
    assert trace.ops is not None
    ops = trace.ops
    lost = np.array(
        [np.flatnonzero((ops.step == s) & (ops.op == OpType.FORWARD_SEND))[0] for s in range(3, 24)]
    )
    cut = only_rows(trace, ~np.isin(np.arange(len(ops.step)), lost))
    (anomaly,) = found_in(cut)
    (by_busiest,) = imbalances(replace(cut, ops=None), None)
    assert anomaly.kind is SEQUENCE
    assert anomaly.slowdown == pytest.approx(by_busiest.slowdown)


def test_two_steps_or_none_say_nothing() -> None:
    trace = timeline(replace(JOB, steps=2), times(length))
    assert found_in(trace) == ()
    assert imbalances(replace(trace, ops=None, compute=None), None) == ()


def known_work(tokens: np.ndarray, rows: np.ndarray) -> Trace:
    """Steps of four ranks with one stage; time = 0.1 + tokens + 2 rows, in thousandths."""
    shape = tokens.shape
    step, rank = (index.ravel() for index in np.indices(shape))
    noise = np.random.default_rng(0).normal(1.0, 0.01, tokens.size)
    zeros = np.zeros(tokens.size, dtype=np.intp)
    return Trace(
        name="known",
        source="synthetic",
        workers=tuple(Worker(rank=at, dp=at) for at in range(shape[1])),
        compute=ComputeTable(
            step=step, rank=rank, micro_batch=zeros, chunk=zeros + Chunk.WHOLE, model_chunk=zeros,
            compute_s=(0.1 + (tokens + 2.0 * rows).ravel() / 1e3) * noise,
            tokens=tokens.ravel(), sum_len_squared=tokens.ravel() * 0.0, expert_rows=rows.ravel(),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "at"), [(SEQUENCE, 0), (EXPERT, 1)])
def test_where_the_work_is_known_it_is_priced(kind: AnomalyKind, at: int) -> None:
    work = [np.full((12, 4), 100.0), np.full((12, 4), 100.0)]
    work[at] = np.random.default_rng(at).uniform(20.0, 180.0, (12, 4))
    (anomaly,) = imbalances(known_work(*work), None)
    assert (anomaly.kind, anomaly.tier) == (kind, Tier.PROBABLE)
    busiest = (0.1 + (work[0] + 2.0 * work[1]) / 1e3).max(axis=1).mean()
    even_s = 0.1 + (work[0].mean(axis=1) + 2.0 * work[1].mean(axis=1)).mean() / 1e3
    assert anomaly.slowdown == pytest.approx(busiest / even_s, rel=0.02)


def test_known_even_work_is_even_whatever_the_times() -> None:
    trace = known_work(np.full((12, 4), 100.0), np.full((12, 4), 100.0))
    assert trace.compute is not None
    compute_s = trace.compute.compute_s * np.where(trace.compute.rank == 2, 2.0, 1.0)
    assert (
        imbalances(replace(trace, compute=replace(trace.compute, compute_s=compute_s)), None) == ()
    )


def test_three_causes_that_hide_each_other_share_the_whole_cost() -> None:
    random = np.random.default_rng(3)
    tokens = random.uniform(20.0, 300.0, (60, 2)).repeat(2, axis=1)  # of a dp rank: ranks 0, 1
    rows = random.uniform(30.0, 150.0, (60, 4))
    trace = known_work(tokens, rows)
    assert trace.compute is not None
    compute_s = trace.compute.compute_s * np.where(trace.compute.rank % 2 == 1, 1.3, 1.0)
    three = replace(
        trace,
        workers=tuple(Worker(rank=at, stage=at % 2, dp=at // 2) for at in range(4)),
        compute=replace(trace.compute, compute_s=compute_s),
    )
    anomalies = imbalances(three, None)
    assert {anomaly.kind for anomaly in anomalies} == {SEQUENCE, STAGE, EXPERT}
    busiest = compute_s.reshape(60, 4).max(axis=1).mean()
    # Even within a step: tokens over the dp ranks, rows over the ranks of the same stage.
    rows_of_stage = (rows[:, :2] + rows[:, 2:]) / 2.0
    work = tokens.mean(axis=1)[:, None] + 2.0 * rows_of_stage
    even_s = 1.15 * (0.1 + work / 1e3).max(axis=1).mean()
    product = np.prod([anomaly.slowdown for anomaly in anomalies])
    assert product == pytest.approx(busiest / even_s, rel=0.02)
