"""A plan that starts from the present hosts: it copies little and mends what is missing."""

import numpy as np
import numpy.typing as npt
import pytest

from pacekeeper.controller.planning.experts.incremental import nearest_ranks
from pacekeeper.controller.planning.experts.planner import (
    ExpertPlan,
    PresentPlacement,
    plan_experts,
)
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices, alike
from pacekeeper.controller.planning.experts.repair import SpreadRequirements, keeps_spread, repair

Hosts = list[list[list[int]]]


def hosts_of(plan: ExpertPlan) -> Hosts:
    return [[[host.rank for host in on] for on in layer] for layer in plan.replicas]


def flags_of(hosts: Hosts, num_ranks: int) -> npt.NDArray[np.bool_]:
    return np.array([[[r in on for r in range(num_ranks)] for on in layer] for layer in hosts])


def skewed(num_layers: int = 3, num_experts: int = 32) -> npt.NDArray[np.float64]:
    skew = 1e4 * np.arange(1.0, num_experts + 1.0) ** -1.0
    return np.array([np.roll(skew, 5 * layer) for layer in range(num_layers)])


def test_loads_that_stayed_copy_nothing() -> None:
    loads, cluster = skewed(), alike(16, 4)
    first = plan_experts(loads, cluster, drift=0.1)
    again = plan_experts(1.7 * loads, cluster, drift=0.1, present=PresentPlacement(hosts_of(first)))
    assert hosts_of(again) == hosts_of(first)
    assert again.proof.num_copied == 0
    assert first.proof.num_copied == first.proof.num_replicas


def test_a_layer_that_drifted_is_evened_out_by_few_copies_and_the_others_stay() -> None:
    loads, cluster = skewed(), alike(16, 4)
    first = plan_experts(loads, cluster)
    alone = [e for e, on in enumerate(hosts_of(first)[1]) if len(on) == 1]
    loads[1, alone[0]] += 2.0 * loads[1].sum() / 16
    again = plan_experts(
        loads, cluster, prices=Prices(move_s=1.0), present=PresentPlacement(hosts_of(first))
    )
    assert hosts_of(again)[0] == hosts_of(first)[0]
    assert hosts_of(again)[2] == hosts_of(first)[2]
    assert 1 <= again.proof.num_copied <= 6
    assert again.proof.layers[1].value <= 1.011 * again.proof.layers[1].fluid


def test_what_a_lost_rank_took_is_on_enough_nodes_again() -> None:
    loads, floors = skewed(), Floors(nodes=2)
    first = hosts_of(plan_experts(loads, alike(16, 6), floors=floors))
    left = [[[rank for rank in on if rank != 15] for on in layer] for layer in first]
    dear = Prices(move_s=1.0)
    again = plan_experts(
        loads, alike(15, 6), floors=floors, prices=dear, present=PresentPlacement(left)
    )
    assert min(len(on) for layer in hosts_of(again) for on in layer) >= 2
    held = sum(len(on) for layer in first for on in layer)
    assert again.proof.num_copied < held / 4


def test_without_a_free_slot_an_expert_with_a_host_to_spare_makes_room() -> None:
    def after(present: Hosts) -> npt.NDArray[np.bool_] | None:
        hosts, cluster = flags_of(present, 3), alike(3, 2)
        needs = SpreadRequirements.of(hosts, cluster, Floors(nodes=2))
        return repair(hosts, needs, cluster, is_strict=True)

    hosts = after([[[0, 1, 2], [0], [1, 2]]])
    assert hosts is not None
    assert hosts[0].sum(axis=1).tolist() == [2, 2, 2]
    assert hosts[0].sum(axis=0).tolist() == [2, 2, 2]
    assert hosts[0, 1, 0] and hosts[0, 2].tolist() == [False, True, True]
    assert after([[[0, 1], [0], []]]) is None


def test_a_rank_that_joined_gets_work() -> None:
    loads = skewed()
    present = hosts_of(plan_experts(loads, alike(8, 8)))
    again = plan_experts(
        loads, alike(9, 8), present=PresentPlacement(present), prices=Prices(move_s=0.0)
    )
    assert again.proof.gap < 0.01


