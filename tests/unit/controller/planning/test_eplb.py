"""EPLB's function with our planner behind it: the same tables, and what it keeps beyond."""

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks import eplb

from pacekeeper.controller.planning.eplb import rebalance_experts
from pacekeeper.controller.planning.token_split.min_max import min_max_split

# The example of EPLB's description: 2 layers, 12 experts, 16 slots, 4 groups, 2 nodes, 8 devices.
WEIGHT = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def value_of(
    table: npt.NDArray[np.intp], weight: npt.NDArray[np.int_], speeds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """[layers] the best split over these tables, over the fluid limit."""
    num, num_experts = len(speeds), weight.shape[1]
    flags = np.zeros((*weight.shape, num), dtype=np.bool_)
    for layer, row in enumerate(table):
        for expert, on in enumerate(eplb.hosts_of(row.tolist(), num, num_experts)):
            flags[layer, expert, on] = True
    value = min_max_split(weight.astype(float), flags, speeds).value
    over: npt.NDArray[np.float64] = value / (weight.sum(axis=1) / speeds.sum())
    return over


def test_the_three_tables_agree_and_all_slots_are_filled() -> None:
    physical, logical, number = rebalance_experts(WEIGHT, 16, 4, 2, 8)
    assert physical.shape == (2, 16) and number.shape == (2, 12)
    assert logical.shape == (2, 12, number.max())
    for layer in range(2):
        assert np.bincount(physical[layer], minlength=12).tolist() == number[layer].tolist()
        for expert in range(12):
            slots = logical[layer, expert]
            assert (physical[layer, slots[: number[layer, expert]]] == expert).all()
            assert (slots[number[layer, expert] :] == -1).all()
    devices = physical.reshape(2, 8, 2)
    assert (devices[..., 0] != devices[..., 1]).all()


def test_it_is_more_even_than_eplb_also_with_a_slow_device() -> None:
    theirs = eplb.rebalance(
        WEIGHT.astype(float), num_replicas=16, num_groups=1, num_nodes=1, num_devices=8
    )
    for slow in (1.0, 0.5):
        speeds = np.array([1.0] * 7 + [slow])
        ours, _, _ = rebalance_experts(WEIGHT, 16, 1, 1, 8, speeds=speeds.tolist())
        assert value_of(ours, WEIGHT, speeds).max() <= value_of(theirs, WEIGHT, speeds).max()
        assert value_of(ours, WEIGHT, speeds).max() < 1.1


def test_every_expert_is_on_as_many_nodes_as_asked() -> None:
    physical, _, _ = rebalance_experts(WEIGHT, 32, 1, 4, 8, min_hosts=2)
    for row in physical:
        for expert in range(12):
            assert len(set((row == expert).nonzero()[0] // 8)) >= 2


def test_what_stays_keeps_its_slot() -> None:
    physical, _, _ = rebalance_experts(WEIGHT, 16, 1, 1, 8)
    again, _, _ = rebalance_experts(WEIGHT * 3, 16, 1, 1, 8, current=physical)
    assert (again == physical).all()


def test_slots_in_any_order_are_left_as_they_are() -> None:
    physical, _, _ = rebalance_experts(WEIGHT, 16, 1, 1, 8)
    turned = physical.reshape(2, 8, 2)[:, :, ::-1].reshape(2, 16)
    again, _, _ = rebalance_experts(WEIGHT, 16, 1, 1, 8, current=turned)
    assert (again == turned).all() and (again != physical).any()


def test_tensors_come_back_for_tensors() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.tensor(WEIGHT)
    tables = rebalance_experts(weight, 16, 4, 2, 8, current=None)
    for tensor, array in zip(tables, rebalance_experts(WEIGHT, 16, 4, 2, 8), strict=True):
        assert tensor.dtype == torch.int64
        assert (tensor.numpy() == array).all()
    again = rebalance_experts(weight, 16, 4, 2, 8, current=tables[0])
    assert torch.equal(again[0], tables[0])


def test_numbers_of_slots_survive_a_coarse_tensor() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(1, 600, dtype=torch.bfloat16)
    physical, _, _ = rebalance_experts(weight, 600, 1, 1, 2)
    assert sorted(physical[0].tolist()) == list(range(600))


def test_more_slots_than_experts_are_filled_with_second_replicas() -> None:
    physical, _, number = rebalance_experts([[3.0, 1.0]], 6, 1, 1, 2)
    assert physical.shape == (1, 6)
    assert number.sum() == 6 and number.min() >= 2


@pytest.mark.parametrize(
    ("arguments", "more", "says"),
    [
        ((WEIGHT, 15, 1, 1, 8), {}, "divide"),
        ((WEIGHT, 16, 5, 1, 8), {}, "divide"),
        ((WEIGHT, 16, 1, 3, 8), {}, "divide"),
        ((WEIGHT, 8, 1, 1, 8), {}, "do not fit"),
        ((WEIGHT[0], 16, 1, 1, 8), {}, "layers x experts"),
        ((WEIGHT, 16, 1, 1, 0), {}, "at least one"),
        ((WEIGHT, 16, 1, 1, 8), {"speeds": [1.0]}, "speeds"),
        ((WEIGHT, 16, 1, 1, 8), {"min_hosts": 2}, "do not fit"),
        ((WEIGHT, 16, 1, 1, 8), {"current": np.zeros((2, 3), dtype=int)}, "current"),
        ((WEIGHT, 16, 1, 1, 8), {"current": np.full((2, 16), 12)}, "current"),
        ((WEIGHT, 16, 1, 1, 8), {"current": np.zeros((2, 16))}, "whole numbers"),
    ],
)
def test_bad_numbers_are_refused(
    arguments: tuple[object, ...], more: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        rebalance_experts(*arguments, **more)  # type: ignore[arg-type]
