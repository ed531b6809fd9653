"""What-if replay: what it leaves out it says, and its definitions are those of the paper."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.imbalance.what_if import replayed, what_if_of
from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.predictor.recorded.anomalies import WhatIf
from pacekeeper.predictor.recorded.trace import OpTable, OpType, Trace, Worker
from support.synthetic_trace import Compute, Job, only_rows, step_times, timeline


def what_if(trace: Trace) -> WhatIf | None:
    replay = replayed(trace)[0]
    return None if replay is None else what_if_of(replay)


def even(step: int, dp: int, stage: int, compute: Compute) -> float:
    return 0.1 if compute[0] is OpType.FORWARD else 0.2


def slow_rank(step: int, dp: int, stage: int, compute: Compute) -> float:
    return even(step, dp, stage, compute) * (2.0 if (dp, stage) == (1, 0) else 1.0)


def with_row(trace: Trace, **values: float) -> Trace:
    """The trace with one operation more."""
    ops = trace.ops
    assert ops is not None
    return replace(
        trace,
        ops=OpTable(
            **{
                name: np.append(column := getattr(ops, name), np.array(values[name], column.dtype))
                for name in OpTable.__slots__
            }
        ),
    )


def test_nothing_would_be_gained_in_an_even_job() -> None:
    found = what_if(timeline(Job(), even))
    assert found is not None and found.notes == ()
    parts = [*found.by_dp.values(), *found.by_stage.values(), *found.by_op.values()]
    assert [found.slowdown, *parts] == pytest.approx([1.0] * (1 + len(parts)))
    assert (found.worst_workers_share, found.last_stage_share) == (0.0, 0.0)


def test_a_slow_rank_is_the_one_whose_dp_rank_and_stage_both_cost() -> None:
    job = Job(micro_batches=(8, 8, 8))
    found = what_if(timeline(job, slow_rank))
    assert found is not None
    assert found.slowdown > 1.4
    assert max(found.by_rank, key=lambda rank: found.by_rank[rank]) == 1
    assert found.by_rank[1] == min(found.by_dp[1], found.by_stage[0]) > 1.4
    assert found.by_rank[0] == pytest.approx(1.0)
    # The worst 3 % of 12 ranks are one. More than the whole loss: the ideal is a mean that the slow
    # rank has a part in.
    assert found.worst_workers_share > 1.0
    assert found.last_stage_share < 0.05


def test_a_heavy_last_stage_is_found_by_stage() -> None:
    def heavy(step: int, dp: int, stage: int, compute: Compute) -> float:
        return even(step, dp, stage, compute) * (1.5 if stage == 3 else 1.0)

    found = what_if(timeline(Job(), heavy))
    assert found is not None
    assert found.by_stage[3] > 1.2 and found.by_stage[1] < 1.0
    assert found.last_stage_share > 1.0
    assert found.by_op["backward"] > found.by_op["forward"] > 1.0
    assert found.by_op["optimizer"] == pytest.approx(1.0)


def test_the_ideal_is_the_mean_of_compute_and_the_median_of_transfers() -> None:
    trace = timeline(Job(steps=3, pp=1, micro_batches=(2, 2)), slow_rank)
    replay = replayed(trace)[0]
    assert replay is not None
    assert replay.ideal_s[OpType.FORWARD] == pytest.approx(0.15)
    assert replay.ideal_s[OpType.GRADS_REDUCE_SCATTER] == pytest.approx(0.05)
    ops = trace.ops
    assert ops is not None
    # A collective that was slow in one step of three does not change the median, and S says so.
    late = (ops.step == 1) & (ops.op == OpType.GRADS_REDUCE_SCATTER)
    after = (ops.step == 1) & np.isin(ops.op, (OpType.CLIP_GRADS, OpType.OPTIMIZER))
    slow = replace(ops, duration_s=ops.duration_s + late, start_s=ops.start_s + after)
    mended = replayed(replace(trace, ops=slow))[0]
    assert mended is not None
    assert mended.ideal_s[OpType.GRADS_REDUCE_SCATTER] == pytest.approx(0.05)
    assert [float(graph.duration_s(graph.own_s[:, None])[0]) for graph in mended.graphs][
        1
    ] == pytest.approx(step_times(Job(steps=3, pp=1, micro_batches=(2, 2)), slow_rank)[1] + 1.0)


def test_there_is_nothing_to_replay_without_a_timeline_or_a_whole_step() -> None:
    trace = timeline(Job(steps=1), even)
    assert what_if(replace(trace, ops=None)) is None
    assert trace.ops is not None
    cut = only_rows(trace, trace.ops.op != OpType.BACKWARD_SEND)
    assert what_if(cut) is None
    (note,) = analyze(cut).notes
    assert note == "no step can be replayed: no what-if (step 0: transfers are missing)"


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ({"rank": 3}, "workers are missing"),
        ({"rank": 3, "op": OpType.FORWARD, "micro_batch": 7}, "transfers are missing"),
        ({"rank": 0, "op": OpType.FORWARD_SEND, "sequence": 4}, "transfers are missing"),
        ({"rank": 5, "op": OpType.OPTIMIZER}, "the step's end is missing"),
        ({"micro_batch": 7}, "transfers are missing"),
    ],
)
def test_a_step_that_is_cut_off_is_left_out_and_said(lost: dict[str, int], why: str) -> None:
    trace = timeline(Job(), slow_rank)
    assert trace.ops is not None
    hit = trace.ops.step == 2
    for name, value in lost.items():
        hit &= getattr(trace.ops, name) == value
    assert hit.any()
    whole, cut = what_if(trace), what_if(only_rows(trace, ~hit))
    assert whole is not None and cut is not None
    assert cut.notes == (f"1 steps not replayed (step 2: {why})",)
    assert cut.slowdown == pytest.approx(whole.slowdown)


def test_a_micro_batch_that_one_stage_did_not_run_makes_the_step_partial() -> None:
    trace = timeline(Job(pp=1, micro_batches=(4,)), even)
    assert trace.ops is not None
    hit = (trace.ops.step == 0) & (trace.ops.op == OpType.BACKWARD) & (trace.ops.micro_batch == 3)
    cut = what_if(only_rows(trace, ~hit))
    assert cut is not None and cut.notes == (
        "1 steps not replayed (step 0: micro-batches are missing)",
    )


def test_transfers_that_were_recorded_and_never_ran_change_nothing() -> None:
    trace = timeline(Job(steps=2), slow_rank)
    ops = trace.ops
    assert ops is not None
    last = np.flatnonzero((ops.step == 0) & (ops.rank == 2) & (ops.op == OpType.FORWARD_RECV))[-1]
    noise = {name: getattr(ops, name)[last] for name in OpTable.__slots__}
    compute_end_s = float(ops.start_s[(ops.step == 0) & (ops.op == OpType.BACKWARD)].max())
    extra = noise | {"start_s": compute_end_s + 0.01, "sequence": noise["sequence"] + 1}
    before, after = what_if(trace), what_if(with_row(trace, **extra))
    assert before is not None and after is not None and after.notes == ()
    assert after.slowdown == pytest.approx(before.slowdown, rel=1e-3)


def test_the_first_stage_may_record_what_it_has_nobody_to_send_to() -> None:
    trace = timeline(Job(steps=2), slow_rank)
    ops = trace.ops
    assert ops is not None
    firsts = np.flatnonzero((ops.rank < 2) & (ops.op == OpType.FORWARD))
    more = trace
    for row in firsts:
        values = {name: getattr(ops, name)[row] for name in OpTable.__slots__}
        values |= {"op": OpType.FORWARD_RECV, "micro_batch": -1, "duration_s": 0.0}
        more = with_row(more, **values)
    before, after = what_if(trace), what_if(more)
    assert before is not None and after is not None and after.notes == ()
    assert after.slowdown == pytest.approx(before.slowdown, rel=1e-3)


def test_ranks_that_share_a_place_are_replayed_once_and_said() -> None:
    trace = timeline(Job(), slow_rank)
    twin = Worker(rank=100, stage=0, dp=0)
    alone, both = what_if(trace), what_if(replace(trace, workers=(*trace.workers, twin)))
    assert alone is not None and both is not None
    assert both.notes == ("1 ranks share a place and are not replayed",)
    assert both.slowdown == alone.slowdown and 100 not in both.by_rank


def test_gradients_that_leave_while_backward_still_runs_are_replayed_so() -> None:
    """The first of two model chunks sends its gradients in two parts, one after the other."""
    job, long_s = Job(pp=2, micro_batches=(4, 4), chunks=2, steps=1), 5.0
    trace = timeline(job, even)
    ops = trace.ops
    assert ops is not None
    sequence = ops.sequence + 2 * (ops.op == OpType.GRADS_REDUCE_SCATTER)
    more, first_gone_s = replace(trace, ops=replace(ops, sequence=sequence)), 0.0
    for rank in range(4):
        mine = (ops.rank == rank) & (ops.op == OpType.BACKWARD) & (ops.model_chunk == 1)
        row = np.flatnonzero(mine)[ops.start_s[mine].argmax()]
        values = {name: getattr(ops, name)[row] for name in OpTable.__slots__}
        ready_s = values["start_s"] + values["duration_s"]
        first_gone_s = max(first_gone_s, ready_s + long_s)
        values |= {"op": OpType.GRADS_REDUCE_SCATTER, "micro_batch": -1}
        for at, took_s in enumerate((long_s, 0.01)):
            values |= {"sequence": at, "start_s": ready_s + (1 + at) * 1e-6, "duration_s": took_s}
            more = with_row(more, **values)
    replay = replayed(more)[0]
    assert replay is not None and replay.notes == ()
    (graph,) = replay.graphs
    closing_s = job.embedding_s + job.scatter_s + job.clip_s + job.optimizer_s
    assert graph.duration_s(graph.own_s[:, None])[0] == pytest.approx(
        first_gone_s + 0.01 + closing_s, abs=1e-4
    )


def test_the_first_gradient_comes_no_sooner_than_the_last_but_one_forward_of_the_warm_up() -> None:
    def slow_start(step: int, dp: int, stage: int, compute: Compute) -> float:
        slow = ((OpType.FORWARD, 1, 1), (OpType.BACKWARD, 1, 0))
        return 5.0 if stage == 0 and compute in slow else 0.01

    job = Job(pp=2, chunks=2, micro_batches=(4,), steps=1, transfer_s=0.2)
    replay = replayed(timeline(job, slow_start))[0]
    assert replay is not None
    (graph,) = replay.graphs
    assert graph.duration_s(graph.own_s[:, None])[0] == pytest.approx(
        step_times(job, slow_start)[0]
    )


@pytest.mark.parametrize(
    ("renamed", "why"),
    [
        ({3: 77}, "a transfer has lost its other end"),
        ({0: 1, 1: 0}, "operations wait for each other in a circle"),
    ],
)
def test_a_record_that_can_not_have_happened_is_left_out(renamed: dict[int, int], why: str) -> None:
    trace = timeline(Job(), slow_rank)
    ops = trace.ops
    assert ops is not None
    names = ops.micro_batch.copy()
    for old, new in renamed.items():
        names[(ops.step == 1) & (ops.rank == 2) & (ops.micro_batch == old)] = new
    found = what_if(replace(trace, ops=replace(ops, micro_batch=names)))
    assert found is not None and found.notes == (f"1 steps not replayed (step 1: {why})",)
