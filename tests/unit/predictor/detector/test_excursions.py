"""What a job's own excursions make of its thresholds."""

import numpy as np
import pytest

from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.excursions import (
    EDGES,
    FEWEST_WILD,
    OWN_RANKS,
    TAIL,
    WILD,
    Excursions,
    by_height,
    height,
    mean_excess,
    wild_share,
    with_finding,
)
from pacekeeper.predictor.detector.thresholds import ONE_SAMPLE, Thresholds, chart_rules
from pacekeeper.predictor.stats.cusum_design import REFERENCES, gaussian, mean_run_length

CHARTS = len(REFERENCES)


def seen(peaks: np.ndarray, num_samples: int) -> Excursions:
    return Excursions(num_samples=num_samples, counts=np.tile(by_height(peaks), (CHARTS, 1)))


def test_few_excursions_say_nothing() -> None:
    assert height(seen(np.full(TAIL - 1, 2.0), 1000), 0, 1e6) is None


def test_a_height_that_was_reached_so_often_is_the_one_that_was_seen() -> None:
    peaks = 1.0 + np.random.default_rng(0).exponential(2.0, 100_000)
    found = height(seen(peaks, 1_000_000), 0, 1_000.0)
    assert found == pytest.approx(np.quantile(peaks, 0.99), rel=0.05)


def test_beyond_what_was_seen_the_tail_is_exponential() -> None:
    peaks = 1.0 + np.random.default_rng(1).exponential(2.0, 10_000)
    found = height(seen(peaks, 100_000), 0, 1e8)
    assert found == pytest.approx(1.0 + 2.0 * np.log(1e7), rel=0.15)


def test_no_threshold_lies_where_healthy_ranks_were_more_often_than_asked_for() -> None:
    peaks = np.concatenate([np.full(5_000, 3.5), [20.0] * 3])
    found = height(seen(peaks, 100_000), 0, 1e7)
    assert found is not None and found > 20.0


def test_the_wild_share_is_that_of_large_excursions_if_they_are_no_accident() -> None:
    small, large = np.full(90, 0.9 * WILD), np.full(FEWEST_WILD, 1.1 * WILD)
    assert wild_share(seen(np.concatenate([small, large]), 1_000)) == FEWEST_WILD / 1_000
    assert wild_share(seen(np.concatenate([small, large[1:]]), 1_000)) == 0.0


def test_findings_of_a_few_ranks_are_faults_and_those_of_many_are_noise() -> None:
    base = seen(1.0 + np.random.default_rng(2).exponential(1.0, 1_000), 10_000)
    few = many = base
    for rank in range(OWN_RANKS):
        for _ in range(9):
            few = with_finding(few, rank, np.full(CHARTS, 50.0))
    for rank in range(3 * OWN_RANKS):
        many = with_finding(many, rank, np.full(CHARTS, 50.0))
    before = height(base, 0, 1e5)
    assert height(few, 0, 1e5) == before
    after = height(many, 0, 1e5)
    assert before is not None and after is not None and after > 50.0 > before


def test_charts_count_the_excursions_that_end_and_leave_open_findings_out() -> None:
    limits = Thresholds(rules=chart_rules(1e6, Excursions()))
    charts = cusum.with_ranks(cusum.no_charts(), range(3))
    is_open = np.array([False, False, True])
    for step, z in enumerate((3.0, 3.0, -9.0, -9.0)):
        ratio = np.array([z, -1.0, 3.0])
        charts = cusum.advance(
            limits, charts, step=step, log_ratio=ratio, doubt=np.zeros(3), sigma=1.0,
            is_open=is_open,
        )  # fmt: skip
    assert charts.excursions.num_folds == 4
    assert charts.excursions.num_samples == 8
    assert charts.excursions.counts.sum(axis=1).tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_finding_that_ended_is_kept_with_its_peaks() -> None:
    limits = Thresholds(rules=chart_rules(1e6, Excursions()))
    charts = cusum.with_ranks(cusum.no_charts(), range(2))
    for step in range(9):
        charts = cusum.advance(
            limits, charts, step=step, log_ratio=np.array([9.0, 0.0]), doubt=np.zeros(2), sigma=1.0,
            is_open=np.zeros(2, dtype=np.bool_),
        )  # fmt: skip
    charts = cusum.recovered(charts, [0])
    assert set(charts.excursions.findings) == {0}
    assert not charts.rises.any()


def test_what_is_cut_off_would_have_risen_by_the_scale_of_the_tail() -> None:
    rng = np.random.default_rng(0)
    peaks = 1.0 + rng.exponential((1.0, 3.0), size=(20_000, 2))
    counts = np.zeros((len(REFERENCES), len(EDGES)))
    counts[:2] = [by_height(own) for own in peaks.T]
    assert mean_excess(Excursions(counts=counts)) == pytest.approx([1.0, 3.0, 0.0, 0.0], rel=0.05)


def test_what_bouts_add_is_not_hidden_by_many_small_excursions() -> None:
    rng = np.random.default_rng(0)
    peaks = 1.0 + np.concatenate([rng.exponential(0.3, 20_000), rng.exponential(8.0, 200)])
    counts = np.zeros((len(REFERENCES), len(EDGES)))
    counts[0] = by_height(peaks)
    assert mean_excess(Excursions(counts=counts))[0] == pytest.approx(8.0, rel=0.4)


def test_the_charts_of_normal_noise_raise_half_of_the_alarms_asked_for_at_least() -> None:
    between, num_ranks = 1e4, 200
    rng = np.random.default_rng(0)
    charts = cusum.with_ranks(cusum.no_charts(), range(num_ranks))
    for step in range(4_000):
        charts = cusum.advance(
            Thresholds(rules=chart_rules(between, charts.excursions)),
            charts,
            step=step,
            log_ratio=rng.standard_normal(num_ranks),
            doubt=np.zeros(num_ranks),
            sigma=1.0,
            is_open=np.zeros(num_ranks, dtype=np.bool_),
        )
    rules = chart_rules(between, charts.excursions)
    raised = sum(1.0 / mean_run_length(gaussian(), k=r.k, clip=r.clip, h=r.h) for r in rules)
    assert 0.5 <= between * raised <= 2.0
    heights = [ONE_SAMPLE * rule.h / (rule.clip - rule.k) for rule in rules]
    assert min(heights) == pytest.approx(1.0), "a chart that one sample must not cross"
