"""Runs hold exactly the ranks they were made of, in as few numbers as can be."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.incidents.rank_ranges import (
    count_ranks,
    iter_ranks,
    merge_ranges,
    split_ranges,
    to_ranges,
)

ranks = st.sets(st.integers(0, 200), max_size=60)


def test_a_whole_job_is_one_run() -> None:
    assert to_ranges(reversed(range(8192))) == ((0, 8191),)


def test_neighbours_become_one_run_and_others_stay_apart() -> None:
    assert merge_ranges([(8, 15), (0, 7), (17, 17), (3, 9)]) == ((0, 15), (17, 17))


@given(ranks, ranks)
def test_they_are_the_ranks_they_were_made_of(some: set[int], others: set[int]) -> None:
    runs = to_ranges(some)
    assert list(iter_ranks(runs)) == sorted(some) and count_ranks(runs) == len(some)
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(runs))
    assert merge_ranges((*runs, *to_ranges(others))) == to_ranges(some | others)
    assert split_ranges(runs, others) == (to_ranges(some & others), to_ranges(some - others))
