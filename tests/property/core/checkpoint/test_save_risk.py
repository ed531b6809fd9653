"""Risk-weighted saves: the frequencies are the best there are, and the index comes near them."""

from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.partial_experts import (
    expected_loss,
    least_loss,
    loss_bound,
    loss_probability,
    mean_age,
    save_frequencies,
    save_priority,
    select_experts,
    suspect_priority,
)
from support.examples import examples

weights = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=8)
heavy = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=8)


@given(weights, st.floats(0.0, 1.0))
def test_frequencies_add_up_and_none_is_above_one(found: list[float], share: float) -> None:
    num = share * len(found)
    x = save_frequencies(found, num)
    assert all(0.0 <= each <= 1.0 + 1e-9 for each in x)
    assert sum(x) == pytest.approx(num)


@given(heavy, st.floats(0.1, 1.0), st.data())
def test_no_other_frequencies_lose_less(
    found: list[float], share: float, data: st.DataObject
) -> None:
    num = share * len(found)
    x = save_frequencies(found, num)
    i, j = data.draw(st.permutations(range(len(found))))[:2]
    step = data.draw(st.floats(0.0, 1.0)) * min(x[i], 1.0 - x[j])
    other = list(x)
    other[i], other[j] = x[i] - step, x[j] + step
    best = expected_loss(found, x)
    assert best <= expected_loss(found, other) * (1 + 1e-9) + 1e-9
    assert best == least_loss(found, num)


@given(heavy, st.floats(0.1, 1.0))
def test_taking_turns_is_never_better(found: list[float], share: float) -> None:
    num = share * len(found)
    assert expected_loss(found, [share] * len(found)) >= least_loss(found, num) * (1.0 - 1e-9)


@given(heavy)
def test_without_a_cap_the_loss_is_the_bound_of_cauchy_and_schwarz(found: list[float]) -> None:
    num = 0.05  # so few that none is always saved
    bound = (sum(w**0.5 for w in found) ** 2 / num - sum(found)) / 2
    assert least_loss(found, num) == pytest.approx(bound)


def test_equals_are_saved_in_turn_and_nothing_is_gained() -> None:
    assert save_frequencies([3.0] * 4, 1) == (0.25,) * 4
    assert expected_loss([3.0] * 4, [0.25] * 4) == pytest.approx(least_loss([3.0] * 4, 1))


def test_one_at_risk_among_safe_ones_is_saved_each_time() -> None:
    assert save_frequencies([1.0, 0.0, 0.0], 2) == (1.0, 0.5, 0.5)
    assert least_loss([1.0, 0.0, 0.0], 1) == 0.0
    assert expected_loss([1.0], [0.0]) == inf


@settings(max_examples=examples(30))
@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6), st.integers(1, 3))
def test_the_greatest_needs_lose_little_more_than_the_bound(rates: list[float], k: int) -> None:
    """The index in whole saves: within the rounding of gaps to whole checkpoints."""
    assume(k < len(rates))
    unsaved, age = [0.0] * len(rates), [0] * len(rates)
    total, num = 0.0, 400
    for number in range(num):
        unsaved = [u + w for u, w in zip(unsaved, rates, strict=True)]
        age = [a + 1 for a in age]
        needs = [save_priority(1.0, u, a) for u, a in zip(unsaved, age, strict=True)]
        for block in select_experts([needs], k, number):
            unsaved[block.index], age[block.index] = 0.0, 0
        total += sum(unsaved)
    # Whole gaps: one that should be 1.5 is 1 or 2, so up to half of an expert's rate is lost.
    assert total / num <= least_loss(rates, k) + sum(rates) / 2
    assert total / num <= sum(rates) * mean_age(len(rates), k) * 1.05


def test_all_copies_must_be_lost_or_everybody() -> None:
    p = {0: 0.1, 1: 0.2, 2: 0.5}
    assert loss_probability([0, 1], p) == pytest.approx(0.02)
    assert loss_probability([2], p) == 0.5
    assert loss_probability([0, 1], p, all_at_once=0.5) == pytest.approx(0.51)
    with pytest.raises(ValueError, match="no rank holds"):
        loss_probability([], p)


def test_a_sole_holder_that_is_suspect_comes_before_all_others() -> None:
    healthy, suspect = 0.01, 0.5
    sole = loss_probability([3], {3: suspect})
    twice = loss_probability([1, 2], {1: healthy, 2: healthy})
    needs = [save_priority(twice, 900.0, 9), save_priority(sole, 10.0, 1)]
    (first,) = select_experts([needs], 1, 0)
    assert first.index == 1


@given(st.sets(st.integers(0, 5), min_size=1), st.sets(st.integers(0, 5)))
def test_an_alarm_is_of_experts_that_only_suspects_hold_and_loudest_of_the_fewest(
    hosts: set[int], suspects: set[int]
) -> None:
    loud = suspect_priority(hosts, suspects)
    assert (loud > 0.0) == (hosts <= suspects)
    if loud:
        assert loud > save_priority(1.0, 1e9, 1000), "it comes before any need"
        assert suspect_priority(sorted(hosts)[:1], suspects) == loud * len(hosts)


def test_a_bound_of_all_layers_is_the_sum_of_theirs() -> None:
    layers = [[3.0, 0.0, 1.0, 1.0], [], [2.0, 2.0, 2.0, 2.0]]
    least, ratio = loss_bound(layers, 1)
    assert least == pytest.approx(least_loss(layers[0], 1) + least_loss(layers[2], 1))
    turns = expected_loss(layers[0], [0.25] * 4) + expected_loss(layers[2], [0.25] * 4)
    assert ratio == pytest.approx(turns / least) and ratio > 1.0
    assert loss_bound([[0.0, 0.0], []], 1) == (0.0, 1.0)


def test_a_layer_with_fewer_experts_than_are_saved_loses_nothing() -> None:
    wide = [4.0, 2.0, 1.0, 1.0]
    assert loss_bound([wide, [9.0, 9.0]], 3) == loss_bound([wide], 3)
