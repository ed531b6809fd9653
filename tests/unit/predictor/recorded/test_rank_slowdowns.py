"""Slow ranks in recorded runs: who, since when, how slow; work and wild samples are nobody's."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.recorded import rank_slowdowns
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.predictor.recorded.noise import thresholds
from pacekeeper.predictor.recorded.rank_slowdowns import rank_faults
from pacekeeper.predictor.recorded.trace import Chunk, ComputeTable, Trace
from support.examples import seeds
from support.slow_ranks import FIRST_STEP, pipeline, slowed, summed, table_of, timed


def test_a_rank_slow_from_the_first_step_is_named_by_its_peers() -> None:
    (anomaly,) = rank_faults(slowed(pipeline(), rank=3, factor=2.0))
    assert (anomaly.kind, anomaly.rank, anomaly.stage) == (AnomalyKind.COMPUTE, 3, 0)
    assert (anomaly.first_step, anomaly.last_step) == (FIRST_STEP, None)
    assert anomaly.low < 2.0 < anomaly.high
    assert anomaly.slowdown == pytest.approx(2.0, rel=0.02)
    assert anomaly.tier is Tier.CONFIRMED
    assert "from the first recorded step" in anomaly.reason and "7 peers" in anomaly.reason


@pytest.mark.parametrize(("factor", "rank"), [(1.03, 9), (1.05, 2), (1.3, 15)])
def test_a_small_onset_is_dated_and_measured(factor: float, rank: int) -> None:
    (anomaly,) = rank_faults(slowed(pipeline(seed=1), rank, factor, first=7))
    assert (anomaly.rank, anomaly.first_step) == (rank, FIRST_STEP + 7)
    assert anomaly.low < factor < anomaly.high
    assert "since step 17, after 7 steps at its healthy pace" in anomaly.reason


def test_one_step_of_five_percent_is_enough() -> None:
    (anomaly,) = rank_faults(slowed(pipeline(seed=2), 5, 1.05, first=11))
    assert (anomaly.rank, anomaly.first_step) == (5, FIRST_STEP + 11)


def test_a_transient_ends_and_may_come_back() -> None:
    trace = slowed(pipeline(num_steps=24), 4, 1.2, first=5, last=9)
    again = slowed(trace, 4, 1.2, first=18, last=20)
    found = sorted(rank_faults(again), key=lambda anomaly: anomaly.first_step)
    assert [(t.rank, t.first_step, t.last_step) for t in found] == [
        (4, FIRST_STEP + 5, FIRST_STEP + 9),
        (4, FIRST_STEP + 18, FIRST_STEP + 20),
    ]
    assert "and recovered" in found[0].reason


def now_and_then(trace: Trace, rank: int, factor: float, *, every: int, first: int) -> Trace:
    table = table_of(trace)
    since = table.step - FIRST_STEP - first
    return timed(
        trace, np.where((table.rank == rank) & (since >= 0) & (since % every == 0), factor, 1.0)
    )


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("every", [2, 3, 4])
@pytest.mark.parametrize("is_summed", [False, True])
def test_a_rank_slow_now_and_then_is_told_by_its_mean(
    seed: int, every: int, is_summed: bool
) -> None:
    trace = now_and_then(pipeline(seed=seed, num_steps=40), 5, 1.3, every=every, first=12)
    (anomaly,) = rank_faults(summed(trace) if is_summed else trace)
    assert (anomaly.rank, anomaly.tier) == (5, Tier.PROBABLE)
    assert anomaly.first_step == FIRST_STEP + 12
    assert anomaly.slowdown == pytest.approx(1.0 + 0.3 / every, abs=0.02)
    num_slow = 28 // every + (28 % every > 0)
    assert f" in {num_slow} of {every * (num_slow - 1) + 1} recorded steps" in anomaly.reason
    assert f"it is slow once in every {every} steps" in anomaly.reason


@pytest.mark.parametrize(("num_slow", "every"), [(6, 14), (8, 24)])
def test_slow_stretches_of_several_steps_stay_slowdowns_of_their_own(
    num_slow: int, every: int
) -> None:
    trace, firsts = pipeline(num_dp=4, num_steps=78), range(6, 78, every)
    for first in firsts:
        trace = slowed(trace, 4, 1.3, first=first, last=first + num_slow - 1)
    found = sorted(rank_faults(trace), key=lambda anomaly: anomaly.first_step)
    assert [(t.rank, t.first_step) for t in found] == [(4, FIRST_STEP + first) for first in firsts]
    assert all(anomaly.low < 1.3 < anomaly.high for anomaly in found)


def test_a_rank_slow_now_and_then_and_later_throughout_has_a_finding_of_each() -> None:
    trace = now_and_then(pipeline(num_steps=80), 5, 1.3, every=3, first=2)
    found = sorted(rank_faults(slowed(trace, 5, 1.3, first=50)), key=lambda t: t.first_step)
    assert [(t.rank, t.first_step) for t in found] == [(5, FIRST_STEP + 2), (5, FIRST_STEP + 50)]
    assert [t.slowdown for t in found] == pytest.approx([1.1, 1.3], abs=0.02)
    assert "once in every 3 steps" in found[0].reason and found[1].last_step is None


def test_a_rank_slow_now_and_then_beside_one_that_is_slow_throughout() -> None:
    trace = now_and_then(pipeline(num_steps=40), 5, 1.3, every=3, first=4)
    found = {t.rank: t for t in rank_faults(slowed(trace, 2, 1.2, first=20))}
    assert set(found) == {2, 5}
    assert found[5].slowdown == pytest.approx(1.1, abs=0.02)
    assert found[2].low < 1.2 < found[2].high


def test_an_episode_in_a_long_run_is_told_from_its_first_spell_to_its_last() -> None:
    trace = now_and_then(pipeline(num_dp=4, num_stages=1, num_steps=900), 2, 1.3, every=3, first=12)
    (whole,) = rank_faults(summed(trace))
    assert (whole.rank, whole.first_step, whole.last_step) == (2, FIRST_STEP + 12, FIRST_STEP + 897)
    assert " in 296 of 886 recorded steps" in whole.reason


def test_single_spells_elsewhere_hide_no_episode_and_two_episodes_are_two() -> None:
    trace = pipeline(num_dp=4, num_stages=1, num_steps=600)
    table = table_of(trace)
    at = table.step - FIRST_STEP
    spells = [*range(20, 50, 4), *range(300, 330, 5), 150, 590]
    trace = timed(trace, np.where((table.rank == 2) & np.isin(at, spells), 1.5, 1.0))
    found = [t for t in rank_faults(summed(trace)) if "recorded steps" in t.reason]
    assert sorted((t.rank, t.first_step, t.last_step) for t in found) == [
        (2, FIRST_STEP + 20, FIRST_STEP + 48),
        (2, FIRST_STEP + 300, FIRST_STEP + 325),
    ]


def test_the_period_is_in_steps_of_the_job_where_few_are_recorded() -> None:
    trace = now_and_then(pipeline(num_steps=40), 5, 1.3, every=3, first=12)
    table = table_of(trace)
    sparse = replace(trace, compute=replace(table, step=10 * table.step))
    (anomaly,) = rank_faults(summed(sparse))
    assert "once in every 30 steps" in anomaly.reason
    assert " in 10 of 28 recorded steps" in anomaly.reason


def test_ranks_that_are_all_slow_now_and_then_are_not_named() -> None:
    trace = pipeline(num_dp=16, num_stages=1, num_steps=60)
    table = table_of(trace)
    wild = np.random.default_rng(2).random((60, 16)) < 1 / 6
    is_wild = wild[table.step - FIRST_STEP, table.rank]
    named = rank_faults(timed(trace, np.where(is_wild, 1.3, 1.0)))
    assert not [anomaly for anomaly in named if "recorded steps" in anomaly.reason]


@pytest.mark.parametrize("factor", [1.06, 1.3])
def test_a_recovery_does_not_accuse_the_stage_that_was_compared_with_it(factor: float) -> None:
    trace = slowed(pipeline(num_dp=8), 2, factor, last=5)
    assert [(t.rank, t.last_step) for t in rank_faults(trace)] == [(2, FIRST_STEP + 5)]


def test_two_slow_ranks_of_one_pipeline_of_many_are_both_named() -> None:
    trace = slowed(slowed(pipeline(num_stages=4), 1, 1.2), 17, 1.4, first=6)
    assert {(t.rank, t.first_step) for t in rank_faults(trace)} == {
        (1, FIRST_STEP),
        (17, FIRST_STEP + 6),
    }


def test_levels_that_touch_are_one_finding() -> None:
    trace = slowed(slowed(pipeline(), 6, 1.2, first=4), 6, 1.25, first=8)
    (anomaly,) = rank_faults(trace)
    assert (anomaly.rank, anomaly.first_step, anomaly.last_step) == (6, FIRST_STEP + 4, None)
    assert 1.2 < anomaly.slowdown < 1.5
    far_apart = slowed(slowed(pipeline(), 6, 1.1, first=4), 6, 3.0, first=8)
    (anomaly,) = rank_faults(far_apart)
    assert (anomaly.rank, anomaly.first_step, anomaly.last_step) == (6, FIRST_STEP + 4, None)
    assert anomaly.slowdown == pytest.approx((1.1 * 3.3) ** 0.5, rel=0.02)


def test_longer_documents_accuse_nobody() -> None:
    trace = pipeline(documents=0.8, noise=0.004)
    assert rank_faults(trace) == ()
    table = table_of(trace)
    step = FIRST_STEP + 6  # one pipeline's whole step, on all its stages
    doubled = np.where((table.rank % 8 == 3) & (table.step >= step), 1.5, 1.0)
    assert rank_faults(timed(trace, doubled)) == ()


def test_known_work_tells_a_single_stage_too() -> None:
    trace = pipeline(num_stages=1, documents=0.8, tells_work=True)
    (anomaly,) = rank_faults(slowed(trace, 4, 1.05, first=8))
    assert (anomaly.rank, anomaly.first_step) == (4, FIRST_STEP + 8)
    blind = replace(
        trace, compute=replace(table_of(trace), sum_len_squared=table_of(trace).expert_rows)
    )
    assert rank_faults(slowed(blind, 4, 1.05, first=8)) == ()


def test_a_wild_micro_batch_or_sum_accuses_nobody() -> None:
    trace = pipeline()
    table = table_of(trace)
    wild = (table.rank == 4) & (table.step == FIRST_STEP + 5) & (table.micro_batch == 2)
    assert rank_faults(timed(trace, np.where(wild, 30.0, 1.0))) == ()
    assert rank_faults(slowed(summed(pipeline(documents=0.01)), 4, 3.0, first=5, last=5)) == ()


def test_micro_batches_that_disagree_are_no_slower_device() -> None:
    trace = pipeline()
    table = table_of(trace)
    step = (table.rank == 4) & (table.step == FIRST_STEP + 6)
    uneven = np.where(step, np.array([1.0, 1.0, 1.05, 1.2, 1.3, 1.6])[table.micro_batch], 1.0)
    assert rank_faults(timed(trace, uneven)) == ()
    even = np.where(step, 1.15, 1.0)
    assert [t.rank for t in rank_faults(timed(trace, even))] == [4]


def alone(num_steps: int = 30, seed: int = 3) -> Trace:
    """Sums of a single pipeline: nobody has a peer."""
    return summed(pipeline(seed=seed, num_dp=1, num_stages=4, num_steps=num_steps, documents=0.001))


def test_without_peers_there_is_only_the_past() -> None:
    (anomaly,) = rank_faults(slowed(alone(), 2, 1.02, first=20))
    assert (anomaly.rank, anomaly.first_step) == (2, FIRST_STEP + 20)
    assert anomaly.tier is Tier.PROBABLE and "no peer" in anomaly.reason
    assert rank_faults(slowed(alone(), 2, 2.0)) == ()
    assert rank_faults(slowed(alone(), 2, 1.3, last=9)) == ()
    assert rank_faults(slowed(alone(), 2, 1.0 / 1.1, first=15)) == ()


def test_nearly_all_ranks_of_a_pipeline_may_be_slow_but_not_all() -> None:
    slow = {0: 1.1, 1: 1.2, 3: 1.3}
    trace = alone()
    for rank, factor in slow.items():
        trace = slowed(trace, rank, factor, first=20)
    assert {t.rank for t in rank_faults(trace)} == set(slow)
    everybody = np.where(table_of(alone()).step >= FIRST_STEP + 20, 1.3, 1.0)
    assert rank_faults(timed(alone(), everybody)) == ()


def test_what_many_peers_share_is_nobodys() -> None:
    trace = summed(pipeline(num_dp=16, num_stages=1, num_steps=30, documents=0.05))
    table = table_of(trace)
    half = np.where((table.rank < 8) & (table.step >= FIRST_STEP + 15), 1.2, 1.0)
    assert rank_faults(timed(trace, half)) == ()
    assert [t.rank for t in rank_faults(slowed(trace, 3, 1.2, first=15))] == [3]


def test_what_all_peers_share_in_each_step_hides_nobody() -> None:
    trace = summed(pipeline(num_dp=16, num_stages=1, num_steps=30, documents=0.02))
    table = table_of(trace)
    jitter = np.exp(0.1 * np.random.default_rng(5).standard_normal(30))[table.step - FIRST_STEP]
    late = slowed(timed(trace, jitter), 3, 1.05, first=26)
    assert [(t.rank, t.first_step) for t in rank_faults(late)] == [(3, FIRST_STEP + 26)]


def test_a_rank_whose_clock_is_noisier_than_its_peers_is_not_slow() -> None:
    for seed in range(40):
        trace = pipeline(seed=seed, num_dp=16, num_stages=1, num_steps=4, documents=0.001)
        noise = np.random.default_rng(seed).normal(0.0, 0.05, len(table_of(trace).step))
        shaky = np.where(table_of(trace).rank == 7, np.exp(noise), 1.0)
        assert rank_faults(timed(trace, shaky)) == ()


def test_slow_drift_of_a_percent_is_the_warmth_of_a_gpu() -> None:
    trace = alone(num_steps=40)
    table = table_of(trace)
    ramp = 1.0 + 0.015 * np.clip((table.step - FIRST_STEP) / 25.0, 0.0, 1.0)
    assert rank_faults(timed(trace, np.where(table.rank == 1, ramp, 1.0))) == ()
    steep = 1.0 + 0.15 * np.clip((table.step - FIRST_STEP - 5) / 25.0, 0.0, 1.0)
    found = rank_faults(timed(trace, np.where(table.rank == 1, steep, 1.0)))
    assert {t.rank for t in found} == {1}


def test_missing_rows_are_no_evidence() -> None:
    trace = slowed(pipeline(), 3, 1.2, first=6)
    table = table_of(trace)
    kept = ~((table.rank == 3) & (table.step == FIRST_STEP + 8))
    kept &= ~((table.rank == 5) & (table.step > FIRST_STEP + 3))
    rows = {name: getattr(table, name)[kept] for name in type(table).__slots__}
    (anomaly,) = rank_faults(replace(trace, compute=type(table)(**rows)))
    assert (anomaly.rank, anomaly.first_step) == (3, FIRST_STEP + 6)


def test_a_trace_without_usable_times_is_refused_or_silent() -> None:
    trace = pipeline()
    assert rank_faults(replace(trace, compute=None)) == ()
    with pytest.raises(ValueError, match="no compute time of a known rank"):
        rank_faults(replace(trace, workers=()))


def test_what_is_not_worth_naming_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = slowed(pipeline(), 3, 1.05, first=6)
    assert [t.rank for t in rank_faults(trace)] == [3]
    monkeypatch.setattr(rank_slowdowns, "MIN_SLOWDOWN", 1.1)
    assert rank_faults(trace) == ()


def test_thresholds_share_the_false_alarms_over_all_that_is_looked_at() -> None:
    sigmas = thresholds(28, 64, 0.01, inf)
    assert sigmas.sure == pytest.approx(sigmas.fast)
    assert sigmas.fast == pytest.approx(5.08, abs=0.01)  # Q(z) = 0.005 / (64 * 28 * 29 / 2)
    assert sigmas.slow == pytest.approx(4.20, abs=0.01)  # Q(z) = 0.005 / (64 * (1 + log2 28))
    more, fewer = thresholds(28, 128, 0.01, inf), thresholds(28, 64, 0.1, inf)
    assert more.fast > sigmas.fast > fewer.fast and more.slow > sigmas.slow > fewer.slow


def test_noise_that_few_steps_tell_asks_for_more_evidence() -> None:
    sure, doubtful = thresholds(4, 8, 0.01, inf), thresholds(4, 8, 0.01, 9.0)
    assert doubtful.fast > 1.5 * sure.fast
    assert (doubtful.slow, doubtful.sure) == (sure.slow, sure.sure)


def test_a_rank_slow_in_its_backward_passes_only_is_named_by_them() -> None:
    trace = alone()
    table = table_of(trace)
    late = (table.rank == 2) & (table.step >= FIRST_STEP + 20)
    backward = table.chunk == int(Chunk.BACKWARD)
    # Forward passes as much faster as backward ones are slower: the rank loses nothing in all.
    (anomaly,) = rank_faults(timed(trace, np.where(late, np.where(backward, 1.05, 0.9), 1.0)))
    assert (anomaly.rank, anomaly.first_step) == (2, FIRST_STEP + 20)
    assert anomaly.low < 1.05 < anomaly.high
    assert "computed its backward passes for x1.05" in anomaly.reason


def test_what_a_rank_loses_in_all_is_told_where_all_of_it_is_slow() -> None:
    trace = alone()
    table = table_of(trace)
    late = (table.rank == 2) & (table.step >= FIRST_STEP + 20)
    backward = table.chunk == int(Chunk.BACKWARD)
    (anomaly,) = rank_faults(timed(trace, np.where(late, np.where(backward, 1.3, 1.1), 1.0)))
    assert anomaly.slowdown == pytest.approx((2 * 1.3 + 1.1) / 3, rel=0.01)
    assert "passes" not in anomaly.reason


def test_the_shorter_kind_of_pass_accuses_nobody() -> None:
    trace = alone()
    table = table_of(trace)
    late = (table.rank == 2) & (table.step >= FIRST_STEP + 20)
    forward = table.chunk == int(Chunk.FORWARD)
    assert rank_faults(timed(trace, np.where(late, np.where(forward, 1.05, 0.975), 1.0))) == ()


def test_rows_lost_at_random_hide_neither_work_nor_a_slow_rank() -> None:
    trace = pipeline(num_steps=20, documents=0.8)
    for seed in range(4):
        kept = np.random.default_rng(seed).random(len(table_of(trace).step)) < 0.85
        rows = {name: getattr(table_of(trace), name)[kept] for name in ComputeTable.__slots__}
        partial = replace(trace, compute=ComputeTable(**rows))
        assert rank_faults(partial) == ()
        assert [t.rank for t in rank_faults(slowed(partial, 3, 1.08, first=12))] == [3]


@pytest.mark.parametrize("num_dp", [2, 4, 6])
def test_a_rank_that_tells_few_steps_is_not_slow_where_all_others_recover(num_dp: int) -> None:
    for seed in range(8):
        trace = pipeline(seed=seed, num_dp=num_dp, num_stages=1, num_steps=40, documents=0.002)
        table = table_of(trace := summed(trace))
        were_slow = (table.rank > 0) & (table.step < FIRST_STEP + 20)
        table = table_of(timed(trace, np.where(were_slow, 1.3, 1.0)))
        is_lost = np.random.default_rng(seed).random(len(table.step)) < 0.8
        kept = (table.rank > 0) | ~is_lost
        rows = {name: getattr(table, name)[kept] for name in ComputeTable.__slots__}
        found = rank_faults(replace(trace, compute=ComputeTable(**rows)))
        assert 0 not in {anomaly.rank for anomaly in found}


def test_a_short_trace_of_steady_ranks_is_in_no_doubt_of_its_noise() -> None:
    trace = pipeline(num_dp=1, num_stages=2, num_steps=6, noise=1e-5, documents=1e-6)
    found = rank_faults(slowed(summed(trace), 1, 1.012, first=3))
    assert [(t.rank, t.first_step) for t in found] == [(1, FIRST_STEP + 3)]


@pytest.mark.parametrize("num_dp", [3, 8, 16])
def test_a_rank_that_joined_later_is_judged_from_its_first_step_on(num_dp: int) -> None:
    trace = slowed(pipeline(num_dp=num_dp, num_steps=40), 0, 1.2)
    table = table_of(trace)
    there = (table.rank != 0) | (table.step >= FIRST_STEP + 20)
    rows = {name: getattr(table, name)[there] for name in ComputeTable.__slots__}
    (found,) = rank_faults(replace(trace, compute=ComputeTable(**rows)))
    assert (found.rank, found.first_step, found.last_step) == (0, FIRST_STEP + 20, None)
    assert found.low < 1.2 < found.high
    assert f"since step {FIRST_STEP + 20}, the first that it told" in found.reason


@pytest.mark.parametrize("seed", seeds(4))
def test_one_step_of_many_micro_batches_is_enough_beside_peers(seed: int) -> None:
    trace = pipeline(seed=seed, num_steps=1)
    assert rank_faults(trace) == ()
    (found,) = rank_faults(slowed(trace, 0, 1.5))
    assert (found.rank, found.first_step) == (0, FIRST_STEP)
    assert found.low < 1.5 < found.high
