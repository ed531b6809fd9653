"""A sentence names ranks shortly: runs as runs, and beyond a few runs only how many more."""

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.incidents.rank_ranges import SHOWN_RANGES, format_ranks


def test_one_rank_is_its_number() -> None:
    assert format_ranks([3]) == "3"


def test_no_rank_is_said() -> None:
    assert format_ranks([]) == "none"


def test_neighbours_are_a_run_from_three_on() -> None:
    assert format_ranks([9, 4, 5, 0, 1, 2]) == "0-2, 4, 5 and 9"


def test_of_many_runs_the_first_are_named_and_the_others_counted() -> None:
    nodes = [rank for node in range(0, 1024, 4) for rank in range(8 * node, 8 * node + 8)]
    text = format_ranks(nodes)
    assert text.startswith("0-7, 32-39, ")
    assert text.endswith("224-231 and 1,984 more")


@given(st.sets(st.integers(0, 20_000), max_size=60))
def test_it_is_short_and_says_how_many(ranks: set[int]) -> None:
    text = format_ranks(ranks)
    assert len(text) < SHOWN_RANGES * 16 + 20
    told = [name for name in text.replace(" and ", ", ").split(", ") if name != "none"]
    more = [int(name.removesuffix(" more").replace(",", "")) for name in told if " more" in name]
    named: set[int] = set()
    for name in told:
        if " more" not in name:
            first, _, last = name.partition("-")
            named |= set(range(int(first), int(last or first) + 1))
    assert named <= ranks
    assert len(named) + sum(more) == len(ranks)
