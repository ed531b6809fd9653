"""DeepSeek's expert load balancer (EPLB), from its published description: baseline. Pure.

Equal shares over the replicas of an expert; replicas where load per replica is highest, then
largest first onto the lightest device with a slot left. It knows no speeds, no survival and no
present placement, and may put two replicas of an expert on one device.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]
Slots = npt.NDArray[np.intp]  # [layers, replicas]: expert in each slot, device by device


def rebalance(
    loads: Loads, *, num_replicas: int, num_groups: int, num_nodes: int, num_devices: int
) -> Slots:
    """The expert in each of `num_replicas` slots of every layer. loads [layers, experts] in rows.

    Slot i lies on device i // (num_replicas / num_devices); devices count node by node. Where the
    groups of experts divide over the nodes each group stays in one node (hierarchical policy),
    otherwise replicas go anywhere (global policy). Raises ValueError where numbers do not divide.
    """
    num_layers, num_experts = loads.shape
    if num_replicas % num_devices or num_devices % num_nodes or num_experts % num_groups:
        raise ValueError(
            f"{num_replicas} replicas, {num_devices} devices, {num_nodes} nodes and {num_groups}"
            f" groups of {num_experts} experts: each must divide the one before"
        )
    if num_replicas < num_experts:
        raise ValueError(f"{num_replicas} slots can not hold {num_experts} experts")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    group_size, per_node = num_experts // num_groups, num_experts // num_nodes
    num_groups_per_node = num_groups // num_nodes
    by_layer = []
    for layer in range(num_layers):
        groups = loads[layer].reshape(num_groups, group_size)
        slots: list[int] = []
        for members in _pack(groups.sum(axis=1), num_nodes):
            assert len(members) == num_groups_per_node
            experts = np.array([g * group_size + i for g in members for i in range(group_size)])
            assert len(experts) == per_node
            slots += _fill_node(
                loads[layer][experts], experts, num_replicas // num_nodes, num_devices // num_nodes
            )
        by_layer.append(slots)
    return np.array(by_layer, dtype=np.intp)


def _fill_node(loads: Loads, experts: Slots, num_slots: int, num_devices: int) -> list[int]:
    """The expert in each slot of one node, device by device."""
    counts = np.ones(len(experts), dtype=np.intp)
    replicas = list(range(len(experts)))
    for _ in range(num_slots - len(experts)):
        busiest = int((loads / counts).argmax())
        counts[busiest] += 1
        replicas.append(busiest)
    packs = _pack((loads / counts)[replicas], num_devices)
    return [int(experts[replicas[i]]) for pack in packs for i in pack]


def _pack(weights: Loads, num_packs: int) -> list[list[int]]:
    """Equally many things into each pack: the heaviest first, into the lightest not yet full."""
    size = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    heights = [0.0] * num_packs
    for thing in np.argsort(-weights, kind="stable").tolist():
        at = min((p for p in range(num_packs) if len(packs[p]) < size), key=heights.__getitem__)
        packs[at].append(thing)
        heights[at] += float(weights[thing])
    return packs


def hosts_of(slots: Sequence[int], num_devices: int, num_experts: int) -> list[list[int]]:
    """The devices that hold each expert of one layer, ascending, each once."""
    per_device = len(slots) // num_devices
    hosts: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(slots):
        device = slot // per_device
        if device not in hosts[expert][-1:]:
            hosts[expert].append(device)
    return hosts


def device_loads(slots: Sequence[int], loads: Loads, num_devices: int) -> Loads:
    """[devices] rows with equal shares over replicas. loads [experts]."""
    held = np.array(slots, dtype=np.intp)
    rows: Loads = (loads / np.bincount(held, minlength=len(loads)))[held]
    at_device: Loads = rows.reshape(num_devices, -1).sum(axis=1)
    return at_device
