"""The split of a step against the exact programme, and what sender and receiver must agree on."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.token_split.linear_program import best_value
from pacekeeper.trainer.toy.parallel.all_to_all_splits import exchange, neighbourhoods
from pacekeeper.trainer.toy.parallel.token_balancing import (
    Ints,
    ReplicaIndex,
    balance_rows,
    whole_capacities,
)
from support.examples import examples

Case = tuple[list[list[int]], Ints, list[float]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Hosts of each expert, counts [ranks, experts], speeds [ranks]."""
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    hosts = [
        sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))) for _ in range(num_experts)
    ]
    row = st.lists(st.integers(0, 200), min_size=num_experts, max_size=num_experts)
    counts = np.array([draw(row) for _ in range(num_ranks)], dtype=np.int64)
    speed = st.floats(0.2, 1.0)
    return hosts, counts, [draw(speed) for _ in range(num_ranks)]


@given(cases())
def test_no_split_has_a_smaller_largest_load_but_for_whole_rows(case: Case) -> None:
    hosts, counts, speeds = case
    pairs = ReplicaIndex.of(hosts, len(speeds))
    split = balance_rows(pairs, counts, whole_capacities(speeds))
    assert split.rows_P.min() >= 0
    by_expert = np.bincount(pairs.expert_P, split.rows_P, len(hosts))
    assert (by_expert == counts.sum(axis=0)).all()
    load = np.bincount(pairs.host_P, split.rows_P, len(speeds))
    best = best_value(counts.sum(axis=0).tolist(), hosts, dict(enumerate(speeds))).value
    assert (load <= best * np.array(speeds) * (1.0 + 1e-5) + 1.0).all()


@given(cases())
def test_the_witness_proves_the_value_but_for_whole_rows(case: Case) -> None:
    hosts, counts, speeds = case
    pairs = ReplicaIndex.of(hosts, len(speeds))
    split = balance_rows(pairs, counts, whole_capacities(speeds))
    inside = set(split.bottleneck)
    rows = sum(
        float(counts[:, expert].sum()) for expert, on in enumerate(hosts) if set(on) <= inside
    )
    best = best_value(counts.sum(axis=0).tolist(), hosts, dict(enumerate(speeds))).value
    proven = rows / sum(speeds[j] for j in inside)
    assert proven <= best * (1.0 + 1e-5) + 1e-9
    load = np.bincount(pairs.host_P, split.rows_P, len(speeds))
    assert (load <= proven * np.array(speeds) * (1.0 + 1e-5) + 1.0).all()


@given(cases(), st.data())
def test_senders_and_receivers_come_to_the_same_numbers(case: Case, data: st.DataObject) -> None:
    hosts, counts, speeds = case
    num_ranks = len(speeds)
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    pairs = ReplicaIndex.of(hosts, num_ranks)
    rows = balance_rows(pairs, counts, whole_capacities(speeds)).rows_P
    passes = neighbourhoods(pairs, nodes)
    seen = [exchange(pairs, counts, rows, own, passes) for own in range(num_ranks)]
    sent = np.stack([each.sent_P for each in seen])
    for own, each in enumerate(seen):
        assert (np.bincount(pairs.expert_P, sent[own], len(hosts)) == counts[own]).all()
        assert (each.received_WQ == sent[:, pairs.host_P == own]).all()
    assert (sent.sum(axis=0) == rows).all()


@given(cases(), st.data())
def test_rows_stay_on_their_rank_then_on_their_node(case: Case, data: st.DataObject) -> None:
    hosts, counts, speeds = case
    num_ranks = len(speeds)
    nodes = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks)))
    pairs = ReplicaIndex.of(hosts, num_ranks)
    rows = balance_rows(pairs, counts, whole_capacities(speeds)).rows_P
    passes = neighbourhoods(pairs, nodes.tolist())
    sent = np.stack([exchange(pairs, counts, rows, w, passes).sent_P for w in range(num_ranks)])
    for expert in range(len(hosts)):
        at = np.flatnonzero(pairs.expert_P == expert)
        local = sum(int(sent[pairs.host_P[p], p]) for p in at)
        assert local == sum(min(int(rows[p]), int(counts[pairs.host_P[p], expert])) for p in at)
        left = counts[:, expert].copy()
        room = {int(p): int(rows[p]) for p in at}
        for p in room:
            kept = min(room[p], int(left[pairs.host_P[p]]))
            left[pairs.host_P[p]] -= kept
            room[p] -= kept
        for node in set(nodes.tolist()):
            brought = int(left[nodes == node].sum())
            taken = sum(count for p, count in room.items() if nodes[pairs.host_P[p]] == node)
            within = sum(
                int(sent[w, p])
                for w in np.flatnonzero(nodes == node)
                for p in room
                if nodes[pairs.host_P[p]] == node and pairs.host_P[p] != w
            )
            assert within == min(brought, taken)


@settings(max_examples=examples(20))
@given(cases())
def test_only_ratios_of_speeds_count(case: Case) -> None:
    hosts, counts, speeds = case
    pairs = ReplicaIndex.of(hosts, len(speeds))
    one = balance_rows(pairs, counts, whole_capacities(speeds))
    other = balance_rows(pairs, counts, whole_capacities([s * 2.0**10 for s in speeds]))
    assert (one.rows_P == other.rows_P).all()


@given(st.integers(1, 7), st.data())
def test_over_arcs_of_a_circle_the_fullest_arc_is_the_best_proof_at_once(
    num_ranks: int, data: st.DataObject
) -> None:
    arcs = st.tuples(st.integers(0, num_ranks - 1), st.integers(1, num_ranks))
    hosts = [
        [(first + step) % num_ranks for step in range(length)]
        for first, length in data.draw(st.lists(arcs, min_size=1, max_size=9))
    ]
    row = st.lists(st.integers(0, 200), min_size=len(hosts), max_size=len(hosts))
    counts = np.array([data.draw(row) for _ in range(num_ranks)], dtype=np.int64)
    speeds = [data.draw(st.sampled_from([0.25, 0.5, 1.0])) for _ in range(num_ranks)]
    pairs, rows_E = ReplicaIndex.of(hosts, num_ranks), counts.sum(axis=0)
    arc = pairs.row.fullest(rows_E, whole_capacities(speeds))
    inside = set(np.flatnonzero(arc).tolist())
    rows = sum(int(n) for n, on in zip(rows_E, hosts, strict=True) if set(on) <= inside)
    best = best_value(rows_E.tolist(), hosts, dict(enumerate(speeds))).value
    assert rows / sum(speeds[rank] for rank in inside) == pytest.approx(best)
    assert balance_rows(pairs, counts, whole_capacities(speeds)).bottleneck == tuple(sorted(inside))


def test_ranks_are_found_in_their_circle_whatever_their_numbers() -> None:
    circle = [3, 0, 4, 1, 5, 2]
    hosts = [[circle[at], circle[(at + 1) % 6]] for at in range(6)]
    order = ReplicaIndex.of(hosts, 6).row.order_W.tolist()
    beside = {frozenset(pair) for pair in pairwise([*order, order[0]])}
    assert beside == {frozenset(on) for on in hosts}


def test_an_arc_may_go_over_the_end_of_the_row() -> None:
    pairs = ReplicaIndex.of([[0, 1], [1, 2], [2, 3], [0, 3]], 4)
    hot, capacity = np.array([1, 1, 1, 100]), whole_capacities([1.0] * 4)
    assert np.flatnonzero(pairs.row.fullest(hot, capacity)).tolist() == [0, 3]
