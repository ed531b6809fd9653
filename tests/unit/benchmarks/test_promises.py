"""The published overlap breaks its promise in small cases, the joint plan never does."""

from benchmarks.placement_survival import ascending_parts, promises


def test_in_no_small_case_an_expert_of_ours_stands_on_too_few_nodes() -> None:
    found = promises(max_nodes=4)
    assert found["cases"] > 100
    assert found["broken_by_lazarus"] > 0
    assert found["broken_by_ours"] == 0


def test_all_ways_to_fill_the_slots_are_tried_once() -> None:
    assert list(ascending_parts(6, 3, 1)) == [(1, 1, 4), (1, 2, 3), (2, 2, 2)]
