"""Lazarus' rules on cases worked out by hand, its broken promise included."""

import pytest
from benchmarks.placement_survival import compact, hosts_of, spread
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.controller.planning.reliability import minimal_cut_sets, survival
from pacekeeper.simulator.baselines.lazarus import maximum_rank_overlap, replica_counts


def test_counts_follow_load_with_the_floor_and_fill_all_slots() -> None:
    # 1/20 of 12 -> floor 2; 3/19 of 10 = 1.6 -> floor 2; 16/16 of 8.
    assert replica_counts([3.0, 16.0, 1.0], num_slots=12, min_replicas=2) == (2, 8, 2)


def test_with_fewer_slots_than_floors_there_is_no_floor() -> None:
    assert min(replica_counts([1.0, 1.0, 30.0], num_slots=5, min_replicas=2)) == 1


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20), st.integers(0, 40), st.data())
def test_counts_add_up_to_the_slots_and_ascend_with_load(
    loads: list[float], spare: int, data: st.DataObject
) -> None:
    floor = data.draw(st.integers(1, 3))
    num_slots = len(loads) * floor + spare
    counts = replica_counts(loads, num_slots=num_slots, min_replicas=floor)
    assert sum(counts) == num_slots
    assert min(counts) >= floor
    by_load = [count for _, count in sorted(zip(loads, counts, strict=True))]
    assert by_load == sorted(by_load)


def test_groups_overlap_on_nodes_of_their_own() -> None:
    placement = maximum_rank_overlap((2, 2, 2, 2), num_nodes=4, slots_per_node=2)
    assert placement == ((0, 1), (0, 1), (2, 3), (2, 3))


def test_a_group_cut_short_breaks_the_promise_of_the_paper() -> None:
    placement = maximum_rank_overlap((2, 2, 2), num_nodes=3, slots_per_node=2)
    assert placement == ((0, 1), (0, 1), (2, 2))
    killers = minimal_cut_sets(hosts_of(placement, 3))
    assert survival(killers, 3)[1] == pytest.approx(2 / 3)  # with two replicas of each


def test_spread_and_compact_deal_replicas_in_turn() -> None:
    assert spread((2, 2, 2), num_nodes=3, slots_per_node=2) == ((0, 1), (0, 2), (1, 2))
    assert compact((2, 2, 2), num_nodes=3, slots_per_node=2) == ((0, 0), (1, 1), (2, 2))


def test_counts_that_do_not_fill_the_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        maximum_rank_overlap((2, 1), num_nodes=2, slots_per_node=2)
    with pytest.raises(ValueError, match="can not hold"):
        replica_counts([1.0, 1.0], num_slots=1, min_replicas=1)
    with pytest.raises(ValueError, match="not negative"):
        replica_counts([1.0, -1.0], num_slots=4, min_replicas=1)
