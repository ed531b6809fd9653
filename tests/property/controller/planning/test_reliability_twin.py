"""Losses by nodes and by whole racks, against every combination of what may fail."""

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning import reliability
from pacekeeper.controller.planning.experts.planner import plan_experts
from pacekeeper.controller.planning.experts.problem import Cluster, Floors
from pacekeeper.controller.planning.reliability import loss_with_racks, minimal_cut_sets
from support.examples import examples

Case = tuple[list[frozenset[int]], dict[int, float], dict[int, int], dict[int, float]]

risks = st.sampled_from([0.0, 0.01, 0.3, 1.0])


def tried(
    hosts: Sequence[frozenset[int]],
    node_failure: Mapping[int, float],
    rack_of: Mapping[int, int],
    rack_failure: Mapping[int, float],
) -> float:
    """Every set of failing nodes and racks, with its likelihood."""
    nodes, racks, lost = sorted(node_failure), sorted(rack_failure), 0.0
    odds = [*(node_failure[n] for n in nodes), *(rack_failure[r] for r in racks)]
    for fails in product((False, True), repeat=len(odds)):
        likely = 1.0
        for is_failing, p in zip(fails, odds, strict=True):
            likely *= p if is_failing else 1.0 - p
        gone = {r for r, is_gone in zip(racks, fails[len(nodes) :], strict=True) if is_gone}
        dead = {n for n, is_dead in zip(nodes, fails, strict=False) if is_dead}
        dead |= {n for n in nodes if rack_of[n] in gone}
        lost += likely * any(on <= dead for on in hosts)
    return lost


@st.composite
def placements(
    draw: st.DrawFn,
) -> Case:
    num_nodes = draw(st.integers(1, 5))
    rack_of = {node: draw(st.sampled_from([7, 3, 9])) for node in range(num_nodes)}
    some = st.sets(st.integers(0, num_nodes - 1), min_size=1).map(frozenset)
    hosts = draw(st.lists(some, min_size=1, max_size=5))
    named = draw(st.sets(st.sampled_from(sorted(set(rack_of.values())))))
    return (
        hosts,
        {node: draw(risks) for node in range(num_nodes)},
        rack_of,
        {rack: draw(risks) for rack in sorted(named)},
    )


@settings(max_examples=examples(300))
@given(placements())
def test_what_is_lost_with_racks_is_what_trying_all_failures_gives(
    case: Case,
) -> None:
    hosts, nodes, rack_of, racks = case
    assert loss_with_racks(minimal_cut_sets(hosts), nodes, rack_of, racks) == pytest.approx(
        tried(hosts, nodes, rack_of, racks), abs=1e-12
    )


@given(placements())
def test_beyond_few_sets_of_events_it_is_never_below(
    case: Case,
) -> None:
    hosts, nodes, rack_of, racks = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reliability, "MAX_EVENT_SETS", 0)
        assert (
            loss_with_racks(minimal_cut_sets(hosts), nodes, rack_of, racks)
            >= tried(hosts, nodes, rack_of, racks) - 1e-12
        )


@settings(max_examples=examples(40))
@given(
    st.integers(2, 3),
    st.sampled_from([0.002, 0.05]),
    st.lists(st.sampled_from([0.0, 1.0, 5.0]), min_size=2, max_size=6),
)
def test_where_racks_fail_whole_a_plan_knows_and_survives_any_one_of_them(
    num_racks: int, whole: float, loads: list[float]
) -> None:
    rack_of = {node: node // 2 for node in range(2 * num_racks)}
    cluster = Cluster(
        speeds=(1.0,) * len(rack_of),
        slots=(3,) * len(rack_of),
        failure_probability=(0.01,) * len(rack_of),
        nodes=tuple(rack_of),
        racks=tuple(rack_of.values()),
        rack_failure=dict.fromkeys(rack_of.values(), whole),
    )
    plan = plan_experts([loads], cluster, floors=Floors(nodes=2))
    hosts = [frozenset(host.rank for host in on) for on in plan.replicas[0]]
    assert all(len({rack_of[node] for node in on}) > 1 for on in hosts)
    exact = tried(hosts, cluster.node_failure, rack_of, cluster.rack_failure)
    assert plan.proof.loss_probability >= exact * (1.0 - 1e-9)
    assert plan.proof.loss_probability <= exact * 1.1
