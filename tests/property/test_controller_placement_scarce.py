"""Where slots are scarce: placements against what no placement can beat, and what moving costs."""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller import placement
from pacekeeper.controller.shares import SLACK, Split, best_value, token_shares
from pacekeeper.controller.slot_bound import least_value
from pacekeeper.core.layout import even_layout
from support.placements import Case, placed

speeds_ = st.sampled_from([0.3, 0.6, 0.8, 1.0])


@pytest.fixture(scope="module", params=[64, 1], autouse=True)
def num_solves(request: pytest.FixtureRequest) -> Iterator[None]:
    """As for one layer, a few changes at a time, and as for many, all at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "MAX_SOLVES", request.param)
        yield


@st.composite
def skewed(draw: st.DrawFn) -> Case:
    """One or two layers with hot experts, ranks of several speeds, hardly a slot to spare."""
    num_ranks, num_experts = draw(st.integers(2, 8)), draw(st.integers(1, 16))
    num_layers, replicas = draw(st.integers(1, 2)), draw(st.integers(1, min(3, num_ranks)))
    layout = even_layout(
        ranks=range(num_ranks), num_layers=num_layers, num_experts=num_experts, replicas=replicas
    )
    exponent = draw(st.sampled_from([0.4, 0.8, 1.4]))
    skew = [1000.0 * (i + 1) ** -exponent for i in range(num_experts)]
    loads = [draw(st.permutations(skew)) for _ in range(num_layers)]
    slots = -(-num_experts * replicas // num_ranks) + draw(st.integers(0, 2))
    return layout, loads, {rank: draw(speeds_) for rank in layout.ranks}, slots


def copied(before: Split, after: Split) -> int:
    pairs = [
        {(e, host.rank) for e, on in enumerate(split.hosts) for host in on}
        for split in (after, before)
    ]
    return len(pairs[0] - pairs[1])


@settings(max_examples=200)
@given(skewed(), st.integers(1, 3))
def test_hosts_slots_and_the_bound_are_kept(case: Case, min_hosts: int) -> None:
    layout, loads, speeds, slots = case
    before, after = placed(case, min_hosts)
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        used = [len(layout.experts_on(rank, layer)) for rank in layout.ranks]
        held = [0] * len(used)
        for then, now in zip(old.hosts, new.hosts, strict=True):
            ranks = [host.rank for host in now]
            assert ranks == sorted(set(ranks))
            assert len(ranks) >= min(len(then), min_hosts)
            for rank in ranks:
                held[rank] += 1
        room = [max(slots, was) for was in used]
        assert all(is_held <= may for is_held, may in zip(held, room, strict=True))
        floor = [min(len(on), min_hosts) for on in old.hosts]
        least = least_value(loads[layer], speeds, num_slots=sum(room), min_hosts=floor)
        assert new.value >= least * (1 - 1e-6)
        assert new.bound.value <= old.bound.value


@given(skewed(), st.floats(0.0, 300.0))
def test_what_is_copied_is_repaid(case: Case, move_cost: float) -> None:
    for before, after in zip(*placed(case, 2, move_cost), strict=True):
        gain = before.bound.value - after.bound.value
        assert gain >= move_cost * copied(before, after)
        assert (gain > 0.0) == (after is not before)


@given(skewed())
def test_the_same_case_is_placed_alike(case: Case) -> None:
    assert placed(case, 2) == placed(case, 2)


@given(skewed())
def test_shares_that_need_no_programme_keep_the_same_promise(case: Case) -> None:
    layout, loads, speeds, _ = case
    hosts = [[host.rank for host in on] for on in layout.experts[0]]
    split = token_shares(loads[0], hosts, speeds, is_even=True)
    exact = best_value(loads[0], hosts, speeds)
    assert split.value <= exact.value * (1 + SLACK + 1e-3)
    assert exact.fluid * (1 - 1e-9) <= split.bound.value <= exact.value * (1 + 1e-9)
    for on in split.hosts:
        assert sum(host.share for host in on) == pytest.approx(1.0)


def closed_form(
    loads: Sequence[float], hosts: Sequence[Sequence[int]], speeds: dict[int, float]
) -> float:
    groups = chain.from_iterable(combinations(speeds, n) for n in range(1, len(speeds) + 1))
    return max(
        sum(load for load, on in zip(loads, hosts, strict=True) if set(on) <= set(group))
        / sum(speeds[rank] for rank in group)
        for group in groups
    )


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 5.0, 20.0]), min_size=1, max_size=3),
    st.lists(speeds_, min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_no_hosts_beat_the_least_value(
    loads: list[float], listed: list[float], slots: int, min_hosts: int
) -> None:
    speeds = dict(enumerate(listed))
    floor = min(min_hosts, len(speeds))
    choices = [
        on for n in range(floor, len(speeds) + 1) for on in combinations(range(len(speeds)), n)
    ]
    values = [
        closed_form(loads, hosts, speeds)
        for hosts in product(choices, repeat=len(loads))
        if all(sum(rank in on for on in hosts) <= slots for rank in speeds)
    ]
    if not values:
        return
    room = slots * len(speeds)
    least = least_value(loads, speeds, num_slots=room, min_hosts=[floor] * len(loads))
    assert least <= min(values) * (1 + 1e-6)
    assert least >= sum(loads) / sum(listed) * (1 - 1e-9)
