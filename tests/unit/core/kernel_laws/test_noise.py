"""Noise of device times: seeded, with the tails, the memory and the hiccups that it states."""

import math
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest

from pacekeeper.core.kernel_laws.noise import DEVICE_NOISE, NO_NOISE, Noise, NoiseLaw

QUIET = replace(DEVICE_NOISE, hiccup_rate=0.0)


def logs(law: NoiseLaw, count: int, seed: int = 0) -> np.ndarray:
    chosen = Random(seed)
    noise = Noise(law, normal=partial(chosen.gauss, 0.0, 1.0), uniform=chosen.random)
    return np.log([noise.next() for _ in range(count)])


def correlation(values: np.ndarray, lag: int) -> float:
    return float(np.mean(values[:-lag] * values[lag:]) / np.var(values))


def test_a_seed_gives_the_same_factors_again() -> None:
    assert logs(DEVICE_NOISE, 50, seed=3).tolist() == logs(DEVICE_NOISE, 50, seed=3).tolist()
    assert logs(DEVICE_NOISE, 50, seed=3).tolist() != logs(DEVICE_NOISE, 50, seed=4).tolist()
    assert not logs(NO_NOISE, 50).any()


def test_the_slow_part_is_remembered_as_stated() -> None:
    values = logs(QUIET, 60_000)
    slow = QUIET.drift**2 / (QUIET.drift**2 + QUIET.spread**2)
    assert np.std(values) == pytest.approx(math.hypot(QUIET.drift, QUIET.spread), rel=0.05)
    for lag in (1, 20, 80):
        assert correlation(values, lag) == pytest.approx(
            slow * math.exp(-lag / QUIET.drift_length), abs=0.06
        )
    fresh = logs(replace(QUIET, drift=0.0), 20_000)
    assert abs(correlation(fresh, 1)) < 0.03


def test_new_parts_have_longer_tails_than_a_normal_law() -> None:
    values = logs(replace(QUIET, drift=0.0), 60_000) / QUIET.spread
    beyond = np.mean(np.abs(values) > 4.0)
    assert beyond > 20.0 * 2.0 * 3.17e-5  # of a normal law: 6.3e-5
    almost_normal = logs(replace(QUIET, drift=0.0, tail=60), 20_000) / QUIET.spread
    assert np.mean(np.abs(almost_normal) > 4.0) < beyond


def test_hiccups_are_as_frequent_long_and_lasting_as_stated() -> None:
    law = replace(NO_NOISE, hiccup_rate=0.02, hiccup_length=3.0)
    delays = np.expm1(logs(law, 60_000))
    is_late = delays > 0.0
    began = is_late & ~np.roll(is_late, 1)
    assert np.mean(began) == pytest.approx(0.02 / (1.0 + 0.02 * 2.0), rel=0.15)
    assert is_late.sum() / began.sum() == pytest.approx(3.0, rel=0.1)
    assert delays[is_late].min() >= 0.1
    assert np.mean(delays[began] > 0.4) == pytest.approx(0.25**1.5, rel=0.25)
