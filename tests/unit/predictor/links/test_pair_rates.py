"""Verdicts of probes of pairs: places, speeds, and fabrics that are uneven but well."""

from collections.abc import Mapping
from itertools import combinations
from math import isnan

import numpy as np
import pytest

from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind
from pacekeeper.core.telemetry.pair_probe import Pair
from pacekeeper.core.telemetry.records import PairRecord
from pacekeeper.predictor.links.pair_rates import (
    LinkVerdict,
    PairHistory,
    PairRates,
    judge_pairs,
    rates_of,
    slow_ranks,
)

THREE = {rank: "abc"[rank // 2] for rank in range(6)}
TWO = {rank: "ab"[rank // 2] for rank in range(4)}
PORT = LinkPlace(kind=PlaceKind.PORT, ranks=(3,), nodes=("b",))
NODE = LinkPlace(kind=PlaceKind.NODE, ranks=(0, 1), nodes=("a",))


def fabric(
    node_of: Mapping[int, str],
    slow: Mapping[Pair, float] | None = None,
    *,
    between: float = 4.0,
    noise: float = 0.03,
    seed: int = 1,
) -> PairRates:
    """A fabric whose pairs between nodes take `between` times as long as those inside."""
    draw = np.random.default_rng(seed)
    found = {}
    for pair in combinations(node_of, 2):
        s_per_byte = 1e-9 * (1.0 if node_of[pair[0]] == node_of[pair[1]] else between)
        s_per_byte *= (slow or {}).get(pair, 1.0) * float(np.exp(draw.normal(0.0, noise)))
        found[pair] = s_per_byte
    return PairRates(step=7, ranks=tuple(node_of), s_per_byte=found)


def at_port(rank: int, slowdown: float, node_of: Mapping[int, str]) -> dict[Pair, float]:
    return {pair: slowdown for pair in combinations(node_of, 2) if rank in pair}


def at_node(node: str, slowdown: float, node_of: Mapping[int, str]) -> dict[Pair, float]:
    return {
        pair: slowdown
        for pair in combinations(node_of, 2)
        if [node_of[rank] for rank in pair].count(node) == 1
    }


def verdict(
    rates: PairRates, node_of: Mapping[int, str], past: PairRates | None = None, s: float = 3.0
) -> LinkVerdict:
    history = PairHistory() if past is None else PairHistory().learn(past)
    return judge_pairs(rates, history, node_of, suspected=s)


@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_an_uneven_fabric_that_is_well_has_no_slow_place(seed: int, with_past: bool) -> None:
    past = fabric(THREE, seed=99) if with_past else None
    found = verdict(fabric(THREE, seed=seed), THREE, past)
    assert (found.places, found.num_unexplained, found.num_pairs) == ((), 0, 15)
    assert str(found).endswith("all at their usual rates") is with_past
    assert isnan(found.bytes_per_s)


def test_a_link_that_has_always_been_slow_is_no_fault() -> None:
    steady = at_port(3, 5.0, THREE)
    assert verdict(fabric(THREE, steady, seed=1), THREE, fabric(THREE, steady, seed=2)).places == ()
    (found,) = verdict(fabric(THREE, steady), THREE).places  # without a past its peers accuse it
    assert found.place == PORT


@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize(
    ("slow", "place"),
    [
        (at_port(3, 4.0, THREE), PORT),
        (at_node("a", 4.0, THREE), NODE),
        ({(1, 4): 4.0}, LinkPlace(kind=PlaceKind.PAIR, ranks=(1, 4), nodes=("a", "c"))),
    ],
    ids=["port", "node", "pair"],
)
def test_a_slow_place_is_named_with_its_speed(
    slow: Mapping[Pair, float], place: LinkPlace, with_past: bool
) -> None:
    found = verdict(fabric(THREE, slow), THREE, fabric(THREE, seed=9) if with_past else None)
    (one,) = found.places
    assert one.place == place
    assert one.slowdown == pytest.approx(4.0, rel=0.12)
    assert one.low <= one.slowdown <= one.high
    assert found.usual_bytes_per_s / found.bytes_per_s == pytest.approx(4.0, rel=0.15)


def test_the_rate_is_that_of_a_pair_that_sees_the_first_place() -> None:
    slow = {(low, high): 4.0 for low in (2, 3) for high in (4, 5)}  # a pair of nodes
    slow[0, 1] = 4.0  # inside a node, where pairs are faster
    found = verdict(fabric(THREE, slow, noise=0.0), THREE, fabric(THREE, noise=0.0))
    assert found.places[0].num_groups == 4
    assert found.usual_bytes_per_s == pytest.approx(0.25e9)
    assert found.bytes_per_s == pytest.approx(0.25e9 / 4.0)


def test_of_two_nodes_a_past_is_needed_and_which_of_them_is_slow_cannot_be_told() -> None:
    slow = at_node("a", 4.0, TWO)
    assert verdict(fabric(TWO, slow), TWO).places == ()
    (one,) = verdict(fabric(TWO, slow), TWO, fabric(TWO, seed=3)).places
    assert one.place is None
    assert {place.kind for place in one.candidates} == {
        PlaceKind.NODE,
        PlaceKind.NODE_PAIR,
        PlaceKind.FABRIC,
    }


@pytest.mark.parametrize("node_of", [TWO, THREE], ids=["two nodes", "three nodes"])
def test_where_all_pairs_are_slow_alike_all_links_are_named_and_no_rank(
    node_of: Mapping[int, str],
) -> None:
    slow = dict.fromkeys(combinations(node_of, 2), 3.0)
    found = verdict(fabric(node_of, slow), node_of, fabric(node_of, seed=3))
    (one,) = found.places
    assert one.place == LinkPlace(kind=PlaceKind.ALL)
    assert slow_ranks(found, {}, node_of) == {}
    peers_only = verdict(fabric(node_of, slow), node_of)
    assert peers_only.places == ()
    assert "does not show what slows all of them" in str(peers_only)


def test_a_fabric_that_slows_nearly_all_pairs_is_not_taken_for_noise() -> None:
    slow = {pair: 3.0 for pair in combinations(THREE, 2) if THREE[pair[0]] != THREE[pair[1]]}
    (one,) = verdict(fabric(THREE, slow), THREE, fabric(THREE, seed=3)).places
    assert one.place == LinkPlace(kind=PlaceKind.FABRIC)


def test_peers_that_a_node_slowed_as_well_do_not_clear_it() -> None:
    sizes = (2, 3, 1, 1, 3, 4)
    node_of = dict(enumerate(f"n{node}" for node, size in enumerate(sizes) for _ in range(size)))
    (one,) = verdict(fabric(node_of, at_node("n5", 4.0, node_of)), node_of).places
    assert one.place == LinkPlace(kind=PlaceKind.NODE, ranks=(10, 11, 12, 13), nodes=("n5",))


def test_what_is_far_from_the_suspicion_is_not_its_place() -> None:
    assert verdict(fabric(THREE, at_port(3, 1.5, THREE)), THREE, s=9.0).places == ()


def test_a_lesser_place_is_named_beside_the_one_that_was_suspected() -> None:
    slow = at_port(3, 4.0, THREE) | {(0, 4): 1.5}
    first, second = verdict(fabric(THREE, slow), THREE, fabric(THREE, seed=9), s=4.0).places
    assert first.place == PORT
    assert second.place == LinkPlace(kind=PlaceKind.PAIR, ranks=(0, 4), nodes=("a", "c"))
    assert second.slowdown == pytest.approx(1.5, rel=0.12)


def test_noise_raises_the_limit() -> None:
    node_of = {rank: f"n{rank}" for rank in range(8)}
    for seed in range(20):
        past = fabric(node_of, noise=0.25, seed=50 + seed)
        assert verdict(fabric(node_of, noise=0.25, seed=seed), node_of, past, 1.3).places == ()


def test_the_past_follows_the_newest_probe_by_a_part() -> None:
    past = PairHistory().learn(fabric(THREE, noise=0.0))
    learnt = past.learn(PairRates(step=9, ranks=tuple(THREE), s_per_byte={(0, 1): 0.5e-9}))
    assert 0.5e-9 < learnt.s_per_byte[0, 1] < 1e-9
    assert past.covers(range(6))
    assert not past.covers(range(7))
    assert not past.without([5]).covers(range(6))


def test_rates_are_those_of_the_slower_rank_and_other_ranks_are_ignored() -> None:
    def record(rank: int, peer: int, exchange_s: float, num_bytes: int = 1000) -> PairRecord:
        return PairRecord(
            rank=rank, step=4, generation=1, peer=peer, number=3, num_bytes=num_bytes,
            exchange_s=exchange_s,
        )  # fmt: skip

    told = [record(0, 1, 1e-3), record(1, 0, 2e-3), record(1, 2, 1e-3), record(0, 9, 1.0)]
    told += [record(1, 1, 1.0), record(2, 0, 0.0), record(2, 0, 1.0, num_bytes=0)]
    rates = rates_of(told, (0, 1, 2))
    assert rates == PairRates(step=4, ranks=(0, 1, 2), s_per_byte={(0, 1): 2e-6, (1, 2): 1e-6})
    assert rates_of(told[3:], (0, 1, 2)) is None


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        (at_port(3, 4.0, THREE), {3: 4.0}),
        (at_node("a", 4.0, THREE), {0: 4.0, 1: 4.0}),
        ({(1, 4): 6.0}, {1: 2.0, 4: 2.5}),
    ],
    ids=["port", "node", "pair"],
)
def test_the_planner_gets_the_ranks_of_the_place(
    slow: Mapping[Pair, float], expected: dict[int, float]
) -> None:
    found = verdict(fabric(THREE, slow, noise=0.0), THREE)
    assert slow_ranks(found, {4: 2.5}, THREE) == pytest.approx(expected)


def test_the_planner_keeps_what_transfers_showed_of_a_place_that_cannot_be_told() -> None:
    found = verdict(fabric(TWO, at_node("a", 4.0, TWO)), TWO, fabric(TWO, seed=3))
    assert slow_ranks(found, {0: 3.0}, TWO) == {0: 3.0}
