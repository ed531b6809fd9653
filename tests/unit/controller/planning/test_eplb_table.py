"""Shares and plans for replicas one can check by hand."""

from dataclasses import replace

import pytest

from pacekeeper.controller.planning.experts.certificate import lower_bound
from pacekeeper.controller.planning.token_split import proportional as shares_module
from pacekeeper.controller.planning.token_split.linear_program import batch_rows, best_value
from pacekeeper.controller.planning.token_split.proportional import SLACK, token_shares
from pacekeeper.controller.policy.replica_candidates import plan_replicas
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from support.placements import hosts_after as layers_after
from support.placements import placement_request, planned


def shares(split_hosts: tuple[tuple[ExpertReplica, ...], ...]) -> list[dict[int, float]]:
    return [{host.rank: round(host.share, 3) for host in on} for on in split_hosts]


def layout_of(hosts: list[list[int]], ranks: int) -> Layout:
    base = even_layout(ranks=range(ranks), num_layers=1, num_experts=len(hosts), replicas=1)
    on = tuple(tuple(ExpertReplica(rank, 1 / len(at)) for rank in at) for at in hosts)
    return replace(base, experts=(on,))


def hosts_after(
    hosts: list[list[int]],
    *,
    loads: list[float],
    speeds: list[float],
    slots: int,
    min_hosts: int = 1,
    move_s: float = 0.1,
) -> list[list[int]]:
    layout, at = layout_of(hosts, len(speeds)), dict(enumerate(speeds))
    (layer,) = layers_after((layout, [loads], at, slots), min_hosts, move_s=move_s)
    return layer


def test_a_shared_expert_is_split_by_speed() -> None:
    split = token_shares([300.0], [[0, 1]], {0: 1.0, 1: 0.5})
    assert shares(split.replicas) == [{0: 0.667, 1: 0.333}]
    assert split.value == pytest.approx(split.bound.fluid) == pytest.approx(200.0)


def test_a_lone_expert_is_the_witness() -> None:
    # Expert 0 (30) lives on rank 0 only; the others share 10 on ranks 1 and 2.
    found = best_value([30.0, 10.0], [[0], [1, 2]], {0: 1.0, 1: 1.0, 2: 1.0})
    assert found.value == pytest.approx(30.0)
    assert found.bottleneck == (0,)
    assert found.fluid == pytest.approx(40.0 / 3)


def test_no_load_is_split_by_speed_and_costs_nothing() -> None:
    split = token_shares([0.0], [[3, 5]], {3: 1.0, 5: 3.0})
    assert shares(split.replicas) == [{3: 0.25, 5: 0.75}]
    assert (split.value, split.bound.bottleneck) == (0.0, ())


def test_all_experts_give_way_a_little_rather_than_one_of_them_wholly() -> None:
    split = token_shares([100.0] * 4, [[0, 1]] * 4, {0: 1.0, 1: 0.5})
    assert shares(split.replicas) == [{0: 0.667, 1: 0.333}] * 4


def test_shares_keep_their_word_even_where_the_search_is_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares_module, "MAX_ROUNDS", 1)
    loads, hosts = [90.0, 5.0, 40.0, 20.0], [[0, 1], [1, 2], [0, 2], [2]]
    split = token_shares(loads, hosts, {0: 1.0, 1: 0.3, 2: 0.8})
    assert split.value <= split.bound.value * (1 + SLACK + 1e-9)


