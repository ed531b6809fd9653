"""What every plan for experts promises, against trying every loss and every set of ranks."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.experts.planner import (
    ExpertPlan,
    NoPlacement,
    PresentPlacement,
    plan_experts,
)
from pacekeeper.controller.planning.experts.problem import Cluster, Floors
from support.densest import least_of_all_hosts, least_split
from support.examples import examples

LOADS = st.one_of(st.just(0.0), st.floats(1e-3, 100.0))

MIN_PLANNED = 0.2  # of all examples: a planner that refuses everything must not pass


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    num = draw(st.integers(1, 8))
    per_node, per_rack = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 2]))
    return Cluster(
        speeds=tuple(draw(st.sampled_from([1.0, 1.0, 0.8, 0.5])) for _ in range(num)),
        slots=(draw(st.integers(1, 4)),) * num
        if draw(st.booleans())
        else tuple(draw(st.integers(1, 4)) for _ in range(num)),
        failure_probability=tuple(draw(st.sampled_from([0.01, 0.2])) for _ in range(num)),
        nodes=tuple(rank // per_node for rank in range(num)),
        racks=tuple(rank // per_node // per_rack for rank in range(num)),
    )


def fits(cluster: Cluster, num_experts: int, floor: int) -> bool:
    """Is there room for every expert on `floor` distinct nodes? (McNaughton)"""
    room: dict[int, int] = {}
    for node, slots in zip(cluster.nodes, cluster.slots, strict=True):
        room[node] = min(room.get(node, 0) + slots, num_experts)
    return len(room) >= floor and sum(room.values()) >= floor * num_experts


def nodes_of(plan: ExpertPlan, cluster: Cluster) -> list[set[int]]:
    return [{cluster.nodes[host.rank] for host in on} for layer in plan.replicas for on in layer]


@settings(max_examples=examples(1000))
@given(clusters(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 2), st.data())
def test_fewer_losses_than_the_floor_are_survived_and_no_slot_is_used_twice(
    cluster: Cluster, floor: int, num_experts: int, num_layers: int, data: st.DataObject
) -> None:
    assume(fits(cluster, num_experts, floor))
    loads = [[data.draw(LOADS) for _ in range(num_experts)] for _ in range(num_layers)]
    plan = plan_experts(loads, cluster, floors=Floors(nodes=floor))
    on = nodes_of(plan, cluster)
    for failed in combinations(sorted(set(cluster.nodes)), floor - 1):
        assert all(nodes - set(failed) for nodes in on), "an expert died with so few nodes"
    for rows, layer, proof in zip(loads, plan.replicas, plan.proof.layers, strict=True):
        at_rank = [0.0] * cluster.num_ranks
        held = [0] * cluster.num_ranks
        for own, hosts in zip(rows, layer, strict=True):
            assert len({host.rank for host in hosts}) == len(hosts)
            assert sum(host.share for host in hosts) == pytest.approx(1.0)
            for host in hosts:
                at_rank[host.rank] += own * host.share
                held[host.rank] += 1
        assert all(n <= slots for n, slots in zip(held, cluster.slots, strict=True))
        reached = max(r / s for r, s in zip(at_rank, cluster.speeds, strict=True))
        least = least_split(rows, [[h.rank for h in hosts] for hosts in layer], cluster.speeds)
        assert reached == pytest.approx(proof.value)
        assert proof.value <= least * (1.0 + 1e-3) + 1e-12
        assert proof.fluid <= proof.slots_bound * (1.0 + 1e-9)
        assert max(proof.replicas_bound, proof.slots_bound) <= least * (1.0 + 1e-5)


def test_floors_of_nodes_and_racks_hold_anew_and_from_any_present_hosts() -> None:
    planned: Counter[bool] = Counter()

    @settings(max_examples=examples(1000))
    @given(clusters(), st.integers(1, 3), st.integers(1, 2), st.integers(1, 7), st.data())
    def floors_hold(
        cluster: Cluster, nodes: int, racks: int, num_experts: int, data: st.DataObject
    ) -> None:
        loads = [[data.draw(LOADS) for _ in range(num_experts)]]
        some = st.sets(st.integers(0, cluster.num_ranks - 1), max_size=3).map(sorted)
        present = data.draw(st.none() | st.lists(some, min_size=num_experts, max_size=num_experts))
        floors = Floors(nodes=max(nodes, racks), racks=racks)
        try:
            plan = plan_experts(
                loads,
                cluster,
                floors=floors,
                present=None if present is None else PresentPlacement([present]),
            )
        except NoPlacement:
            planned[False] += 1
            return
        planned[True] += 1
        check_floors(plan, cluster, floors)

    floors_hold()
    assert planned[True] >= MIN_PLANNED * planned.total()


def check_floors(plan: ExpertPlan, cluster: Cluster, floors: Floors) -> None:
    for labels, floor in ((cluster.nodes, floors.nodes), (cluster.racks, floors.racks)):
        on = [{labels[host.rank] for host in hosts} for hosts in plan.replicas[0]]
        for failed in combinations(sorted(set(labels)), floor - 1):
            assert all(at - set(failed) for at in on), "an expert died with so few"
    held = [
        sum(any(h.rank == rank for h in on) for on in plan.replicas[0])
        for rank in range(len(cluster.slots))
    ]
    assert all(n <= slots for n, slots in zip(held, cluster.slots, strict=True))


@settings(max_examples=examples(300))
@given(clusters(), st.integers(1, 3), st.integers(1, 9), st.data())
def test_the_proof_of_survival_is_what_trying_every_loss_gives(
    cluster: Cluster, floor: int, num_experts: int, data: st.DataObject
) -> None:
    assume(fits(cluster, num_experts, floor))
    loads = [[data.draw(LOADS) for _ in range(num_experts)] for _ in range(2)]
    plan = plan_experts(loads, cluster, floors=Floors(nodes=floor))
    on, names = nodes_of(plan, cluster), sorted(set(cluster.nodes))
    risk, lost = cluster.node_failure, 0.0
    for k in range(len(names) + 1):
        survived = 0
        failures = list(combinations(names, k))
        for failed in failures:
            lives = all(nodes - set(failed) for nodes in on)
            survived += lives
            odds = 1.0
            for node in names:
                odds *= risk[node] if node in failed else 1.0 - risk[node]
            lost += 0.0 if lives else odds
        part = survived / len(failures)
        if k < len(plan.proof.survival):
            assert plan.proof.survival[k] == pytest.approx(part)
            assert part <= plan.proof.survival_bound[k] + 1e-9
    assert plan.proof.loss_probability == pytest.approx(lost, rel=1e-6, abs=1e-15)


@settings(max_examples=examples(60))
@given(st.integers(2, 4), st.integers(1, 2), st.integers(2, 5), st.data())
def test_no_hosts_at_all_beat_the_bound_of_the_slots(
    num: int, slots: int, num_experts: int, data: st.DataObject
) -> None:
    floor = data.draw(st.integers(1, 2))
    assume(num * slots >= floor * num_experts and num >= floor)
    speeds = tuple(data.draw(st.sampled_from([1.0, 0.5])) for _ in range(num))
    cluster = Cluster(
        speeds=speeds,
        slots=(slots,) * num,
        failure_probability=(0.01,) * num,
        nodes=tuple(range(num)),
        racks=tuple(range(num)),
    )
    loads = [data.draw(LOADS) for _ in range(num_experts)]
    (proof,) = plan_experts([loads], cluster, floors=Floors(nodes=floor)).proof.layers
    best = least_of_all_hosts(loads, cluster.slots, speeds, floor)
    assert best is not None
    assert proof.slots_bound <= best * (1.0 + 1e-5)
    assert best <= proof.value * (1.0 + 1e-9)
