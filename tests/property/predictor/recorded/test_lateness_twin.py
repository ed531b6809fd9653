"""Who comes late, told at once for all ranks, is who a look at each rank alone would name."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.predictor.recorded import collective_stragglers
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA


@given(st.integers(3, 9), st.integers(0, 2**32 - 1), st.booleans())
def test_each_rank_is_judged_beside_the_others_alone(
    num_ranks: int, seed: int, is_coarse: bool
) -> None:
    random = np.random.default_rng(seed)
    wait_s, compute_s = random.random((2, 5, num_ranks))
    if is_coarse:  # ties
        wait_s = np.round(wait_s, 1)
    compute_s[random.random(compute_s.shape) < 0.05] = np.nan
    busy_s = collective_stragglers._others_busy_s(compute_s)
    waiting_s = np.stack([np.median(np.delete(wait_s, i, 1), 1) for i in range(num_ranks)], axis=1)
    worth_s = collective_stragglers._min_lateness_s(wait_s, waiting_s, busy_s)
    for i in range(num_ranks):
        others = np.delete(wait_s, i, axis=1)
        middle = np.median(others, axis=1)
        spread = MAD_TO_SIGMA * np.median(np.abs(others - middle[:, None]), axis=1)
        busy = np.nan_to_num(np.median(np.delete(compute_s, i, axis=1), axis=1))
        floor = 6.0 * np.maximum(spread, 0.02 * middle)
        assert np.allclose(busy_s[:, i], busy)
        assert np.allclose(worth_s[:, i], np.maximum(floor, 0.05 * (busy + middle)))
