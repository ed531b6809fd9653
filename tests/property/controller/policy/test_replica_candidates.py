"""What a plan for replicas keeps and what it is worth, with hardly a slot to spare or none."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.experts.certificate import lower_bound
from pacekeeper.controller.planning.experts.problem import Cluster, Floors
from pacekeeper.controller.planning.experts.repair import SpreadRequirements, repair
from pacekeeper.controller.policy.failure_domains import SpreadFloor
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ReplicaSet
from support.examples import examples
from support.layouts import on_nodes
from support.placements import Case, planned
from support.spread_cases import SpreadCase, full, hosted, is_stuck

speeds_ = st.sampled_from([0.3, 0.6, 0.8, 1.0])
skewed_loads = st.lists(st.sampled_from([1.0, 5.0, 40.0, 200.0]), min_size=16, max_size=16)
listed_speeds = st.lists(st.sampled_from([0.4, 1.0]), min_size=8, max_size=8)
EVEN = 1e-3  # of the value: shares are exact up to some 1e-4


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
    slots = -(-num_experts * replicas // num_ranks) + draw(st.integers(-1, 2))
    return layout, loads, {rank: draw(speeds_) for rank in layout.ranks}, max(1, slots)


def height(
    experts: Sequence[ReplicaSet], loads: Sequence[float], speeds: dict[int, float]
) -> float:
    at = dict.fromkeys(speeds, 0.0)
    for on, load in zip(experts, loads, strict=True):
        for host in on:
            at[host.rank] += host.share * load
    return max(at[rank] / speeds[rank] for rank in speeds)


@settings(max_examples=examples(200))
@given(skewed(), st.integers(1, 3))
def test_hosts_and_slots_are_kept_and_shares_are_whole(case: Case, min_hosts: int) -> None:
    layout, _, _, slots = case
    _, plan = planned(case, min_hosts)
    if plan is None:
        return
    for layer, experts in enumerate(plan.experts):
        held = dict.fromkeys(layout.ranks, 0)
        for before, after in zip(layout.experts[layer], experts, strict=True):
            ranks = [host.rank for host in after]
            assert ranks == sorted(set(ranks))
            assert len(ranks) >= min(len(before), min_hosts)
            assert sum(host.share for host in after) == pytest.approx(1.0)
            for rank in ranks:
                held[rank] += 1
        assert all(n <= max(slots, len(layout.experts_on(r, layer))) for r, n in held.items())


@settings(max_examples=examples(200))
@given(skewed(), st.sampled_from([0.0, 1.0, 30.0, 300.0]))
def test_what_is_copied_is_repaid(case: Case, move_s: float) -> None:
    """Ranks are nodes here, so nothing has to be mended: all that is done is done for its price."""
    layout, loads, speeds, slots = case
    held = max(len(layout.experts_on(r, i)) for r in layout.ranks for i in range(len(loads)))
    case = layout, loads, speeds, max(slots, held)
    splits, plan = planned(case, 1, move_s=move_s, restart_s=50.0)
    if plan is None:
        return
    saved_s = 50.0 * (plan.loss_now - plan.loss)
    for layer, (split, experts) in enumerate(zip(splits, plan.experts, strict=True)):
        now = {(e, host.rank) for e, on in enumerate(split.replicas) for host in on}
        then = {(e, host.rank) for e, on in enumerate(experts) for host in on}
        if then != now:  # else it keeps its split, which is near the best, not the best
            saved_s += split.bound.value - height(experts, loads[layer], speeds)
            saved_s -= move_s * len(then - now)
    assert saved_s >= -EVEN * sum(split.bound.value for split in splits)


@given(skewed())
def test_the_same_case_is_planned_alike(case: Case) -> None:
    assert planned(case, 2) == planned(case, 2)


@given(skewed(), st.integers(0, 3))
def test_a_budget_of_copies_is_kept(case: Case, max_copies: int) -> None:
    layout, _, _, _ = case
    _, plan = planned(case, 1, max_copies=max_copies)
    if plan is None:
        return
    pairs = [
        {(i, e, h.rank) for i, layer in enumerate(x) for e, on in enumerate(layer) for h in on}
        for x in (layout.experts, plan.experts)
    ]
    assert 0 < len(pairs[1] - pairs[0]) <= max_copies


@settings(max_examples=examples(300))
@given(
    st.one_of(hosted(), full()), skewed_loads, listed_speeds, st.integers(1, 3), st.integers(1, 3)
)
def test_no_expert_gets_below_the_floor_or_further_below_it(
    case: SpreadCase, loads: list[float], listed: list[float], least: int, min_hosts: int
) -> None:
    layout, node_of, slots = case
    rows = [loads[: len(layout.experts[0])]]
    speeds = {rank: listed[rank] for rank in layout.ranks}
    spread = SpreadFloor(least=least, domain_of=node_of)
    _, plan = planned((layout, rows, speeds, slots), min_hosts, spread=spread, restart_s=600.0)
    if plan is None:
        return
    after = replace(layout, experts=plan.experts)
    before_on, after_on = on_nodes(layout, node_of)[0], on_nodes(after, node_of)[0]
    assert all(now >= min(then, least) for then, now in zip(before_on, after_on, strict=True))
    for then, fresh in zip(layout.experts[0], plan.experts[0], strict=True):
        assert len(fresh) >= min(len(then), min_hosts)


def cluster_of(case: SpreadCase) -> Cluster:
    layout, node_of, slots = case
    number: dict[str, int] = {}
    nodes = tuple(number.setdefault(node_of[rank], len(number)) for rank in layout.ranks)
    num = len(nodes)
    return Cluster(
        speeds=(1.0,) * num,
        slots=(slots,) * num,
        failure_probability=(0.01,) * num,
        nodes=nodes,
        racks=nodes,
    )


@settings(max_examples=examples(300))
@given(st.one_of(hosted(), full()), st.integers(1, 3))
def test_what_is_mended_takes_few_moves_and_what_is_left_can_not_be(
    case: SpreadCase, least: int
) -> None:
    layout, node_of, slots = case
    cluster = cluster_of(case)
    hosts = np.zeros((1, len(layout.experts[0]), len(layout.ranks)), dtype=np.bool_)
    for expert, on in enumerate(layout.experts[0]):
        hosts[0, expert, [host.rank for host in on]] = True
    floors = Floors(nodes=min(least, len(set(cluster.nodes))), is_strict=False)
    needs = SpreadRequirements.of(hosts, cluster, floors)
    lacks = needs.nodes[0] - needs.kept_by(hosts, cluster).nodes[0]
    after = repair(hosts, needs, cluster, is_strict=False)
    assert after is not None
    left = needs.nodes[0] - needs.kept_by(after, cluster).nodes[0]
    assert (left <= lacks).all()
    held, was = after[0].sum(axis=0), hosts[0].sum(axis=0)
    assert (held <= np.maximum(slots, was)).all()
    assert int((after & ~hosts).sum()) <= 2 * int(lacks.sum())
    if left.any() and not lacks.sum() - left.sum():
        assert is_stuck(layout, node_of, slots, lacks.tolist())


def closed_form(
    loads: Sequence[float], hosts: Sequence[Sequence[int]], speeds: dict[int, float]
) -> float:
    groups = chain.from_iterable(combinations(speeds, n) for n in range(1, len(speeds) + 1))
    return max(
        sum(load for load, on in zip(loads, hosts, strict=True) if set(on) <= set(group))
        / sum(speeds[rank] for rank in group)
        for group in groups
    )


@settings(max_examples=examples(40))
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
    least = lower_bound(loads, speeds, num_slots=room, min_hosts=[floor] * len(loads))
    assert least <= min(values) * (1 + 1e-6)
    assert least >= sum(loads) / sum(listed) * (1 - 1e-9)
