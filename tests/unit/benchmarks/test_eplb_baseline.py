"""EPLB's rules on cases worked out by hand."""

import numpy as np
import pytest
from benchmarks.eplb import device_loads, hosts_of, rebalance
from hypothesis import given
from hypothesis import strategies as st


def test_the_hottest_experts_get_the_spare_slots() -> None:
    loads = np.array([[9.0, 1.0, 5.0, 2.0]])
    slots = rebalance(loads, num_replicas=6, num_groups=1, num_nodes=1, num_devices=3)
    # 9 -> 2 x 4.5, then 5 -> 2 x 2.5; the largest replica to the lightest device with room.
    counts = np.bincount(slots[0], minlength=4)
    assert counts.tolist() == [2, 1, 2, 1]
    assert device_loads(slots[0].tolist(), loads[0], 3).tolist() == [6.5, 5.5, 5.0]


def test_groups_stay_in_their_node_where_they_divide_over_nodes() -> None:
    loads = np.array([[5.0, 5.0, 1.0, 1.0, 4.0, 4.0, 2.0, 2.0]])
    slots = rebalance(loads, num_replicas=12, num_groups=4, num_nodes=2, num_devices=4)
    first, second = set(slots[0][:6].tolist()), set(slots[0][6:].tolist())
    assert first == {0, 1, 2, 3} and second == {4, 5, 6, 7}  # 10 + 2 and 8 + 4


def test_otherwise_replicas_go_anywhere() -> None:
    loads = np.array([[8.0, 1.0, 1.0]])
    slots = rebalance(loads, num_replicas=4, num_groups=3, num_nodes=2, num_devices=2)
    assert sorted(hosts_of(slots[0].tolist(), 2, 3)[0]) == [0, 1]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_every_expert_is_held_and_rows_are_kept(
    num_nodes: int, per_node: int, layers: int, data: st.DataObject
) -> None:
    num_devices = num_nodes * per_node
    num_experts = data.draw(st.integers(1, 3 * num_devices))
    per_device = data.draw(st.integers(-(-num_experts // num_devices), 5))
    rows = st.lists(st.floats(0.0, 100.0), min_size=num_experts, max_size=num_experts)
    loads = np.array([data.draw(rows) for _ in range(layers)])
    slots = rebalance(
        loads,
        num_replicas=num_devices * per_device,
        num_groups=num_experts,
        num_nodes=num_nodes,
        num_devices=num_devices,
    )
    for layer in range(layers):
        assert set(slots[layer].tolist()) == set(range(num_experts))
        assert all(hosts_of(slots[layer].tolist(), num_devices, num_experts))
        at = device_loads(slots[layer].tolist(), loads[layer], num_devices)
        assert at.sum() == pytest.approx(loads[layer].sum())


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        rebalance(np.ones((1, 4)), num_replicas=5, num_groups=1, num_nodes=1, num_devices=2)
    with pytest.raises(ValueError, match="can not hold"):
        rebalance(np.ones((1, 4)), num_replicas=2, num_groups=1, num_nodes=1, num_devices=2)
