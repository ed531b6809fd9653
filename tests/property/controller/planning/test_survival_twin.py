"""Survival against a twin that tries every loss, and what must hold of it for any placement."""

from itertools import combinations
from math import comb, prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pacekeeper.controller.planning.reliability import (
    loss_probability,
    minimal_cut_sets,
    survival,
    survival_bound,
    union_bound,
)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, list[frozenset[int]]]:
    num_nodes = draw(st.integers(1, 7))
    nodes = st.sets(st.integers(0, num_nodes - 1), min_size=1, max_size=num_nodes)
    return num_nodes, [frozenset(on) for on in draw(st.lists(nodes, min_size=1, max_size=12))]


def survives(hosts: list[frozenset[int]], failed: frozenset[int]) -> bool:
    return all(on - failed for on in hosts)


def tried(num_nodes: int, hosts: list[frozenset[int]]) -> list[float]:
    return [
        sum(survives(hosts, frozenset(f)) for f in combinations(range(num_nodes), k))
        / comb(num_nodes, k)
        for k in range(num_nodes + 1)
    ]


@given(placements())
def test_the_part_survived_is_what_trying_every_loss_gives(
    placement: tuple[int, list[frozenset[int]]],
) -> None:
    num_nodes, hosts = placement
    found = survival(minimal_cut_sets(hosts), num_nodes)
    assert list(found) == pytest.approx(tried(num_nodes, hosts), abs=1e-12)


@given(placements(), st.integers(0, 3))
@example((4, [frozenset(pair) for pair in ((0, 1), (1, 2), (0, 2))]), 3)  # a triangle of pairs
def test_few_losses_have_a_closed_form(
    placement: tuple[int, list[frozenset[int]]], max_losses: int
) -> None:
    num_nodes, hosts = placement
    few = survival(hosts, num_nodes, max_losses=max_losses)
    assert list(few) == pytest.approx(tried(num_nodes, hosts)[: max_losses + 1], abs=1e-12)


@given(placements(), st.data())
def test_the_loss_probability_is_the_sum_over_all_losses(
    placement: tuple[int, list[frozenset[int]]], data: st.DataObject
) -> None:
    num_nodes, hosts = placement
    p = data.draw(st.lists(st.floats(0.0, 1.0), min_size=num_nodes, max_size=num_nodes))
    lost = sum(
        prod(p[n] if n in failed else 1.0 - p[n] for n in range(num_nodes))
        for k in range(num_nodes + 1)
        for failed in map(frozenset, combinations(range(num_nodes), k))
        if not survives(hosts, failed)
    )
    killers = minimal_cut_sets(hosts)
    found = loss_probability(killers, dict(enumerate(p)))
    assert found == pytest.approx(lost, abs=1e-9)
    assert found <= union_bound(killers, dict(enumerate(p))) * (1.0 + 1e-9)


@given(placements())
def test_cut_sets_are_the_host_sets_that_contain_no_other(
    placement: tuple[int, list[frozenset[int]]],
) -> None:
    _, hosts = placement
    killers = minimal_cut_sets(hosts)
    assert all(not one < other for one in killers for other in killers)
    assert len(set(killers)) == len(killers)
    assert all(any(killer <= on for killer in killers) for on in hosts)
    assert set(killers) <= set(hosts)


@given(placements())
def test_no_placement_survives_more_than_its_rarest_expert(
    placement: tuple[int, list[frozenset[int]]],
) -> None:
    num_nodes, hosts = placement
    least = min(len(on) for on in hosts)
    found = survival(minimal_cut_sets(hosts), num_nodes)
    for k, part in enumerate(found):
        assert part <= survival_bound(num_nodes, k, least) + 1e-12
