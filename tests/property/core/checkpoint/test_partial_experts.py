"""Turns of experts in partial checkpoints: each in time, as many as asked for, shifted by layer."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.partial_experts import longest_save_gap, select_experts
from pacekeeper.core.layout.layout import Block, BlockKind

models = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def in_turn(number: int, num_saved: int, experts: list[int]) -> frozenset[Block]:
    """The choice where nobody needs it more than others."""
    return select_experts([[0.0] * count for count in experts], num_saved, number)


def of_layer(blocks: frozenset[Block], layer: int) -> list[int]:
    return sorted(block.index for block in blocks if block.layer == layer)


@given(models, st.integers(1, 10), st.integers(0, 99))
def test_as_many_of_each_layer_as_asked_for(experts: list[int], k: int, number: int) -> None:
    chosen = in_turn(number, k, experts)
    for layer, count in enumerate(experts):
        found = of_layer(chosen, layer)
        assert len(found) == min(k, count) and all(0 <= e < count for e in found)
    assert all(block.kind is BlockKind.EXPERT for block in chosen)


@given(models, st.integers(1, 10), st.integers(0, 99))
def test_each_comes_within_the_longest_gap(experts: list[int], k: int, first: int) -> None:
    for layer, count in enumerate(experts):
        if count:
            turns = range(first, first + longest_save_gap(count, k))
            seen = {e for n in turns for e in of_layer(in_turn(n, k, experts), layer)}
            assert seen == set(range(count))


@given(models, st.integers(1, 10))
def test_all_are_saved_equally_often(experts: list[int], k: int) -> None:
    for layer, count in enumerate(experts):
        if count:
            turns = (in_turn(n, min(k, count), experts) for n in range(count))
            times = Counter(e for chosen in turns for e in of_layer(chosen, layer))
            assert set(times.values()) == {min(k, count)}


def test_the_turn_is_shifted_from_layer_to_layer_as_in_the_paper() -> None:
    """Its figure 6: three experts; layers save 0, 1, 2, 0, then 1, 2, 0, 1."""
    experts = [0, 3, 0, 3, 0, 3, 0, 3]
    assert [of_layer(in_turn(0, 1, experts), layer) for layer in (1, 3, 5, 7)] == [
        [0],
        [1],
        [2],
        [0],
    ]
    assert [of_layer(in_turn(1, 1, experts), layer) for layer in (1, 3, 5, 7)] == [
        [1],
        [2],
        [0],
        [1],
    ]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4),
    st.integers(1, 7),
    st.integers(0, 9),
)
def test_nobody_who_is_left_out_needs_it_more(need: list[list[int]], k: int, number: int) -> None:
    chosen = select_experts(need, k, number)
    for layer, needs in enumerate(need):
        found = of_layer(chosen, layer)
        assert len(found) == min(k, len(needs))
        left = [needs[e] for e in range(len(needs)) if e not in found]
        assert max(left, default=0) <= min((needs[e] for e in found), default=0)


def test_to_save_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        select_experts([[1.0]], 0, 0)
