"""The graph's longest path is what a dumb player of operations says, for any pipeline."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.predictor.imbalance.what_if import replayed, what_if_of
from pacekeeper.predictor.recorded.trace import OpType
from support.examples import examples
from support.synthetic_trace import Compute, Job, step_times, timeline


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    pp, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    chunks = chunks if pp > 1 else 1
    counts = st.integers(1, 3).map(lambda n: n * pp) if chunks > 1 else st.integers(1, 6)
    return Job(
        pp=pp,
        micro_batches=tuple(draw(st.lists(counts, min_size=1, max_size=3))),
        chunks=chunks,
        steps=2,
        transfer_s=draw(st.sampled_from([0.0, 0.003, 0.2])),
    )


@settings(max_examples=examples(40), deadline=None)
@given(job=jobs(), seed=st.integers(0, 2**32 - 1))
def test_replay_equals_playing_the_operations(job: Job, seed: int) -> None:
    random = np.random.default_rng(seed)
    times_s: dict[tuple[int, int, int, Compute], float] = {}

    def uneven(step: int, dp: int, stage: int, compute: Compute) -> float:
        base_s = 0.1 if compute[0] is OpType.FORWARD else 0.2
        key = (step, dp, stage, compute)
        return times_s.setdefault(key, base_s * float(random.lognormal(0.0, 0.5)))

    replay = replayed(timeline(job, uneven))[0]
    assert replay is not None and len(replay.graphs) == job.steps
    played_s = step_times(job, uneven)
    replayed_s = [float(graph.duration_s(graph.own_s[:, None])[0]) for graph in replay.graphs]
    assert replayed_s == pytest.approx(played_s)

    def mean_s(op: OpType) -> float:
        return float(np.mean([s for key, s in times_s.items() if key[3][0] is op]))

    ideal = {op: mean_s(op) for op in (OpType.FORWARD, OpType.BACKWARD)}
    ideal_s = step_times(job, lambda step, dp, stage, compute: ideal[compute[0]])
    assert what_if_of(replay).slowdown == pytest.approx(np.mean(played_s) / np.mean(ideal_s))


@settings(max_examples=examples(20), deadline=None)
@given(job=jobs(), seed=st.integers(0, 2**32 - 1))
def test_numbers_of_ranks_do_not_matter(job: Job, seed: int) -> None:
    random = np.random.default_rng(seed)
    factor = random.lognormal(0.0, 0.3, size=(job.dp, job.pp))
    trace = timeline(
        job, lambda step, dp, stage, compute: 0.1 * float(factor[dp, stage]) * (1 + step)
    )
    ops = trace.ops
    assert ops is not None
    new = random.permutation(len(trace.workers))
    order = random.permutation(len(ops.op))
    columns = {name: getattr(ops, name)[order] for name in type(ops).__slots__}
    columns["rank"] = new[columns["rank"]]
    moved = replace(
        trace,
        workers=tuple(replace(w, rank=int(new[w.rank])) for w in trace.workers),
        ops=type(ops)(**columns),
    )
    one, other = replayed(trace)[0], replayed(moved)[0]
    assert one is not None and other is not None
    before, after = what_if_of(one), what_if_of(other)
    assert after.slowdown == pytest.approx(before.slowdown)
    assert after.by_dp == pytest.approx(before.by_dp)
    assert after.by_rank == pytest.approx(
        {int(new[rank]): score for rank, score in before.by_rank.items()}
    )
