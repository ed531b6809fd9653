"""What ranks say of each other: what they share is nobody's."""

import numpy as np
import pytest

from pacekeeper.predictor.stats.peers import beside


@pytest.mark.parametrize("num_others", [1, 3, 15])
def test_a_rank_beside_other_roles_that_are_late_with_it_is_not_late_on_average(
    num_others: int,
) -> None:
    ratios = 0.05 + np.random.default_rng(num_others).normal(0.0, 0.01, (20_000, 1 + num_others))
    told = [beside(row[:1], row[1:].tolist(), 0.01)[0] for row in ratios]
    assert abs(np.mean(told)) < 0.001
    assert beside(ratios[0, :1], [], 0.01) == ratios[0, :1]
