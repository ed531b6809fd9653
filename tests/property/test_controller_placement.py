"""The planner against a deliberately dumb twin, and wishes every plan must fulfil."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.placement import TOLERANCE, batch_rows, place, token_shares
from pacekeeper.core.layout import even_layout

Case = tuple[list[float], list[list[int]], dict[int, float]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = list(range(draw(st.integers(1, 5))))
    speeds = {rank: draw(st.floats(0.2, 1.0)) for rank in ranks}
    num_experts = draw(st.integers(1, 6))
    loads = [draw(st.floats(1.0, 1000.0)) for _ in range(num_experts)]
    hosts = [sorted(draw(st.sets(st.sampled_from(ranks), min_size=1))) for _ in range(num_experts)]
    return loads, hosts, speeds


def by_subsets(loads: list[float], hosts: list[list[int]], speeds: dict[int, float]) -> float:
    """The value by its closed form: max over sets S of (load only S can take) / speed of S."""
    ranks = sorted(speeds)
    subsets = chain.from_iterable(combinations(ranks, n) for n in range(1, len(ranks) + 1))
    return max(
        sum(load for load, on in zip(loads, hosts, strict=True) if set(on) <= set(subset))
        / sum(speeds[rank] for rank in subset)
        for subset in subsets
    )


@settings(deadline=None)
@given(cases())
def test_the_split_is_as_good_as_the_closed_form_says(case: Case) -> None:
    loads, hosts, speeds = case
    split = token_shares(loads, hosts, speeds)
    best = by_subsets(loads, hosts, speeds)
    # The tie-break may cost a little, never more.
    assert best * (1 - 1e-6) <= split.value <= best * (1 + 0.03)
    assert split.fluid <= best * (1 + 1e-9)
    for on, shares in zip(hosts, split.hosts, strict=True):
        assert [host.rank for host in shares] == on
        assert sum(host.share for host in shares) == pytest.approx(1.0)
        assert all(host.share >= 0.0 for host in shares)


@settings(deadline=None)
@given(cases())
def test_the_certificate_is_what_the_shares_give(case: Case) -> None:
    loads, hosts, speeds = case
    split = token_shares(loads, hosts, speeds)
    load = dict.fromkeys(speeds, 0.0)
    for expert_load, shares in zip(loads, split.hosts, strict=True):
        for host in shares:
            load[host.rank] += expert_load * host.share
    assert max(load[r] / speeds[r] for r in speeds) == pytest.approx(split.value)
    assert all(load[r] / speeds[r] == pytest.approx(split.value, rel=1e-4) for r in split.witness)


def test_with_nothing_to_split_nothing_is_wrong() -> None:
    split = token_shares([0.0], [[0, 1]], {0: 1.0, 1: 0.5})
    assert split.value == 0.0
    assert [round(host.share, 3) for host in split.hosts[0]] == [0.667, 0.333]


@pytest.mark.parametrize(
    ("loads", "hosts", "speeds", "words"),
    [
        ([-1.0], [[0]], {0: 1.0}, "loads must not be negative"),
        ([1.0], [[]], {0: 1.0}, "expert 0: hosts"),
        ([1.0], [[1]], {0: 1.0}, "expert 0: hosts"),
        ([1.0], [[0]], {0: 0.0}, "speeds must be above 0"),
        ([1.0, 2.0], [[0]], {0: 1.0}, "2 loads for 1 experts"),
    ],
)
def test_bad_input_is_refused(
    loads: list[float], hosts: list[list[int]], speeds: dict[int, float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        token_shares(loads, hosts, speeds)


@given(
    st.integers(0, 12),
    st.dictionaries(st.integers(0, 3), st.floats(0.1, 1.0), min_size=1, max_size=3),
)
def test_whole_rows_are_split_as_well_as_can_be(num_rows: int, speeds: dict[int, float]) -> None:
    rows = batch_rows(num_rows, speeds)
    assert sum(rows.values()) == num_rows
    value = max(rows[r] / speeds[r] for r in speeds)

    def every_split(left: int, ranks: list[int]) -> list[dict[int, int]]:
        if len(ranks) == 1:
            return [{ranks[0]: left}]
        return [
            {ranks[0]: n, **rest}
            for n in range(left + 1)
            for rest in every_split(left - n, ranks[1:])
        ]

    best = min(
        max(split[r] / speeds[r] for r in speeds) for split in every_split(num_rows, sorted(speeds))
    )
    assert value == pytest.approx(best)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_moving_replicas_keeps_every_promise(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(2, 5))
    num_experts = data.draw(st.integers(2, 8))
    layout = even_layout(ranks=range(num_ranks), num_layers=1, num_experts=num_experts, replicas=2)
    loads = [[data.draw(st.floats(1.0, 1000.0)) for _ in range(num_experts)]]
    speeds = {rank: data.draw(st.floats(0.3, 1.0)) for rank in range(num_ranks)}
    slots = data.draw(st.integers(-(-2 * num_experts // num_ranks), num_experts))
    (after,) = place(layout, loads=loads, speeds=speeds, slots_per_rank=slots)
    assert (after,) == place(layout, loads=loads, speeds=speeds, slots_per_rank=slots)
    on = [[host.rank for host in hosts] for hosts in after]
    before = [[host.rank for host in hosts] for hosts in layout.experts[0]]
    assert all(set(old) <= set(new) for old, new in zip(before, on, strict=True))
    for rank in range(num_ranks):
        held_before = sum(rank in hosts for hosts in before)
        assert sum(rank in hosts for hosts in on) <= max(slots, held_before)
    was = token_shares(loads[0], before, speeds).value
    now = token_shares(loads[0], on, speeds).value
    assert now <= was * (1 + 1e-6)


def test_a_hot_expert_on_slow_hosts_gets_another_host() -> None:
    layout = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=2)
    hosts = [host.rank for host in layout.experts[0][0]]
    speeds = {rank: 0.5 if rank in hosts else 1.0 for rank in range(4)}
    loads = [[1000.0, 10.0, 10.0, 10.0]]
    (after,) = place(layout, loads=loads, speeds=speeds, slots_per_rank=4)
    assert len(after[0]) > 2
    value = token_shares(loads[0], [[h.rank for h in e] for e in after], speeds)
    assert value.value <= value.fluid * (1 + 2 * TOLERANCE)
