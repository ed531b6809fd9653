"""The vectorised charts against a dumb loop, and what must not change them."""

from math import isnan

import numpy as np
from benchmarks import cusum_bank
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.predictor.detector.excursions import Excursions
from pacekeeper.predictor.detector.thresholds import chart_rules
from pacekeeper.predictor.stats.cusum_design import (
    REFERENCES,
    ChartRule,
    gaussian,
    mean_run_length,
    samples_between_alarms,
    threshold,
)
from support.examples import examples

RULES = chart_rules(200.0, Excursions())
SEEDS = st.integers(0, 2**32 - 1)


def residuals(seed: int, num_samples: int, num_ranks: int, gaps: float) -> np.ndarray:
    """On a grid of 1/16, so that no sum of float32 is rounded."""
    random = np.random.default_rng(seed)
    values = np.round(random.standard_t(3, (num_samples, num_ranks)) * 16) / 16
    values[:, 0] += 1.0
    values[random.random(values.shape) < gaps] = np.nan
    return values


def one_rank(rules: tuple[ChartRule, ...], values: list[float]) -> list[bool]:
    """The naive twin: one rank, one sample, one chart after the other."""
    charts, alarms = [0.0] * len(rules), []
    for value in values:
        if isnan(value):
            alarms.append(False)
            continue
        charts = [
            max(0.0, chart + min(value, rule.clip) - rule.k)
            for chart, rule in zip(charts, rules, strict=True)
        ]
        alarms.append(any(c > rule.h for c, rule in zip(charts, rules, strict=True)))
        if alarms[-1]:
            charts = [0.0] * len(rules)
    return alarms


@given(seed=SEEDS, gaps=st.sampled_from([0.0, 0.2]))
@settings(max_examples=examples(40), deadline=None)
def test_all_ranks_at_once_are_each_rank_by_itself(seed: int, gaps: float) -> None:
    values = residuals(seed, 120, 6, gaps)
    bank = cusum_bank.begin(RULES, 6)
    _, alarms = cusum_bank.fold(RULES, bank, values)
    for rank in range(6):
        assert alarms[:, rank].tolist() == one_rank(RULES, values[:, rank].tolist())


@given(seed=SEEDS, cut=st.integers(0, 50), gaps=st.sampled_from([0.0, 0.2]))
@settings(max_examples=examples(30), deadline=None)
def test_batches_are_folded_as_their_samples_one_after_the_other(
    seed: int, cut: int, gaps: float
) -> None:
    values = residuals(seed, 50, 5, gaps)
    start = cusum_bank.begin(RULES, 5)
    whole, alarms = cusum_bank.fold(RULES, start, values)
    half, first = cusum_bank.fold(RULES, start, values[:cut])
    half, second = cusum_bank.fold(RULES, half, values[cut:])
    assert np.array_equal(np.concatenate([first, second]), alarms)
    assert np.array_equal(half.charts, whole.charts)
    assert not start.charts.any()


@given(seed=SEEDS, gaps=st.sampled_from([0.0, 0.2]))
@settings(max_examples=examples(30), deadline=None)
def test_a_permutation_of_ranks_permutes_the_alarms(seed: int, gaps: float) -> None:
    values = residuals(seed, 80, 9, gaps)
    order = np.random.default_rng(seed).permutation(9)
    start = cusum_bank.begin(RULES, 9)
    bank, alarms = cusum_bank.fold(RULES, start, values)
    other, permuted = cusum_bank.fold(RULES, start, values[:, order])
    assert np.array_equal(permuted, alarms[:, order])
    assert np.array_equal(other.charts, bank.charts[:, order])


@given(
    samples=st.floats(1e3, 1e8),
    factor=st.floats(2.0, 100.0),
    k=st.sampled_from(REFERENCES[:3]),
    clip=st.sampled_from([3.0, 8.0]),
)
@settings(max_examples=examples(15), deadline=None)
def test_rarer_alarms_take_a_higher_threshold(
    samples: float, factor: float, k: float, clip: float
) -> None:
    law = gaussian()
    low = threshold(law, k=k, clip=clip, samples=samples)
    high = threshold(law, k=k, clip=clip, samples=samples * factor)
    assert high >= low
    assert high > low or clip == 3.0
    # The threshold gives back what was asked for; a low clip makes the run length a function of
    # the threshold with steps.
    obtained = mean_run_length(law, k=k, clip=clip, h=low) / samples
    assert obtained >= 0.999
    if clip == 8.0:
        assert obtained < 1.02


@given(
    rate=st.floats(1e-3, 1e3),
    ranks=st.integers(1, 10_000),
    speed=st.floats(1e-3, 1e3),
    factor=st.integers(2, 100),
)
def test_twice_the_ranks_or_samples_or_half_the_alarms_ask_for_twice_as_many_samples(
    rate: float, ranks: int, speed: float, factor: int
) -> None:
    base = samples_between_alarms(rate, num_ranks=ranks, samples_per_rank_s=speed)
    for other in (
        samples_between_alarms(rate, num_ranks=ranks * factor, samples_per_rank_s=speed),
        samples_between_alarms(rate, num_ranks=ranks, samples_per_rank_s=speed * factor),
        samples_between_alarms(rate / factor, num_ranks=ranks, samples_per_rank_s=speed),
    ):
        assert abs(other / base / factor - 1) < 1e-9
