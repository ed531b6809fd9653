"""Peers against a brute-force twin, and what must not matter."""

from math import isfinite, isnan, nan
from statistics import median

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.predictor.stats.peers import medians_without_one, relative_to_peers

values = st.floats(-5, 5).map(lambda x: round(x, 6))
steps = st.lists(st.tuples(values, st.booleans()), min_size=1, max_size=12)


def twin(ratios: list[float], is_witness: list[bool]) -> list[float]:
    result = []
    for i, own in enumerate(ratios):
        others = [r for j, r in enumerate(ratios) if is_witness[j] and j != i]
        if not others:
            result.append(own)
        elif len(others) == 1:
            result.append(min(own, own - others[0]))
        else:
            result.append(own - median(others))
    return result


@given(steps)
def test_each_rank_is_compared_with_the_median_of_its_witnesses(
    step: list[tuple[float, bool]],
) -> None:
    ratios, is_witness = [r for r, _ in step], [w for _, w in step]
    told = relative_to_peers(np.array(ratios), np.array(is_witness))
    assert np.allclose(told, twin(ratios, is_witness))


@given(st.lists(values, min_size=3, max_size=9), st.floats(-3, 3))
def test_what_all_share_accuses_nobody(ratios: list[float], common: float) -> None:
    told = relative_to_peers(np.array(ratios))
    assert np.allclose(told, relative_to_peers(np.array(ratios) + common))


@given(st.integers(4, 9), st.data())
def test_up_to_half_of_the_ranks_slow_alike_all_stand_out_in_full(
    num_ranks: int, data: st.DataObject
) -> None:
    slow = data.draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks // 2))
    ratios = np.array([0.5 if rank in slow else 0.0 for rank in range(num_ranks)])
    told = relative_to_peers(ratios)
    assert all(told[rank] == 0.5 for rank in slow)


@given(st.integers(1, 4), st.lists(values, min_size=5, max_size=5))
def test_many_steps_at_once_are_each_step_alone(num_steps: int, ratios: list[float]) -> None:
    table = np.stack([np.roll(ratios, i) for i in range(num_steps)])
    one_by_one = np.stack([relative_to_peers(row) for row in table])
    assert np.array_equal(relative_to_peers(table), one_by_one)


@given(st.integers(1, 9), st.data())
def test_the_median_without_one_is_that_of_the_others_that_are_known(
    num_ranks: int, data: st.DataObject
) -> None:
    known = st.lists(st.one_of(values, st.just(nan)), min_size=num_ranks, max_size=num_ranks)
    table = np.array(data.draw(st.lists(known, min_size=1, max_size=4)))
    told = medians_without_one(table)
    for row, told_row in zip(table, told, strict=True):
        for i in range(num_ranks):
            others = [r for j, r in enumerate(row.tolist()) if j != i and isfinite(r)]
            assert told_row[i] == median(others) if others else isnan(told_row[i])
