"""Rounds of disjoint pairs, and the numbers that request a probe of pairs."""

from itertools import combinations

import pytest

from pacekeeper.core.telemetry.pair_probe import (
    crossing_load,
    is_pairwise,
    next_number,
    rounds_of,
)


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_each_pair_meets_once_in_rounds_of_disjoint_pairs(num_ranks: int) -> None:
    ranks = [3 * rank + 1 for rank in range(num_ranks)]
    rounds = rounds_of(ranks)
    assert len(rounds) == (0 if num_ranks == 1 else num_ranks - 1 + num_ranks % 2)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(ranks, 2))
    for pairs in rounds:
        met = [rank for pair in pairs for rank in pair]
        assert len(met) == len(set(met)) == num_ranks - num_ranks % 2


@pytest.mark.parametrize("pairwise", [False, True])
@pytest.mark.parametrize(("newest", "unix_s"), [(0, 0.1), (0, 0.101), (500, 0.1), (501, 0.1)])
def test_numbers_ascend_and_say_what_is_measured(
    newest: int, unix_s: float, pairwise: bool
) -> None:
    number = next_number(newest, unix_s=unix_s, pairwise=pairwise)
    assert number > newest
    assert number >= round(unix_s * 1e3)
    assert is_pairwise(number) is pairwise


def test_pairs_share_the_edge_of_their_nodes_with_others_of_their_round() -> None:
    node_of = {0: "a", 1: "a", 2: "b", 3: "b"}
    loads = crossing_load(rounds_of(range(4)), node_of)
    assert loads[0, 1] == loads[2, 3] == (False, 0)
    assert {loads[pair] for pair in ((0, 2), (1, 3), (0, 3), (1, 2))} == {(True, 2)}
    three = crossing_load([[(0, 1)], [(0, 2)]], {0: "a", 1: "b", 2: "b"})
    assert three == {(0, 1): (True, 1), (0, 2): (True, 1)}
