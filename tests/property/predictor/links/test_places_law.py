"""A planted slow place is always among those that are named, and only its look-alikes beside it."""

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind
from pacekeeper.predictor.links.places import GroupReading, find_slow_places, places_of


@st.composite
def fabrics(draw: st.DrawFn) -> dict[int, str]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5).filter(lambda s: sum(s) > 2))
    nodes = [f"n{node}" for node, size in enumerate(sizes) for _ in range(size)]
    return dict(enumerate(nodes))


def all_places(node_of: dict[int, str]) -> list[LinkPlace]:
    return sorted(set(places_of(tuple(node_of), node_of, ranks_of(node_of))))


def ranks_of(node_of: dict[int, str]) -> dict[str, tuple[int, ...]]:
    return {n: tuple(r for r in node_of if node_of[r] == n) for n in node_of.values()}


def readings_of(
    groups: Sequence[tuple[int, ...]], planted: LinkPlace, node_of: dict[int, str]
) -> list[GroupReading]:
    nodes = ranks_of(node_of)
    return [
        GroupReading(ranks=g, slowdown=3.0 if planted in places_of(g, node_of, nodes) else 1.0)
        for g in groups
    ]


@given(st.data(), fabrics())
def test_random_groups_name_the_place_or_its_look_alikes(
    data: st.DataObject, node_of: dict[int, str]
) -> None:
    planted = data.draw(st.sampled_from(all_places(node_of)))
    one = st.lists(st.sampled_from(sorted(node_of)), min_size=2, unique=True).map(tuple)
    groups = data.draw(st.lists(one, min_size=1, max_size=12))
    readings = readings_of(groups, planted, node_of)
    found, unexplained = find_slow_places(readings, node_of, slow_from=1.5)
    assert unexplained == 0
    if all(reading.slowdown == 1.0 for reading in readings):
        assert found == ()
        return
    (only,) = found
    assert planted in only.candidates
    nodes = ranks_of(node_of)
    for candidate in only.candidates:  # each would have made the same groups slow
        seen = [candidate in places_of(group, node_of, nodes) for group in groups]
        assert seen == [reading.slowdown > 1.0 for reading in readings]


@given(st.data(), fabrics())
def test_all_pairs_of_three_nodes_or_more_name_one_place(
    data: st.DataObject, node_of: dict[int, str]
) -> None:
    planted = data.draw(st.sampled_from(all_places(node_of)))
    groups = list(combinations(sorted(node_of), 2))
    readings = readings_of(groups, planted, node_of)
    (only,), _ = find_slow_places(readings, node_of, slow_from=1.5)
    assert planted in only.candidates
    if len(ranks_of(node_of)) > 2:
        assert only.place == planted
    elif planted.kind in (PlaceKind.PAIR, PlaceKind.PORT):
        assert len(only.candidates) == 1 or len(ranks_of(node_of)) == 2
