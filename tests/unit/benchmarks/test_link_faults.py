"""Simulated slow links are found and located; a fabric that is uneven but well is not accused."""

import numpy as np
import pytest
from benchmarks.link_faults import HEALTHY_STEPS, KINDS, planted, trial

from pacekeeper.core.incidents.link_places import PlaceKind

NOISE = np.random.default_rng(3).normal(0.0, 0.01, (100, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_place_is_found_and_located(kind: PlaceKind) -> None:
    place = planted(kind, np.random.default_rng(5))
    told = trial(NOISE, place, 4.0, seed=1)
    assert told["found"] and told["located"] and not told["false"]
    assert told["slowdown"] == pytest.approx(4.0, rel=0.05)
    assert 0 < told["delay"] < HEALTHY_STEPS


def test_a_healthy_fabric_is_not_accused() -> None:
    assert trial(NOISE, None, 1.0, seed=2)["false"] is False
