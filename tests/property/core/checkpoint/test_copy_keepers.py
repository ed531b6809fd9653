"""Wishes about who keeps a copy: another rank, one each, of another domain as far as that goes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.write_plan import assign_mirrors

RANKS = st.dictionaries(st.integers(0, 40), st.integers(0, 5), max_size=12)


@given(RANKS)
def test_everybody_keeps_one_and_nobody_its_own(node_of: dict[int, int]) -> None:
    found = assign_mirrors(node_of, node_of)
    if len(node_of) < 2:
        assert found == {}
        return
    assert sorted(found) == sorted(found.values()) == sorted(node_of)
    assert all(rank != keeper for rank, keeper in found.items())


@given(RANKS)
def test_as_many_copies_as_can_be_stand_in_another_domain(node_of: dict[int, int]) -> None:
    """Ranks outside a domain are as many as can keep copies of its ranks."""
    found = assign_mirrors(node_of, node_of)
    for node, size in Counter(node_of.values()).items():
        away = sum(node_of[r] == node and node_of[k] != node for r, k in found.items())
        assert not found or away == min(size, len(node_of) - size)


def test_ranks_without_a_named_domain_are_domains_of_their_own() -> None:
    assert assign_mirrors([3, 1, 2]) == {1: 2, 2: 3, 3: 1}
