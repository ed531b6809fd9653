"""What must hold of slow ranks for any trace: units, names of ranks, all alike, clean noise."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.predictor.recorded.anomalies import Anomaly
from pacekeeper.predictor.recorded.rank_slowdowns import rank_faults
from support.examples import examples, seeds
from support.slow_ranks import FIRST_STEP, pipeline, slowed, summed, table_of, timed

SEEDS = st.integers(0, 10_000)
RANKS = st.integers(0, 15)


def told(anomaly: Anomaly) -> tuple[int | None, int, int | None, float]:
    return anomaly.rank, anomaly.first_step, anomaly.last_step, round(anomaly.slowdown, 6)


@settings(max_examples=examples(20), deadline=None)
@given(seed=SEEDS, rank=RANKS, scale=st.floats(1e-3, 1e3), sums=st.booleans())
def test_the_unit_of_time_changes_nothing(seed: int, rank: int, scale: float, sums: bool) -> None:
    trace = slowed(pipeline(seed=seed), rank, 1.3, first=5)
    trace = summed(trace) if sums else trace
    scaled = timed(trace, np.full(len(table_of(trace).step), scale))
    assert [told(t) for t in rank_faults(scaled)] == [told(t) for t in rank_faults(trace)]


@settings(max_examples=examples(20), deadline=None)
@given(seed=SEEDS, rank=RANKS, data=st.data())
def test_other_names_of_ranks_and_another_order_of_rows_only_rename_findings(
    seed: int, rank: int, data: st.DataObject
) -> None:
    trace = slowed(pipeline(seed=seed), rank, 1.3, first=5)
    names = np.array(data.draw(st.permutations(range(16))))
    order = np.random.default_rng(seed).permutation(len(table_of(trace).step))
    table = table_of(trace)
    rows = {name: getattr(table, name)[order] for name in type(table).__slots__}
    renamed = replace(
        trace,
        workers=tuple(replace(w, rank=int(names[w.rank])) for w in trace.workers),
        compute=type(table)(**(rows | {"rank": names[rows["rank"]]})),
    )
    expected = {
        (int(names[t.rank]), t.first_step) for t in rank_faults(trace) if t.rank is not None
    }
    assert {(t.rank, t.first_step) for t in rank_faults(renamed)} == expected


@settings(max_examples=examples(20), deadline=None)
@given(seed=SEEDS, factor=st.floats(1.05, 5.0), first=st.integers(0, 10), sums=st.booleans())
def test_a_slowdown_of_everybody_accuses_nobody(
    seed: int, factor: float, first: int, sums: bool
) -> None:
    trace = pipeline(seed=seed)
    trace = summed(trace) if sums else trace
    later = np.where(table_of(trace).step >= FIRST_STEP + first, factor, 1.0)
    assert rank_faults(timed(trace, later)) == rank_faults(trace) == ()


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=SEEDS,
    rank=RANKS,
    first=st.integers(0, 9),
    sums=st.booleans(),
    tail_freedom=st.sampled_from([None, 3.0]),
)
def test_half_as_slow_again_is_always_found_and_nobody_else(
    seed: int, rank: int, first: int, sums: bool, tail_freedom: float | None
) -> None:
    trace = slowed(pipeline(seed=seed, tail_freedom=tail_freedom), rank, 1.5, first=first)
    found = rank_faults(summed(trace) if sums else trace)
    assert [(t.rank, t.last_step) for t in found] == [(rank, None)]
    assert found[0].low < 1.5 < found[0].high or abs(found[0].slowdown / 1.5 - 1.0) < 0.02
    assert abs(found[0].first_step - (FIRST_STEP + first)) <= (1 if sums else 0)


def test_clean_noise_stays_within_the_stated_false_alarms() -> None:
    """One finding in a hundred traces is promised; 5 of 100 would happen once in 300 times."""
    drawn = seeds(100)
    for tail_freedom in (None, 3.0):
        for sums in (False, True):
            found = 0
            for seed in drawn:
                trace = pipeline(seed=seed, tail_freedom=tail_freedom, num_dp=6, num_steps=16)
                found += bool(rank_faults(summed(trace) if sums else trace))
            assert found <= len(drawn) // 25, (tail_freedom, sums)
