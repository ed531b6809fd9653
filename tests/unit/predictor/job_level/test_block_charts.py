"""Charts of whole jobs: what counts as health and noise, and what alarms teach the thresholds."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.excursions import Excursions
from pacekeeper.predictor.job_level.block_charts import (
    TRUSTED_BLOCKS,
    healthy_pace,
    limits_of,
    with_findings,
)
from pacekeeper.predictor.job_level.blocks import SIGMA_FLOOR
from support.examples import seeds

NEW, OLD = Excursions(), Excursions(num_samples=100 * TRUSTED_BLOCKS, num_folds=10**6)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_fault_that_recurs_is_neither_health_nor_noise(seed: int) -> None:
    quiet = 0.01 * np.random.default_rng(seed).standard_normal((90, 2))
    quiet[np.arange(90) // 3 % 2 == 1, 1] += 0.3
    pace = healthy_pace(quiet, NEW)
    assert pace.log_ratio == pytest.approx(np.zeros(2), abs=0.03)
    assert pace.sigma[1] < 2.0 * pace.sigma[0] < 0.04


def test_a_job_is_taken_for_steadier_than_others_once_it_has_shown_it() -> None:
    quiet = 1e-4 * np.random.default_rng(0).standard_normal((100, 1))
    assert healthy_pace(quiet, NEW).sigma[0] == SIGMA_FLOOR
    assert healthy_pace(quiet, OLD).sigma[0] == pytest.approx(1e-4, rel=0.3)


def test_a_job_that_has_shown_fewer_blocks_doubts_its_health_more() -> None:
    quiet = np.full((100, 2), np.nan)
    quiet[-9:, 0] = quiet[:, 1] = 0.0
    few, many = healthy_pace(quiet, NEW).doubt
    assert few > 3.0 * many > 0.0


def test_a_finding_cuts_off_the_excursions_that_charts_are_on_and_no_others() -> None:
    charts = cusum.with_ranks(cusum.no_charts(), [0])
    rises, counts = np.array([[7.0], [0.0], [3.0], [0.0]]), np.zeros_like(charts.excursions.counts)
    counts[:, 20] = 1.0
    charts = replace(charts, rises=rises, excursions=Excursions(counts=counts))
    counted = with_findings(charts, np.array([0])).excursions.counts.sum(axis=1)
    assert counted.tolist() == [2.0, 1.0, 2.0, 1.0]


def alarms(values: np.ndarray, asked: float) -> int:
    """Alarms of healthy blocks [blocks, jobs], each of which ends at once."""
    charts, num = cusum.with_ranks(cusum.no_charts(), range(values.shape[1])), 0
    health = healthy_pace(values, OLD)
    for block, row in enumerate(values):
        if block % 16 == 0:
            limits = limits_of(asked, 1.0, charts.excursions)
        charts = cusum.advance(
            limits, charts, step=block, log_ratio=row - health.log_ratio, doubt=health.doubt,
            sigma=health.sigma, is_open=np.zeros(values.shape[1], dtype=np.bool_),
        )  # fmt: skip
        found = np.flatnonzero(cusum.suspicion(limits, charts) >= 1.0)
        num += found.size
        charts = with_findings(charts, found) if found.size else charts
    return num


def test_alarms_on_noise_that_lasts_raise_the_thresholds() -> None:
    """Levels of five blocks: the first thresholds, made for other noise, would alarm each time."""
    levels = np.random.default_rng(1).standard_t(3, size=(600, 16))
    values = 0.01 * np.repeat(levels, 5, axis=0)
    asked = 8640.0 / 500.0  # one in 500 blocks of ten steps of a second
    num = alarms(values, asked)
    assert 0.25 * values.size / 500.0 < num < 3.0 * values.size / 500.0
