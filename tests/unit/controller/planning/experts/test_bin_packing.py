"""Scarce slots: groups filled with small experts and a large one, and groups that take turns."""

import numpy as np
import pytest

from pacekeeper.controller.planning.experts.bin_packing import greedy_fill, values_with_drift
from pacekeeper.controller.planning.experts.chained_declustering import circle
from pacekeeper.controller.planning.experts.planner import plan_experts
from pacekeeper.controller.planning.experts.problem import Floors, Prices, alike


def zipf(
    num_experts: int, exponent: float = 0.8
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return 1e4 * np.arange(1.0, num_experts + 1.0) ** -exponent


@pytest.mark.parametrize(("slots", "above"), [(2, 1e-5), (3, 0.02), (4, 0.05)])
@pytest.mark.parametrize("num_groups", [4, 7, 40])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 2.0])
def test_groups_become_even_with_two_slots_exactly_with_more_nearly(
    slots: int, above: float, num_groups: int, exponent: float
) -> None:
    loads = zipf((slots - 1) * num_groups + 1, exponent)[None]
    found = greedy_fill(loads, np.ones(num_groups), np.full(num_groups, slots))
    assert found is not None
    hosts, even = found
    assert hosts[0].sum(axis=0).max() <= slots
    assert hosts[0].any(axis=1).all()
    assert (even.shares > 0.0).sum() == hosts.sum()
    assert even.shares.sum(axis=2) == pytest.approx(1.0)
    assert even.value[0] <= (1.0 + above) * loads.sum() / num_groups * (1.0 + 1e-5)


def test_a_fill_that_lacks_slots_is_none() -> None:
    assert greedy_fill(np.ones((1, 9)), np.ones(4), np.full(4, 2)) is None


def test_an_expert_without_load_gets_a_host_too() -> None:
    found = greedy_fill(np.array([[5.0, 0.0, 0.0]]), np.ones(2), np.full(2, 2))
    assert found is not None and found[0][0].any(axis=1).all()


def test_what_can_not_flow_away_counts_with_its_drift() -> None:
    hosts = np.array([[[True, False], [False, True], [True, True]]])
    loads, speeds = np.array([[10.0, 10.0, 1.0]]), np.ones(2)
    value = np.array([10.5])
    still = values_with_drift(hosts, loads, speeds, value, num_ranks=2, drift=0.0)
    moving = values_with_drift(hosts, loads, speeds, value, num_ranks=2, drift=0.1)
    assert still[0] == 10.5
    assert moving[0] == pytest.approx(10.0 + 1.5 * 0.1 * 10.0)


def test_two_slots_on_very_many_ranks_reach_the_bound() -> None:
    loads = np.array([np.random.default_rng(i).permutation(zipf(64)) for i in range(2)])
    proof = plan_experts(loads, alike(250, 2), drift=0.05).proof
    assert proof.gap < 1e-4
    assert min(map(len, proof.cut_sets)) >= 3


def test_large_and_small_groups_take_turns_so_that_no_window_is_small() -> None:
    groups = circle(alike(10, 6), 4)
    assert sorted(map(len, groups)) == [2, 2, 3, 3]
    assert {len(groups[i]) + len(groups[(i + 1) % 4]) for i in range(4)} == {5}


def test_twelve_experts_on_ten_nodes_survive_any_four_losses_where_the_hottest_allows() -> None:
    """Five hosts for each fill all slots: four losses kill none, if none needs more than five."""
    plan = plan_experts([zipf(12, 0.5)], alike(10, 6), floors=Floors(nodes=2))
    assert plan.proof.survival[4] == 1.0
    # The hottest has 50.5 %: with five hosts its ranks are 1 % above even, with six another has
    # four. What counts as even decides.
    hot = np.array([50.5, *np.linspace(9.0, 0.5, 11)])
    hot[1:] *= 49.5 / hot[1:].sum()
    for even, survived in ((5e-4, 1.0 - 1.0 / 210.0), (0.02, 1.0)):
        prices = Prices(even=even)
        plan = plan_experts([hot], alike(10, 6), floors=Floors(nodes=2), prices=prices)
        (layer,) = plan.proof.layers
        assert layer.value <= (1.0 + max(even, 1e-3)) * layer.fluid
        assert plan.proof.survival[4] == pytest.approx(survived)


def test_in_a_layer_that_nobody_used_every_expert_has_hosts_and_whole_shares() -> None:
    found = greedy_fill(np.array([[0.0, 0.0, 0.0], [5.0, 1.0, 0.0]]), np.ones(2), np.full(2, 2))
    assert found is not None
    hosts, even = found
    assert hosts.any(axis=2).all()
    assert np.allclose(even.shares.sum(axis=2), 1.0)
    assert even.value[0] == even.bound[0] == 0.0