def test_copies_that_cost_more_than_they_save_are_not_made() -> None:
    loads, cluster = skewed(), alike(16, 4)
    present = hosts_of(plan_experts(loads[:, ::-1], cluster))
    free = plan_experts(
        loads, cluster, present=PresentPlacement(present), prices=Prices(move_s=0.0)
    )
    dear = plan_experts(
        loads, cluster, present=PresentPlacement(present), prices=Prices(move_s=1e6)
    )
    assert dear.proof.num_copied < free.proof.num_copied
    assert dear.proof.gap > free.proof.gap


def test_experts_beyond_the_slots_count_for_what_could_be_survived() -> None:
    # On two nodes each, as the floor asks: nobody can spare a replica, though slots are too few.
    floors = Floors(nodes=2, is_strict=False)
    proof = plan_experts(
        [[1.0, 1.0]], alike(2, 1), floors=floors, present=PresentPlacement([[[0, 1], [0, 1]]])
    ).proof
    assert proof.survival[1] == 1.0
    assert proof.survival_bound[1] == 1.0


@pytest.mark.parametrize("limit", [0, 2, 7])
def test_no_more_is_copied_than_allowed(limit: int) -> None:
    loads, cluster = skewed(), alike(16, 4)
    present = hosts_of(plan_experts(loads[:, ::-1], cluster))
    plan = plan_experts(loads, cluster, present=PresentPlacement(present, limit))
    assert plan.proof.num_copied <= limit


def test_a_floor_that_needs_more_copies_than_allowed_is_refused() -> None:
    present = [[[0], [1]]]
    with pytest.raises(ValueError, match="limit of copies"):
        plan_experts(
            [[1.0, 1.0]], alike(2, 2), floors=Floors(nodes=2), present=PresentPlacement(present, 1)
        )


@pytest.mark.parametrize(
    ("present", "says"),
    [([[[0]]], "1 layers x 2 experts"), ([[[0], [5]]], "are no ranks"), ([], "1 layers")],
)
def test_present_hosts_that_are_none_are_refused(present: Hosts, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_experts([[1.0, 1.0]], alike(2, 2), present=PresentPlacement(present))


def test_an_expert_without_host_comes_back() -> None:
    plan = plan_experts([[1.0, 1.0]], alike(2, 2), present=PresentPlacement([[[0], []]]))
    assert all(plan.replicas[0])


def test_ranks_take_the_places_that_need_fewest_copies() -> None:
    loads, cluster = skewed(), alike(16, 4)
    hosts = flags_of(hosts_of(plan_experts(loads, cluster)), 16)
    shuffled = [(7 * rank + 3) % 16 for rank in range(16)]
    place = nearest_ranks(hosts, hosts[:, :, np.argsort(shuffled)], cluster)
    assert (hosts == hosts[:, :, np.argsort(shuffled)][:, :, place]).all()


def test_only_ranks_that_are_alike_change_places() -> None:
    cluster = Cluster(
        speeds=(1.0, 0.5, 1.0, 0.5),
        slots=(1, 1, 1, 1),
        failure_probability=(0.01,) * 4,
        nodes=(0, 0, 1, 1),
        racks=(0, 0, 1, 1),
    )
    hosts = np.eye(4, dtype=np.bool_)[None]
    backwards = hosts[:, :, ::-1]
    assert [cluster.speeds[r] for r in nearest_ranks(hosts, backwards, cluster)] == [
        1.0,
        0.5,
        1.0,
        0.5,
    ]


def test_an_expert_that_got_more_hosts_keeps_them_on_as_many_nodes_as_they_can_reach() -> None:
    cluster, floors = alike(4, 2, ranks_per_node=2), Floors(nodes=2, is_strict=False)
    needs = SpreadRequirements.of(flags_of([[[2]]], 4), cluster, floors)  # it had one host
    three = flags_of([[[0, 1, 2]]], 4)[0]
    may_leave = needs.may_leave(three, 0, cluster, floors)
    assert may_leave.tolist() == [[True, True, False, False]]
    two = flags_of([[[1, 2]]], 4)[0]
    assert needs.may_leave(two, 0, cluster, floors).tolist() == [[False, True, True, False]]
    assert not keeps_spread(two, flags_of([[[0, 1]]], 4)[0], cluster, floors)
    assert keeps_spread(two, flags_of([[[1, 3]]], 4)[0], cluster, floors)
