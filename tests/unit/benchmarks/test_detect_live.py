"""How `detect_live --rates` plays the rule for ranks that are slow now and then."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.detect_live import RecordedJob, alarm_rates, slow_now_and_then

from pacekeeper.predictor.detector import cusum

SIGMA, NUM_RANKS, NUM_STEPS = 0.01, 8, 32


def test_a_column_is_named_beside_those_of_its_own_job_only() -> None:
    """Of two jobs, all ranks of the first are slow now and then; of the second one is."""
    random = np.random.default_rng(0)
    recent = SIGMA * random.standard_normal((NUM_STEPS, 2 * NUM_RANKS))
    recent[:, :NUM_RANKS] += 0.2 * (random.random((NUM_STEPS, NUM_RANKS)) < 0.25)
    recent[::-4] += 0.2 * np.isin(np.arange(2 * NUM_RANKS), [2, NUM_RANKS + 2])
    charts = cusum.with_ranks(cusum.no_charts(), range(2 * NUM_RANKS))
    charts = replace(charts, recent=recent, recent_doubt=np.zeros_like(recent))
    found = slow_now_and_then(charts, SIGMA, 1e4, NUM_RANKS, ())
    assert found == {NUM_RANKS + 2: pytest.approx(1.06, abs=0.02)}
    assert not slow_now_and_then(charts, SIGMA, 1e4, NUM_RANKS, found)


@pytest.mark.parametrize("has_bouts", [False, True])
def test_only_noise_in_bouts_of_slow_steps_is_named_by_the_rule(has_bouts: bool) -> None:
    """In a bout a rank is slow in every second of eight steps."""
    random, shape = np.random.default_rng(0), (120, 1, 64)
    log_s = SIGMA * random.standard_normal(shape)
    log_s[40:48:2, 0, :8] += 0.2 * has_bouts
    job = RecordedJob(
        name="made", stage=(0,) * 64, observed_s=60.0 * np.exp(log_s), expected_s=np.ones(shape)
    )
    _, repeated = alarm_rates(job, 100.0, 8, expected=20, seed=0)
    assert (repeated > 0.0) is has_bouts
