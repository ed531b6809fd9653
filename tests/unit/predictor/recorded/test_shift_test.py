"""How far a stretch of steps lies beyond what health and noise explain."""

import numpy as np
import pytest

from pacekeeper.predictor.recorded.noise import AlarmLevels, Noise
from pacekeeper.predictor.recorded.shift_test import UNEVEN, Levels, beyond

RANKS = 3
NOISE = Noise(
    fast=np.full(RANKS, 0.01),
    measured=np.full(RANKS, 0.01),
    wander=np.full(RANKS, 0.001),
    spread=0.001,
    freedom=1000.0,
    stage=np.zeros(RANKS, dtype=np.intp),
    has_peers=np.ones(RANKS, dtype=np.bool_),
)
SIGMAS = AlarmLevels(fast=5.0, slow=5.0, sure=5.0)
MANY = np.full(RANKS, 10_000.0)


def strength(inside: float, *, common: float) -> float:
    """Of a rank whose long stretch lies there, after a long one in health."""
    levels = Levels(
        inside=np.full(RANKS, inside), before=np.zeros(RANKS), num_inside=MANY, num_before=MANY
    )
    told, slowdown = beyond(NOISE, levels, SIGMAS, common=common)
    assert slowdown == pytest.approx(inside - common, abs=1e-3)
    return float(told[0])


def test_what_everybody_lost_is_nobodys() -> None:
    assert strength(0.5, common=0.5) == pytest.approx(0.0, abs=0.05)


def test_ranks_may_differ_a_little_in_what_all_lost() -> None:
    """The same matter slows them by x1.65 and x1.7: nobody stands out. Alone, it is much."""
    little = 0.6 * UNEVEN * 0.5
    assert strength(0.5 + little, common=0.5) < 1.0 < strength(little, common=0.0)


def test_who_lost_much_more_than_all_is_told() -> None:
    assert strength(0.5 + 3.0 * UNEVEN * 0.5, common=0.5) > 1.0
