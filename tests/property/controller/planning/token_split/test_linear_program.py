"""What shares promise, against brute-force twins on small cases."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.controller.planning.token_split.linear_program import batch_rows, best_value
from pacekeeper.controller.planning.token_split.proportional import SLACK, token_shares
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica
from support.layouts import with_shares

Case = tuple[list[float], list[list[int]], dict[int, float]]
speeds_ = st.floats(0.1, 1.0)
loads_ = st.one_of(st.just(0.0), st.floats(0.5, 1000.0))


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 5, max_experts: int = 7) -> Case:
    """Loads, hosts and speeds of one layer; ranks are not numbered from 0 without gap."""
    ranks = sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=max_ranks)))
    hosts = draw(
        st.lists(
            st.sets(st.sampled_from(ranks), min_size=1).map(sorted),
            min_size=1,
            max_size=max_experts,
        )
    )
    loads = draw(st.lists(loads_, min_size=len(hosts), max_size=len(hosts)))
    return loads, hosts, {rank: draw(speeds_) for rank in ranks}


def twin_value(
    loads: Sequence[float], hosts: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> float:
    """The closed form: over all rank sets, the load that can not leave them / their speed."""
    sets = [set(c) for n in range(1, len(speeds) + 1) for c in combinations(speeds, n)]
    return max(
        sum(load for load, on in zip(loads, hosts, strict=True) if set(on) <= inside)
        / sum(speeds[rank] for rank in inside)
        for inside in sets
    )


def value_of(
    hosts: Sequence[Sequence[ExpertReplica]], loads: Sequence[float], speeds: Mapping[int, float]
) -> float:
    at = dict.fromkeys(speeds, 0.0)
    for on, load in zip(hosts, loads, strict=True):
        for host in on:
            at[host.rank] += host.share * load
    return max(at[rank] / speeds[rank] for rank in speeds)


@given(cases())
def test_the_optimum_is_the_closed_form_over_all_rank_sets(case: Case) -> None:
    assert best_value(*case).value == pytest.approx(twin_value(*case), rel=1e-6, abs=1e-9)


@given(cases())
def test_the_witness_alone_proves_the_optimum(case: Case) -> None:
    loads, hosts, speeds = case
    found = best_value(loads, hosts, speeds)
    if found.value == 0.0:
        return
    inside = set(found.bottleneck)
    stuck = sum(load for load, on in zip(loads, hosts, strict=True) if set(on) <= inside)
    assert stuck / sum(speeds[r] for r in inside) == pytest.approx(found.value, rel=1e-6)
    assert found.value >= found.fluid * (1 - 1e-9)


@given(cases())
def test_shares_reach_the_optimum_they_claim(case: Case) -> None:
    loads, hosts, speeds = case
    split = token_shares(loads, hosts, speeds)
    assert [[host.rank for host in on] for on in split.replicas] == hosts
    for on in split.replicas:
        assert sum(host.share for host in on) == pytest.approx(1.0, abs=1e-9)
        assert all(host.share >= 0.0 for host in on)
    assert split.value == pytest.approx(value_of(split.replicas, loads, speeds), rel=1e-9)
    assert split.value <= split.bound.value * (1.0 + SLACK + 1e-3) + 1e-9


@given(cases())
def test_shares_stay_speed_proportional_where_that_is_good_enough(case: Case) -> None:
    loads, hosts, speeds = case
    natural = [
        tuple(ExpertReplica(rank, speeds[rank] / sum(speeds[x] for x in on)) for rank in on)
        for on in hosts
    ]
    if value_of(natural, loads, speeds) > best_value(loads, hosts, speeds).value * (1 + SLACK / 2):
        return
    for on, expected in zip(token_shares(loads, hosts, speeds).replicas, natural, strict=True):
        for host, other in zip(on, expected, strict=True):
            assert host.share == pytest.approx(other.share, abs=1e-3)


@given(cases())
def test_other_names_for_ranks_and_experts_change_nothing_else(case: Case) -> None:
    loads, hosts, speeds = case
    renamed = {rank: 100 - rank for rank in speeds}
    other_hosts = [sorted(renamed[rank] for rank in on) for on in hosts]
    other_speeds = {renamed[rank]: speed for rank, speed in speeds.items()}
    one = token_shares(loads, hosts, speeds)
    other = token_shares(loads[::-1], other_hosts[::-1], other_speeds)
    assert other.bound.value == pytest.approx(one.bound.value, rel=1e-9)
    for on, again in zip(one.replicas, other.replicas[::-1], strict=True):
        theirs = {host.rank: host.share for host in again}
        for host in on:
            assert theirs[renamed[host.rank]] == pytest.approx(host.share, abs=5e-3)


@given(cases(), st.data())
def test_a_faster_rank_never_makes_it_worse(case: Case, data: st.DataObject) -> None:
    loads, hosts, speeds = case
    rank = data.draw(st.sampled_from(sorted(speeds)))
    faster = {**speeds, rank: speeds[rank] * data.draw(st.floats(1.0, 3.0))}
    before, after = best_value(loads, hosts, speeds), best_value(loads, hosts, faster)
    assert after.value <= before.value * (1 + 1e-9)


@given(cases())
def test_identical_inputs_give_identical_shares(case: Case) -> None:
    assert token_shares(*case) == token_shares(*case)


@given(st.integers(0, 40), st.dictionaries(st.integers(0, 9), speeds_, min_size=1, max_size=4))
def test_batch_rows_are_as_good_as_any_whole_split(num_rows: int, speeds: dict[int, float]) -> None:
    rows = batch_rows(num_rows, speeds)
    assert sum(rows.values()) == num_rows
    assert set(rows) == set(speeds)
    reached = max(rows[rank] / speeds[rank] for rank in rows)
    # Nobody can be below `reached` with all rows: that many fit strictly below it, and no more.
    below = sum(
        max(n for n in range(num_rows + 1) if n == 0 or n / speeds[rank] < reached * (1 - 1e-12))
        for rank in speeds
    )
    assert num_rows == 0 or below < num_rows


@given(st.integers(1, 12), st.lists(speeds_, min_size=1, max_size=3))
def test_batch_rows_against_all_splits(num_rows: int, listed: list[float]) -> None:
    speeds = dict(enumerate(listed))
    rows = batch_rows(num_rows, speeds)
    best = min(
        max(n / speeds[rank] for rank, n in enumerate(split))
        for split in product(range(num_rows + 1), repeat=len(listed))
        if sum(split) == num_rows
    )
    assert max(rows[rank] / speeds[rank] for rank in rows) == pytest.approx(best)


@given(st.integers(1, 300), st.lists(speeds_, min_size=1, max_size=6))
def test_batch_shares_become_exactly_those_rows_in_a_layout(
    num_rows: int, listed: list[float]
) -> None:
    rows = batch_rows(num_rows, dict(enumerate(listed)))
    layout = even_layout(ranks=range(len(listed)), num_layers=1, num_experts=1, replicas=1)
    changed = with_shares(layout, *(count / num_rows for count in rows.values()))
    assert changed.rows_of(num_rows) == rows
