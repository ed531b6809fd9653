"""The joint plan for experts: the cases that published planners lose, and what it refuses."""

from itertools import combinations
from math import isfinite

import numpy as np
import numpy.typing as npt
import pytest

from pacekeeper.controller.planning.experts.planner import ExpertPlan, plan_experts
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices, alike
from pacekeeper.controller.planning.token_split.min_max import min_max_split

FLOOR = Floors(nodes=2)


def zipf(num_experts: int, exponent: float) -> npt.NDArray[np.float64]:
    return 1e4 * np.arange(1.0, num_experts + 1.0) ** -exponent


def worst_over_fluid(plan: ExpertPlan) -> float:
    return max(layer.value / layer.fluid for layer in plan.proof.layers)


def ranks_of(plan: ExpertPlan, layer: int = 0) -> list[set[int]]:
    return [{host.rank for host in on} for on in plan.replicas[layer]]


@pytest.mark.parametrize(
    ("num_nodes", "slots", "num_experts", "survived"),
    # Where maximum rank overlap breaks its promise or survives less (research 1.6).
    [(3, 2, 3, 1), (4, 3, 4, 2), (10, 6, 8, 6)],
)
def test_where_overlap_cuts_its_last_group_short_all_losses_are_survived(
    num_nodes: int, slots: int, num_experts: int, survived: int
) -> None:
    loads = np.linspace(1.0, 1.2, num_experts)[None]
    plan = plan_experts(loads, alike(num_nodes, slots), floors=FLOOR)
    assert plan.proof.survival[: survived + 1] == (1.0,) * (survived + 1)
    on = ranks_of(plan)
    for failed in combinations(range(num_nodes), survived):
        assert all(ranks - set(failed) for ranks in on)


@pytest.mark.parametrize(
    ("num_experts", "exponent", "to_beat"),
    # P(2) .. P(6) of the annealed joint search (research 4.9a), all at max/mean load 1.000.
    [
        (8, 1.0, (1.0, 1.0, 1.0, 1.0, 1.0)),
        (12, 0.5, (1.0, 1.0, 1.0, 0.98, 0.91)),
        (12, 1.0, (1.0, 1.0, 1.0, 0.96, 0.87)),
        (12, 1.5, (1.0, 1.0, 1.0, 0.96, 0.82)),
        (16, 0.5, (1.0, 0.98, 0.93, 0.81, 0.60)),
        (16, 1.0, (1.0, 0.98, 0.93, 0.81, 0.60)),
        (16, 1.5, (1.0, 0.98, 0.92, 0.79, 0.56)),
    ],
)
def test_skewed_loads_are_even_and_survive_as_much_as_a_long_search_found(
    num_experts: int, exponent: float, to_beat: tuple[float, ...]
) -> None:
    plan = plan_experts([zipf(num_experts, exponent)], alike(10, 6), floors=FLOOR)
    assert worst_over_fluid(plan) < 1.0005
    parts = [round(part, 2) for part in plan.proof.survival[2:7]]
    assert all(ours >= theirs for ours, theirs in zip(parts, to_beat, strict=True)), parts


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "slots"),
    [(64, 8, 9), (64, 16, 5), (128, 64, 3), (256, 32, 9), (256, 64, 5)],
)
@pytest.mark.parametrize("speed", [1.0, 0.5])
@pytest.mark.parametrize("exponent", [0.8, 1.2])
def test_a_slow_rank_and_scarce_slots_still_leave_all_ranks_even(
    num_experts: int, num_ranks: int, slots: int, speed: float, exponent: float
) -> None:
    speeds = (speed,) + (1.0,) * (num_ranks - 1)
    plan = plan_experts([zipf(num_experts, exponent)], alike(num_ranks, slots, speeds=speeds))
    assert worst_over_fluid(plan) < 1.02


def test_no_hosts_survive_a_loss_that_leaves_fewer_slots_than_experts() -> None:
    proof = plan_experts([zipf(8, 1.0)], alike(10, 6), floors=FLOOR, max_losses=10).proof
    assert proof.survival_bound[8] > 0.0 < proof.survival[8]
    assert proof.survival_bound[9:] == (0.0, 0.0) == proof.survival[9:]


def test_the_layers_share_their_cut_sets() -> None:
    loads = [np.roll(zipf(16, 1.0), shift) for shift in range(12)]
    plan = plan_experts(loads, alike(10, 6), floors=FLOOR)
    alone = plan_experts(loads[:1], alike(10, 6), floors=FLOOR)
    assert plan.proof.cut_sets == alone.proof.cut_sets
    assert plan.proof.survival == alone.proof.survival


def test_suspect_ranks_are_never_among_themselves() -> None:
    risk = [0.01] * 10
    risk[2] = risk[3] = risk[4] = 0.5
    cluster = Cluster(
        speeds=(1.0,) * 10,
        slots=(6,) * 10,
        failure_probability=tuple(risk),
        nodes=tuple(range(10)),
        racks=tuple(range(10)),
    )
    plan = plan_experts([zipf(16, 1.0)], cluster, floors=FLOOR)
    assert all(killer - {2, 3, 4} for killer in plan.proof.cut_sets)
    # Three segments with a suspect in each lose one with 1.005e-4.
    assert plan.proof.loss_probability < 1.01e-4