@pytest.mark.parametrize(
    ("loads", "hosts", "speeds", "message"),
    [
        ([1.0], [[0], [0]], {0: 1.0}, "1 loads for 2 experts"),
        ([-1.0], [[0]], {0: 1.0}, "not negative"),
        ([float("nan")], [[0]], {0: 1.0}, "finite"),
        ([1.0], [[]], {0: 1.0}, "expert 0"),
        ([1.0], [[0, 0]], {0: 1.0}, "expert 0"),
        ([1.0], [[1]], {0: 1.0}, "expert 0"),
        ([1.0], [[0]], {0: 0.0}, "above 0"),
        ([], [], {}, "above 0"),
    ],
)
def test_impossible_input_is_refused(
    loads: list[float], hosts: list[list[int]], speeds: dict[int, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        token_shares(loads, hosts, speeds)


@pytest.mark.parametrize(
    ("num_rows", "speeds", "rows"),
    [
        (32, [1.0, 1.0, 1.0, 1.0], [8, 8, 8, 8]),
        (32, [1.0, 1.0, 1.0, 0.625], [9, 9, 9, 5]),
        (3, [1.0, 1.0, 1.0, 1.0], [1, 1, 1, 0]),
        (32, [1.0, 0.01], [32, 0]),
        (0, [1.0], [0]),
    ],
)
def test_batch_rows(num_rows: int, speeds: list[float], rows: list[int]) -> None:
    assert list(batch_rows(num_rows, dict(enumerate(speeds))).values()) == rows


def test_batch_rows_need_a_rank() -> None:
    with pytest.raises(ValueError, match="speeds"):
        batch_rows(1, {})


def test_a_free_slot_takes_a_replica_of_the_stuck_expert() -> None:
    after = hosts_after([[0], [1]], loads=[30.0, 10.0], speeds=[1.0, 1.0], slots=2)
    assert after == [[0, 1], [1]]


def test_full_slots_swap_replicas() -> None:
    # Both hot experts sit on ranks 0 and 1; one of them changes places with a cold one.
    after = hosts_after(
        [[0, 1], [0, 1], [2, 3], [2, 3]],
        loads=[40.0, 40.0, 5.0, 5.0],
        speeds=[1.0] * 4,
        slots=2,
        min_hosts=2,
    )
    assert sorted(map(len, after)) == [2, 2, 2, 2]
    assert [sum(rank in on for on in after) for rank in range(4)] == [2, 2, 2, 2]
    hot = set(after[0]) | set(after[1])
    assert hot == {0, 1, 2, 3}


def test_a_spare_replica_gives_up_its_slot_but_never_below_the_fewest_hosts() -> None:
    hosts, loads = [[0], [1, 2], [1, 2]], [60.0, 3.0, 3.0]
    given = hosts_after(hosts, loads=loads, speeds=[1.0] * 3, slots=2, min_hosts=1)
    assert len(given[0]) == 3
    assert all(on for on in given)
    kept = hosts_after(hosts, loads=loads, speeds=[1.0] * 3, slots=2, min_hosts=2)
    assert all(len(on) >= 2 for on in kept[1:])


def test_no_expert_gives_up_its_last_host() -> None:
    hosts, loads = [[0], [1, 2], [3, 4]], [60.0, 0.1, 10.0]
    given = hosts_after(hosts, loads=loads, speeds=[1.0] * 5, slots=1)
    assert given == [[0, 1, 3], [2], [4]]


def test_a_layer_at_its_fluid_bound_is_left_alone() -> None:
    hosts = [[0, 1], [1, 2], [0, 2]]
    assert hosts_after(hosts, loads=[10.0] * 3, speeds=[1.0] * 3, slots=3) == hosts


@pytest.mark.parametrize(
    ("loads", "speeds", "num_slots", "min_hosts", "expected"),
    [
        ([30.0, 10.0], [1.0, 1.0], 4, 1, 20.0),  # slots to spare: the fluid
        ([100.0, 10.0, 10.0, 10.0], [1.0] * 4, 8, 2, 50.0),  # two hosts each, and no more
        ([100.0, 10.0, 10.0, 10.0], [1.0] * 4, 8, 1, 32.5),
        ([100.0, 10.0], [1.0, 1.0, 0.5], 3, 1, 50.0),  # the two fastest for the hot one
        ([0.0, 0.0], [1.0], 2, 1, 0.0),
    ],
)
def test_what_no_hosts_can_beat(
    loads: list[float], speeds: list[float], num_slots: int, min_hosts: int, expected: float
) -> None:
    floor = [min_hosts] * len(loads)
    at = dict(enumerate(speeds))
    found = lower_bound(loads, at, num_slots=num_slots, min_hosts=floor)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("spare", [0, 1, 2])
@pytest.mark.parametrize("slowest", [1.0, 0.6])
@pytest.mark.parametrize(("ranks", "experts", "replicas"), [(8, 64, 2), (16, 64, 2), (32, 32, 2)])
def test_hot_experts_end_near_what_the_slots_allow(
    ranks: int, experts: int, replicas: int, slowest: float, spare: int
) -> None:
    layout = even_layout(ranks=range(ranks), num_layers=1, num_experts=experts, replicas=replicas)
    # Zipf 0.8, the hot experts all over the ranks.
    loads = [1000.0 * (1 + 37 * e % experts) ** -0.8 for e in range(experts)]
    speeds = {rank: 1.0 for rank in range(ranks)} | {3: slowest}
    slots = experts * replicas // ranks + spare
    (split,), plan = planned((layout, [loads], speeds, slots), 2)
    hosts = plan.experts[0] if plan else split.replicas
    floor = [2] * experts
    least = lower_bound(loads, speeds, num_slots=slots * ranks, min_hosts=floor)
    at = dict.fromkeys(speeds, 0.0)
    for on, load in zip(hosts, loads, strict=True):
        for host in on:
            at[host.rank] += host.share * load / speeds[host.rank]
    assert max(at.values()) <= 1.03 * least


def test_a_wrong_question_is_told_and_too_small_a_budget_is_no_error() -> None:
    layout, speeds, asked = (
        layout_of([[0], [1]], ranks=2),
        {0: 1.0, 1: 1.0},
        placement_request(2, 1),
    )
    splits, plan = planned((layout, [[30.0, 10.0]], speeds, 2), 2, max_copies=0)
    assert plan is None
    with pytest.raises(ValueError, match="finite"):
        plan_replicas(layout, splits, [[30.0, float("nan")]], speeds, asked)
    with pytest.raises(ValueError, match="1 layers x 3 experts"):
        plan_replicas(layout, splits, [[30.0, 10.0, 5.0]], speeds, asked)


def test_a_replica_is_copied_only_where_that_pays() -> None:
    for move_s, num_hosts in ((9.0, 2), (11.0, 1)):  # the value falls by 10
        after = hosts_after(
            [[0], [1]], loads=[30.0, 10.0], speeds=[1.0] * 2, slots=2, move_s=move_s
        )
        assert len(after[0]) == num_hosts
