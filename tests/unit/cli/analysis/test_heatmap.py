"""The picture of a long record of many ranks: small, and still showing the one that is slow."""

import numpy as np

from pacekeeper.cli.analysis.heatmap import Heatmap, reduced


def heat(num_steps: int, num_ranks: int) -> Heatmap:
    log_ratio = np.zeros((num_steps, num_ranks))
    return Heatmap(
        steps=tuple(range(num_steps)), ranks=tuple(range(num_ranks)), log_ratio=log_ratio, limit=1.0
    )


def test_what_is_small_enough_stays_as_it_is() -> None:
    small = heat(5, 3)
    small.log_ratio[:] = np.arange(15).reshape(5, 3) * 0.01
    same = reduced(small, max_steps=5, max_ranks=3)
    assert (same.log_ratio == small.log_ratio).all()
    assert (same.steps_per_cell, same.ranks_per_cell) == (1, 1)


def test_one_slow_rank_of_many_is_still_seen_and_one_odd_step_is_not() -> None:
    large = heat(1000, 100)
    large.log_ratio[400:600, 37] = 0.3
    large.log_ratio[100, 5] = 9.0
    small = reduced(large, max_steps=100, max_ranks=10)
    assert small.log_ratio.shape == (100, 10)
    assert (small.log_ratio[40:60, 3] == 0.3).all()
    assert np.count_nonzero(small.log_ratio) == 20
    assert (small.steps[40], small.ranks[3]) == (400, 30)
    assert (small.steps_per_cell, small.ranks_per_cell) == (10, 10)


def test_a_faster_rank_is_told_from_a_slower_one_and_from_silence() -> None:
    large = heat(4, 4)
    large.log_ratio[:, 1] = -0.2
    large.log_ratio[:, 2:] = np.nan
    small = reduced(large, max_steps=2, max_ranks=2)
    assert small.log_ratio[:, 0].tolist() == [-0.2, -0.2]
    assert np.isnan(small.log_ratio[:, 1]).all()