@pytest.mark.parametrize("suspect", [0, 1, 2])
def test_where_groups_are_of_unequal_size_the_suspect_is_in_a_large_one(suspect: int) -> None:
    """Two experts and three ranks with a slot each: one expert stands alone, not there."""
    cluster = Cluster(
        speeds=(1.0,) * 3,
        slots=(1,) * 3,
        failure_probability=tuple(0.2 if rank == suspect else 0.01 for rank in range(3)),
        nodes=(0, 1, 2),
        racks=(0, 1, 2),
    )
    plan = plan_experts([[1.0, 1.0]], cluster)
    assert frozenset({suspect}) not in plan.proof.cut_sets


def test_floors_count_nodes_and_racks_not_ranks() -> None:
    cluster = alike(16, 6, ranks_per_node=4, nodes_per_rack=2)
    plan = plan_experts([zipf(32, 1.0)] * 2, cluster, floors=Floors(nodes=2, racks=2))
    for layer in range(2):
        for ranks in ranks_of(plan, layer):
            assert len({cluster.nodes[rank] for rank in ranks}) >= 2
            assert len({cluster.racks[rank] for rank in ranks}) == 2
    assert worst_over_fluid(plan) < 1.01


def test_ranks_of_a_node_share_its_kill_set() -> None:
    # 8 nodes of 8 ranks, 4 hosts for each expert: two blocks of 4 nodes, not 16 sets of nodes.
    loads = np.ones((2, 64))
    plan = plan_experts(loads, alike(64, 4, ranks_per_node=8), floors=Floors(nodes=4))
    assert len(plan.proof.cut_sets) <= 2
    assert min(map(len, plan.proof.cut_sets)) >= 4


def test_room_for_drift_costs_less_than_a_fixed_price() -> None:
    # Two segments without a wide expert are even today; nothing could flow between them tomorrow.
    loads = [zipf(12, 0.5)]
    still = plan_experts(loads, alike(10, 6), floors=FLOOR)
    moving = plan_experts(loads, alike(10, 6), floors=FLOOR, drift=0.2)
    drifted = zipf(12, 0.5) * np.array([1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1, 1, 1, 1, 1, 1])
    assert len(still.proof.cut_sets) == 2
    for shift in range(12):
        rows = np.roll(drifted, shift)
        on = np.zeros((1, 12, 10), dtype=np.bool_)
        for expert, ranks in enumerate(ranks_of(moving)):
            on[0, expert, list(ranks)] = True
        value = even_value(rows, on)
        assert value < 1.001


def even_value(rows: npt.NDArray[np.float64], on: npt.NDArray[np.bool_]) -> float:
    return float(
        min_max_split(rows[None], on, np.ones(on.shape[2])).value[0] / rows.mean() * 10 / 12
    )


def test_the_same_question_has_the_same_answer() -> None:
    loads = [zipf(32, 1.1), zipf(32, 0.7)]
    assert plan_experts(loads, alike(16, 4)) == plan_experts(loads, alike(16, 4))


def test_few_experts_are_on_every_rank() -> None:
    plan = plan_experts([[5.0, 0.0]], alike(3, 4))
    assert ranks_of(plan) == [{0, 1, 2}, {0, 1, 2}]
    assert plan.proof.gap == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("loads", "cluster", "floors", "says"),
    [
        ([1.0, 2.0], alike(2, 2), Floors(), "layers x experts"),
        ([[1.0, -2.0]], alike(2, 2), Floors(), "not negative"),
        ([[1.0, float("nan")]], alike(2, 2), Floors(), "finite"),
        ([[1e308, 1e308]], alike(2, 2), Floors(), r"at most 1e\+100, got 1e\+308"),
        ([[1.0] * 5], alike(2, 2), Floors(), "do not fit"),
        ([[1.0] * 3], alike(2, 2), Floors(nodes=2), "do not fit"),
        ([[1.0]], alike(2, 2), Floors(nodes=3), "do not fit"),
        ([[1.0]], alike(4, 2, nodes_per_rack=4), Floors(nodes=2, racks=2), "racks"),
    ],
)
def test_what_can_not_be_placed_is_said(
    loads: object, cluster: Cluster, floors: Floors, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        plan_experts(loads, cluster, floors=floors)  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [1e-9, 1.0])
def test_loads_and_speeds_as_far_apart_as_is_allowed_are_planned(least: float) -> None:
    loads = [[1e100, least, 0.0, 3.0], [least, least, 1.0, 2.0]]
    plan = plan_experts(loads, alike(3, 2, speeds=(1e9, 1.0, 2.0)), drift=100.0)
    assert all(isfinite(layer.gap) and layer.gap > -1e-9 for layer in plan.proof.layers)
    assert all(sum(h.share for h in on) == pytest.approx(1.0) for on in sum(plan.replicas, ()))


def test_values_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        alike(2, 1, speeds=(1.0, 0.0))
    with pytest.raises(ValueError, match=r"more than 1e\+09 apart"):
        alike(2, 1, speeds=(1.0, 1e-10))
    for drift in (-0.1, float("nan"), 1e300):
        with pytest.raises(ValueError, match="drift must be 0 to 100"):
            plan_experts([[1.0]], alike(2, 1), drift=drift)
    with pytest.raises(ValueError, match="two racks"):
        Cluster(
            speeds=(1.0, 1.0),
            slots=(1, 1),
            failure_probability=(0.0, 0.0),
            nodes=(0, 0),
            racks=(0, 1),
        )
    with pytest.raises(ValueError, match="negative"):
        Prices(step_s=-1.0)
    with pytest.raises(ValueError, match="racks"):
        Floors(nodes=1, racks=2)
