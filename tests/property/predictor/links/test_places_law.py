"""A slow place is always named, or listed with those that cannot be told from it, and alone."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from benchmarks.link_places import TWO, drawn, expected, outcome, pairs_through, verdict_of
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.predictor.links.places import MOST_FOR_PAIRS, GroupReading, find_slow_places
from support.examples import seeds

NOISE = np.random.default_rng(3).normal(0.0, 0.02, 5000)  # log
CASES = 100  # of a seed
INTERESTING = {"two nodes", "all pairs slow", "one port per node", "look-alikes"}


@st.composite
def fabrics(draw: st.DrawFn) -> dict[int, str]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    nodes = [f"n{node}" for node, size in enumerate(sizes) for _ in range(size)]
    return dict(enumerate(nodes))


@given(st.data(), fabrics())
def test_random_groups_name_the_place_and_its_look_alikes(
    data: st.DataObject, node_of: dict[int, str]
) -> None:
    users = pairs_through(node_of)
    planted = data.draw(st.sampled_from(sorted(users)))
    ranks = st.sampled_from(sorted(node_of))
    one = st.lists(ranks, min_size=2, max_size=MOST_FOR_PAIRS, unique=True)
    groups = data.draw(st.lists(one.map(tuple), min_size=1, max_size=12))
    pairs = [set(combinations(sorted(group), 2)) for group in groups]
    is_slow = {place: [bool(own & users[place]) for own in pairs] for place in users}
    readings = [
        GroupReading(ranks=group, slowdown=3.0 if slow else 1.0)
        for group, slow in zip(groups, is_slow[planted], strict=True)
    ]
    found, unexplained = find_slow_places(readings, node_of, slow_from=1.5)
    assert unexplained == 0
    named = [set(place.candidates) for place in found]
    alike = {place for place in users if is_slow[place] == is_slow[planted]}
    assert named == ([alike] if any(is_slow[planted]) else [])


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("whole", [True, False], ids=["all rounds", "some rounds"])
def test_a_probe_names_one_place_for_one_fault(seed: int, whole: bool) -> None:
    draw, traits = np.random.default_rng(seed), Counter[str]()
    for _ in range(CASES):
        factor = float(draw.choice([1.5, 2.0, 4.0]))
        case = drawn(draw, "one", [factor], whole)
        suspected = factor ** draw.uniform(0.5, 1.4)  # what the job's own transfers showed
        verdict = verdict_of(case, NOISE, draw, has_past=True, suspected=suspected)
        assert outcome(case, verdict) == "exact", f"{case.slow}: {verdict}"
        traits.update(case.traits())
    drawn_often = {trait for trait in INTERESTING if traits[trait] >= CASES // 20}
    assert drawn_often == INTERESTING, f"of {CASES} cases: {dict(traits)}"


@pytest.mark.parametrize("seed", seeds(8))
def test_without_a_past_no_other_place_is_named(seed: int) -> None:
    draw, told = np.random.default_rng(seed), Counter[str]()
    for _ in range(CASES):
        case = drawn(draw, "one", [4.0], whole=bool(draw.integers(2)))
        verdict = verdict_of(case, NOISE, draw, has_past=False, suspected=4.0)
        result = outcome(case, verdict)
        assert result != "missed" or not verdict.places, f"{case.slow}: {verdict}"
        told[result] += 1
    assert not told["other"] and told["exact"] > CASES // 4, told


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("faults", TWO)
def test_two_places_as_slow_as_each_other_are_both_named(faults: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(CASES):
        case = drawn(draw, faults, [2.0, 2.0], whole=True)
        verdict = verdict_of(case, NOISE, draw, has_past=True, suspected=2.0)
        assert outcome(case, verdict) in ("exact", "listed"), f"{case.slow}: {verdict}"
        assert len(verdict.places) == len(expected(case)) == 2
