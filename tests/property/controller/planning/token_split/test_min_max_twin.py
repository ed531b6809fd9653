"""Shares of many layers at once against every set of ranks, and arcs of a circle likewise."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pacekeeper.controller.planning.experts.ring_arcs import (
    MARGIN,
    Arcs,
    arc_values,
    drift_deviation,
)
from pacekeeper.controller.planning.token_split import min_max as module
from pacekeeper.controller.planning.token_split.min_max import min_max_split
from support.densest import least_split, ranks_of

LOADS = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))
SPEEDS = st.lists(st.floats(0.3, 1.0), min_size=1, max_size=6)


@given(SPEEDS, st.integers(1, 3), st.integers(1, 8), st.data())
def test_no_split_is_better_and_a_set_of_ranks_proves_it(
    speeds: list[float], num_layers: int, num_experts: int, data: st.DataObject
) -> None:
    num = len(speeds)
    some = st.sets(st.integers(0, num - 1), min_size=1)
    loads = np.array([[data.draw(LOADS) for _ in range(num_experts)] for _ in range(num_layers)])
    hosts = np.zeros((num_layers, num_experts, num), dtype=np.bool_)
    for of_layer in hosts:
        for expert in of_layer:
            expert[list(data.draw(some))] = True
    found = min_max_split(loads, hosts, np.array(speeds))
    assert (found.shares[~hosts] == 0.0).all()
    assert found.shares.sum(axis=2) == pytest.approx(np.ones(loads.shape))
    at_rank = np.einsum("le,ler->lr", loads, found.shares) / speeds
    assert found.value == pytest.approx(at_rank.max(axis=1))
    for layer, (rows, on) in enumerate(zip(loads, hosts, strict=True)):
        least = least_split(rows.tolist(), ranks_of(on), speeds)
        assert found.value[layer] == pytest.approx(least, rel=1e-3)
        inside = found.inside[layer]
        only_there = rows[~(on & ~inside).any(axis=1)].sum() / np.array(speeds)[inside].sum()
        fluid = rows.sum() / sum(speeds)
        assert found.bound[layer] == pytest.approx(max(only_there, fluid))
        assert found.bound[layer] <= least * (1.0 + 1e-9)


@given(SPEEDS, st.integers(1, 8), st.sampled_from([0.0, 0.2]), st.data())
def test_over_arcs_the_densest_arc_says_what_the_best_split_reaches(
    speeds: list[float], num_experts: int, drift: float, data: st.DataObject
) -> None:
    num = len(speeds)
    loads = np.array([[data.draw(LOADS) for _ in range(num_experts)]])
    arcs = Arcs(
        first=np.array([[data.draw(st.integers(0, num - 1)) for _ in range(num_experts)]]),
        length=np.array([[data.draw(st.integers(1, num)) for _ in range(num_experts)]]),
    )
    hosts = arcs.replicas(num)[0]
    (still,) = arc_values(arcs, loads, np.array(speeds), num_ranks=num)
    assert still == pytest.approx(least_split(loads[0].tolist(), ranks_of(hosts), speeds))
    (moving,) = arc_values(arcs, loads, np.array(speeds), num_ranks=num, drift=drift)
    assert moving >= still
    spread = drift_deviation(loads, loads.sum(axis=1) / num, drift)[0]
    for first in range(num):
        for length in range(1, num):
            inside = (first + np.arange(length)) % num
            own = ~np.delete(hosts, inside, axis=1).any(axis=1)
            rows = loads[0][own].sum() + MARGIN * np.sqrt((spread[own] ** 2).sum())
            assert moving >= rows / np.array(speeds)[inside].sum() * (1.0 - 1e-9)


@given(st.integers(0, 10**6))
@example(9360)  # Newton's method alone ends far from the optimum
def test_long_chains_of_hosts_settle_too(seed: int) -> None:
    # Neighbours share one expert, so work has a long way; loads far from even.
    num = 48
    place = np.arange(num)
    hosts = np.zeros((1, 2 * num, num), dtype=np.bool_)
    hosts[0, place, place] = hosts[0, num + place, place] = True
    hosts[0, num + place, (place + 1) % num] = True
    turn = (seed * (np.arange(2 * num) + 7)) % 101
    loads = np.exp(0.03 * turn)[None]
    found = min_max_split(loads, hosts, np.ones(num))
    assert found.value[0] <= found.bound[0] * (1.0 + 1e-3)


@pytest.mark.parametrize("dense_ranks", [0, 96])
@pytest.mark.parametrize("num_experts", [3, 12])
def test_every_way_to_a_step_solves_the_same_matrix(
    dense_ranks: int, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DENSE_RANKS", dense_ranks)
    random, num = np.random.default_rng(0), 7  # ranks: more than 3 experts, fewer than 12
    hosts = random.random((2, num_experts, num)) < 0.5
    hosts[:, :, 0] = True
    pairs = module._Pairs.of(random.random((2, num_experts)) + 0.1, hosts, np.ones(num))
    shares, _ = pairs.split(random.standard_normal((2, num)))
    taken = pairs.rows[pairs.expert] * shares
    own, slope = random.random((2, num)) + num_experts, random.standard_normal((2, num))
    curve = np.array([np.diag(row) for row in own])
    for expert, layer in enumerate(pairs.layer):
        of_expert = pairs.expert == expert
        on = np.ix_(pairs.rank[of_expert], pairs.rank[of_expert])
        curve[layer][on] -= np.outer(taken[of_expert], shares[of_expert])
    expected = np.linalg.solve(curve, slope[:, :, None])[:, :, 0]
    assert module._curved(pairs, shares, taken, own, slope) == pytest.approx(expected)
