"""Places of slow links, from groups whose transfers are slow or healthy."""

from collections.abc import Iterable
from itertools import combinations

import pytest

from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind
from pacekeeper.predictor.links.places import GroupReading, SlowPlace, find_slow_places

NODES = {rank: "abc"[rank // 2] for rank in range(6)}
LONE = {rank: f"n{rank}" for rank in range(4)}


def pairs(
    node_of: dict[int, str], slow: Iterable[tuple[int, int]], slowdown: float = 4.0
) -> list[GroupReading]:
    """All pairs of the ranks; those in `slow` are slow."""
    return [
        GroupReading(ranks=pair, slowdown=slowdown if pair in set(slow) else 1.02)
        for pair in combinations(node_of, 2)
    ]


def found(readings: list[GroupReading], node_of: dict[int, str]) -> tuple[SlowPlace, ...]:
    places, unexplained = find_slow_places(readings, node_of, slow_from=1.5)
    assert unexplained == 0
    return places


def kinds(place: SlowPlace) -> set[tuple[PlaceKind, tuple[int, ...]]]:
    return {(one.kind, one.ranks) for one in place.candidates}


def test_healthy_groups_have_no_slow_place() -> None:
    assert find_slow_places(pairs(NODES, ()), NODES, slow_from=1.5) == ((), 0)


@pytest.mark.parametrize(
    ("slow", "place"),
    [
        ([(0, 3)], LinkPlace(kind=PlaceKind.PAIR, ranks=(0, 3), nodes=("a", "b"))),
        (
            [(0, 3), (1, 3), (2, 3), (3, 4), (3, 5)],
            LinkPlace(kind=PlaceKind.PORT, ranks=(3,), nodes=("b",)),
        ),
        (
            [(low, high) for low in (0, 1) for high in (2, 3, 4, 5)],
            LinkPlace(kind=PlaceKind.NODE, ranks=(0, 1), nodes=("a",)),
        ),
        (
            [(low, high) for low in (0, 1) for high in (4, 5)],
            LinkPlace(kind=PlaceKind.NODE_PAIR, nodes=("a", "c")),
        ),
        (
            [(a, b) for a, b in combinations(range(6), 2) if NODES[a] != NODES[b]],
            LinkPlace(kind=PlaceKind.FABRIC),
        ),
        (list(combinations(range(6), 2)), LinkPlace(kind=PlaceKind.ALL)),
    ],
    ids=lambda value: str(value) if isinstance(value, LinkPlace) else "",
)
def test_all_pairs_name_one_place(slow: list[tuple[int, int]], place: LinkPlace) -> None:
    (one,) = found(pairs(NODES, slow), NODES)
    assert one.place == place
    assert one.slowdown == pytest.approx(4.0)
    assert one.num_groups == len(slow)


def test_two_groups_that_share_one_rank_name_its_port() -> None:
    readings = [
        GroupReading(ranks=(0, 1, 2), slowdown=3.0),
        GroupReading(ranks=(2, 3), slowdown=3.0),
        GroupReading(ranks=(0, 1, 3), slowdown=1.0),
    ]
    (one,) = found(readings, LONE)
    assert one.place == LinkPlace(kind=PlaceKind.PORT, ranks=(2,), nodes=("n2",))


def test_one_slow_group_alone_cannot_tell_its_places_apart() -> None:
    (one,) = found([GroupReading(ranks=(0, 2), slowdown=2.0)], NODES)
    assert one.place is None
    assert kinds(one) == {
        (PlaceKind.PAIR, (0, 2)),
        (PlaceKind.PORT, (0,)),
        (PlaceKind.PORT, (2,)),
        (PlaceKind.NODE, (0, 1)),
        (PlaceKind.NODE, (2, 3)),
        (PlaceKind.NODE_PAIR, ()),
        (PlaceKind.FABRIC, ()),
        (PlaceKind.ALL, ()),
    }
    in_order = list(PlaceKind)
    assert [*one.candidates] == sorted(one.candidates, key=lambda p: (in_order.index(p.kind), p))


def test_two_faults_are_two_places_the_larger_first() -> None:
    slow = [(0, 3), (1, 3), (2, 3), (3, 4), (3, 5), (0, 5)]
    first, second = found(pairs(NODES, slow), NODES)
    assert first.place == LinkPlace(kind=PlaceKind.PORT, ranks=(3,), nodes=("b",))
    assert second.place == LinkPlace(kind=PlaceKind.PAIR, ranks=(0, 5), nodes=("a", "c"))


def test_the_place_that_costs_most_is_first_though_a_lesser_one_slows_more_pairs() -> None:
    slow = {(low, high): 1.6 for low in (0, 1) for high in (2, 3, 4, 5)} | {(2, 3): 100.0}
    readings = [
        GroupReading(ranks=pair, slowdown=slow.get(pair, 1.0)) for pair in combinations(NODES, 2)
    ]
    first, second = found(readings, NODES)
    assert (first.candidates[0].kind, first.num_groups) == (PlaceKind.PAIR, 1)
    assert (second.candidates[0].kind, second.num_groups) == (PlaceKind.NODE, 8)


@pytest.mark.parametrize("between", [1.45, 1.9])
def test_a_group_between_slow_and_healthy_is_no_evidence(between: float) -> None:
    readings = pairs(LONE, [(0, 1), (1, 2)])
    readings = [
        GroupReading(ranks=one.ranks, slowdown=between if one.ranks == (1, 3) else one.slowdown)
        for one in readings
    ]
    (one,) = found(readings, LONE)
    assert one.place == LinkPlace(kind=PlaceKind.PORT, ranks=(1,), nodes=("n1",))
    assert one.num_groups == 2


def test_groups_just_below_the_limit_count_for_a_place_that_is_as_slow() -> None:
    slowdowns = {(0, 1): 1.52, (1, 2): 1.48, (1, 3): 1.49}
    readings = [
        GroupReading(ranks=pair, slowdown=slowdowns.get(pair, 1.0))
        for pair in combinations(LONE, 2)
    ]
    (one,) = found(readings, LONE)
    assert one.place == LinkPlace(kind=PlaceKind.PORT, ranks=(1,), nodes=("n1",))


@pytest.mark.parametrize(
    ("at_port", "elsewhere"),
    [
        ((137.0, 300.0, 530.0), (4.66, 4.66, 1.0)),
        ((100.0, 100.0, 100.0), (4.66, 4.66, 4.66)),
        ((55.0, 86.0, 134.7), (19.3, 1.9, 1.8)),
    ],
)
def test_noise_elsewhere_does_not_make_a_slow_port_the_fabric(
    at_port: tuple[float, ...], elsewhere: tuple[float, ...]
) -> None:
    ranks = [(0, 2), (1, 2), (2, 3), (0, 1), (0, 3), (1, 3)]
    values = zip(ranks, at_port + elsewhere, strict=True)
    readings = [GroupReading(ranks=pair, slowdown=slowdown) for pair, slowdown in values]
    places, _ = find_slow_places(readings, LONE, slow_from=1.9)
    assert places[0].place == LinkPlace(kind=PlaceKind.PORT, ranks=(2,), nodes=("n2",))


@pytest.mark.parametrize("ports", [(0, 2), (0, 4), (1, 5), (2, 5), (3, 4)])
def test_of_two_places_that_explain_as_much_the_first_in_order_is_first(
    ports: tuple[int, int],
) -> None:
    slow = [pair for pair in combinations(NODES, 2) if {*pair} & {*ports}]
    first, second = found(pairs(NODES, slow), NODES)
    assert (first.candidates[0].ranks, first.num_groups) == (ports[:1], 5)
    assert (second.candidates[0].ranks, second.num_groups) == (ports[1:], 4)


def test_a_slower_port_behind_a_slow_node_is_a_place_of_its_own() -> None:
    slow = {(low, high): 100.0 if low == 0 else 4.0 for low in (0, 1) for high in (2, 3, 4, 5)}
    slow[0, 1] = 100.0
    readings = [
        GroupReading(ranks=pair, slowdown=slow.get(pair, 1.0)) for pair in combinations(NODES, 2)
    ]
    port, node = found(readings, NODES)
    assert port.place == LinkPlace(kind=PlaceKind.PORT, ranks=(0,), nodes=("a",))
    assert kinds(node) == {(PlaceKind.NODE, (0, 1)), (PlaceKind.PORT, (1,))}
    assert (port.slowdown, node.slowdown) == pytest.approx((100.0, 4.0))


def test_a_wrong_reading_in_twenty_does_not_hide_a_node() -> None:
    node_of = {rank: "abcd"[rank // 4] for rank in range(16)}
    slow = [(low, high) for low in range(4) for high in range(4, 16) if (low, high) != (2, 9)]
    (one,) = found(pairs(node_of, slow), node_of)
    assert one.place == LinkPlace(kind=PlaceKind.NODE, ranks=(0, 1, 2, 3), nodes=("a",))


def test_contradictory_groups_are_counted_as_unexplained() -> None:
    readings = [
        GroupReading(ranks=(0, 1), slowdown=3.0),
        GroupReading(ranks=(0, 1), slowdown=1.0),
    ]
    assert find_slow_places(readings, LONE, slow_from=1.5) == ((), 1)


def test_the_interval_is_the_range_of_few_groups_and_of_the_middle_of_many() -> None:
    few = [GroupReading(ranks=(0, k), slowdown=s) for k, s in ((1, 2.0), (2, 3.0), (3, 8.0))]
    (one,) = found(few, LONE)
    assert (one.low, one.slowdown, one.high) == pytest.approx((2.0, 3.0, 8.0))
    node_of = {rank: f"n{rank}" for rank in range(31)}
    many = [GroupReading(ranks=(0, k), slowdown=2.0 + k / 10) for k in range(1, 31)]
    (one,) = found(many, node_of)
    assert 2.1 < one.low < one.slowdown < one.high < 5.0
