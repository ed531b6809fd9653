"""A rank, a node, or everybody."""

import pytest

from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.predictor.links.slow_links import localise

TWO_NODES = {0: "a", 1: "a", 2: "b", 3: "b"}
HEALTHY = dict.fromkeys(range(4), 1.0)


def test_nobody_is_slow() -> None:
    assert localise({**HEALTHY, 1: 1.05}, TWO_NODES) == ()


def test_one_slow_rank_is_a_device() -> None:
    (place,) = localise({**HEALTHY, 2: 1.6}, TWO_NODES)
    assert (place.kind, place.ranks, place.node) == (FindingKind.DEVICE, (2,), "")
    assert "rank 2 on node b is x1.60" in place.reason


def test_all_ranks_of_a_node_slow_alike_are_its_host() -> None:
    (place,) = localise({**HEALTHY, 0: 1.5, 1: 1.55}, TWO_NODES)
    assert (place.kind, place.ranks, place.node) == (FindingKind.HOST, (0, 1), "a")
    assert place.slowdown == pytest.approx(1.525, rel=0.001)


def test_two_ranks_of_a_node_slow_by_different_factors_are_two_devices_worst_first() -> None:
    places = localise({**HEALTHY, 0: 1.2, 1: 2.0}, TWO_NODES)
    assert [place.ranks for place in places] == [(1,), (0,)]
    assert {place.kind for place in places} == {FindingKind.DEVICE}


def test_part_of_a_node_is_no_host() -> None:
    node_of = {rank: "ab"[rank // 4] for rank in range(8)}
    slow = {**dict.fromkeys(range(8), 1.0), 0: 1.5, 1: 1.5, 2: 1.5}
    assert {place.kind for place in localise(slow, node_of)} == {FindingKind.DEVICE}


def test_everybody_slow_alike_is_something_shared_and_no_node() -> None:
    (place,) = localise(dict.fromkeys(range(4), 1.4), TWO_NODES)
    assert (place.kind, place.ranks, place.node) == (FindingKind.HOST, (0, 1, 2, 3), "")
    assert "4 of 4 ranks on 2 nodes" in place.reason


def test_a_node_of_one_rank_or_a_job_on_one_node_can_not_tell_host_from_device() -> None:
    one_each = {rank: str(rank) for rank in range(4)}
    (place,) = localise({**HEALTHY, 3: 1.5}, one_each)
    assert place.kind is FindingKind.DEVICE
    places = localise({0: 1.5, 1: 1.5}, {0: "a", 1: "a"})
    assert {place.kind for place in places} == {FindingKind.DEVICE}


def test_a_rank_without_a_node_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3\]"):
        localise(HEALTHY, {0: "a", 1: "a", 2: "b"})
