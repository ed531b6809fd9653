"""Whatever transfers a record tells: links are judged, or nothing is said of them."""

import warnings
from math import isfinite

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.predictor.recorded.online_rules import slow_links
from pacekeeper.predictor.recorded.trace import OwnTransferTable, Trace, Worker
from support.examples import examples

NUM_STEPS, NUM_RANKS = 30, 3
times = st.sampled_from([np.nan, 0.0, 1e-300, 1e-9, 0.01, 0.5, 1e6, 9e8])
sizes = st.sampled_from([0.0, 1.0, 1e6, 2.0**52])
odd_rows = st.lists(st.tuples(st.integers(0, NUM_STEPS * NUM_RANKS - 1), times, sizes), max_size=25)


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=odd_rows,
    seed=st.integers(0, 99),
    jitter=st.sampled_from([0.0, 0.01, 1.0]),
    gone=st.none() | st.integers(0, NUM_STEPS),
    slow=st.sampled_from([1.0, 3.0, 1e9]),
)
def test_odd_transfers(
    rows: list[tuple[int, float, float]], seed: int, jitter: float, gone: int | None, slow: float
) -> None:
    draw = np.random.default_rng(seed)
    step, rank = (grid.ravel() for grid in np.indices((NUM_STEPS, NUM_RANKS)))
    took_s, moved = 0.01 * np.exp(draw.normal(0.0, jitter, len(step))), np.full(len(step), 1e6)
    took_s[(rank == 2) & (step >= NUM_STEPS // 2)] *= slow
    for at, seconds, size in rows:
        took_s[at], moved[at] = seconds, size
    kept = (rank != 1) | (step < (NUM_STEPS if gone is None else gone))
    trace = Trace(
        name="job",
        source="test",
        workers=tuple(Worker(rank=r) for r in range(NUM_RANKS)),
        own_transfers=OwnTransferTable(
            step=step[kept], rank=rank[kept], num_bytes=moved[kept], transfer_s=took_s[kept]
        ),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in slow_links(trace):
            assert 0.0 < found.low <= found.slowdown <= found.high and isfinite(found.high)
            assert found.last_step is None or found.first_step <= found.last_step
