"""EPLB's `rebalance_experts` on top of the joint planner, and EPLB's tables of any placement.

Same tables as DeepSeek's EPLB; speeds, minimum spread and the present table may be given as well.
Public API for serving and training systems; `pacekeeper plan` writes the tables to files.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.planner import PresentPlacement, plan_experts
from pacekeeper.controller.planning.experts.problem import Floors, alike

EMPTY = -1  # in the second table: no further replica

Counts = npt.NDArray[np.intp]


class Tables(NamedTuple):
    """EPLB's tables. Slot i of a layer lies on device i // (slots / devices)."""

    phy2log: Counts  # the expert of each slot, [layers, slots]
    log2phy: (
        Counts  # the slots of each expert, ascending, [layers, experts, most replicas]; -1: none
    )
    logcnt: Counts  # replicas, [layers, experts]


def rebalance_experts(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    speeds: Sequence[float] | None = None,
    min_hosts: int = 1,
    current: Any = None,
) -> tuple[Any, Any, Any]:
    """Place expert replicas and return EPLB's three tables.

    Slot i lies on device i // (num_replicas / num_gpus); devices are numbered node by node. No
    device gets an expert twice while it lacks another. The planned balance needs unequal token
    shares: `planner.plan_experts` returns them, `min_max_split` finds them for given tables.

    Args:
        weight: load of each expert, [layers, experts]; a tensor or anything numpy accepts.
        num_replicas: physical slots of one layer; a multiple of `num_gpus`.
        num_groups: must divide the experts; otherwise unused, replicas may go anywhere.
        num_nodes: must divide `num_gpus`.
        num_gpus: devices.
        speeds: relative speed of each device, [num_gpus]; default 1.0.
        min_hosts: distinct nodes of every expert (devices, if there are fewer nodes).
        current: the present first table; replicas that stay keep their slot.

    Returns:
        Physical-to-logical [layers, num_replicas]; logical-to-physical [layers, experts, most
        replicas] padded with -1; number of replicas [layers, experts]. Tensors if `weight` is one.

    Raises:
        ValueError: numbers do not divide, slots do not suffice, or shapes differ.
    """
    loads = _as_array(weight).astype(np.float64)
    if loads.ndim != 2 or 0 in loads.shape:
        raise ValueError(f"weight must be layers x experts, got shape {loads.shape}")
    num_layers, num_experts = loads.shape
    if min(num_replicas, num_groups, num_nodes, num_gpus) < 1:
        raise ValueError("replicas, groups, nodes and devices must be at least one each")
    if num_replicas % num_gpus or num_gpus % num_nodes or num_experts % num_groups:
        raise ValueError(
            f"{num_replicas} replicas, {num_gpus} devices and {num_nodes} nodes: each must divide"
            f" the one before; {num_groups} groups must divide {num_experts} experts"
        )
    if speeds is not None and len(speeds) != num_gpus:
        raise ValueError(f"{len(speeds)} speeds for {num_gpus} devices")
    slots = num_replicas // num_gpus
    per_node = num_gpus // num_nodes if min_hosts <= num_nodes else 1
    shape = (num_layers, num_replicas)
    present = None if current is None else _checked_table(current, shape, num_experts)
    plan = plan_experts(
        loads,
        alike(
            num_gpus,
            slots,
            ranks_per_node=per_node,
            speeds=None if speeds is None else tuple(float(speed) for speed in speeds),
        ),
        floors=Floors(nodes=min_hosts),
        present=None
        if present is None
        else PresentPlacement(replicas_of(present, num_gpus, num_experts)),
    )
    on = [[[each.rank for each in expert] for expert in layer] for layer in plan.replicas]
    tables = tables_of(on, num_gpus, slots, loads=loads, present=present)
    return tuple(_like(weight, table) for table in tables)


def tables_of(
    replicas: Sequence[Sequence[Sequence[int]]],
    num_devices: int,
    slots: int,
    *,
    loads: npt.NDArray[np.float64] | None = None,
    present: Counts | None = None,
) -> Tables:
    """Return EPLB's tables of a placement; free slots get further replicas.

    Args:
        replicas: devices that hold each expert, [layers, experts, replicas].
        num_devices: devices.
        slots: of each device and layer.
        loads: of each expert, [layers, experts]: where free slots go; default: all equal.
        present: the first table in use; replicas that stay keep their slot.

    Raises:
        ValueError: a device holds more experts of a layer than it has slots.
    """
    physical = np.empty((len(replicas), num_devices * slots), dtype=np.intp)
    for layer, experts in enumerate(replicas):
        held: list[list[int]] = [[] for _ in range(num_devices)]
        for expert, on in enumerate(experts):
            for device in on:
                held[device].append(expert)
        most = max(map(len, held))
        if most > slots:
            raise ValueError(f"layer {layer}: a device holds {most} experts in {slots} slots")
        weights = np.ones(len(experts)) if loads is None else loads[layer]
        _fill(held, weights, [len(on) for on in experts], slots)
        for device, mine in enumerate(held):
            here = slice(device * slots, (device + 1) * slots)
            before = [] if present is None else present[layer, here].tolist()
            physical[layer, here] = _in_place(mine, before)
    return Tables(physical, *_inverted(physical, len(replicas[0])))


def _checked_table(current: Any, shape: tuple[int, int], num_experts: int) -> Counts:
    """The present table as integers. Raises ValueError for another shape or unknown experts."""
    table = _as_array(current)
    if table.shape != shape:
        raise ValueError(f"current must be {shape[0]} x {shape[1]}, got {table.shape}")
    if table.dtype.kind not in "iu":
        raise ValueError(f"current must hold whole numbers, got {table.dtype}")
    if not ((table >= 0) & (table < num_experts)).all():
        raise ValueError(f"current must name experts 0 to {num_experts - 1}")
    return table


def _fill(
    held: list[list[int]], loads: npt.NDArray[np.float64], number: list[int], slots: int
) -> None:
    """Free slots get the expert with most load per replica that the device lacks."""
    for mine in held:
        while len(mine) < slots:
            lacking = sorted(set(range(len(loads))) - set(mine)) or range(len(loads))
            chosen = max(lacking, key=lambda expert: (loads[expert] / number[expert], -expert))
            mine.append(chosen)
            number[chosen] += 1


def _in_place(mine: Sequence[int], before: Sequence[int]) -> list[int]:
    """One device's experts, those that were there before in the same slots."""
    left = list(mine)
    slots: list[int | None] = [None] * len(mine)
    for slot, expert in enumerate(before):
        if expert in left:
            slots[slot] = expert
            left.remove(expert)
    rest = iter(left)
    return [next(rest) if expert is None else expert for expert in slots]


def replicas_of(tables: Counts, num_devices: int, num_experts: int) -> list[list[list[int]]]:
    """Return the devices that hold each expert, [layers, experts, replicas], by a first table."""
    slots = tables.shape[1] // num_devices
    replicas: list[list[list[int]]] = [[[] for _ in range(num_experts)] for _ in tables]
    for layer, row in enumerate(tables.tolist()):
        for slot, expert in enumerate(row):
            if slot // slots not in replicas[layer][expert]:
                replicas[layer][expert].append(slot // slots)
    return replicas


def _inverted(tables: Counts, num_experts: int) -> tuple[Counts, Counts]:
    number = np.array([np.bincount(row, minlength=num_experts) for row in tables])
    logical = np.full((*number.shape, int(number.max())), EMPTY, dtype=np.intp)
    for layer, row in enumerate(tables):
        for expert in range(num_experts):
            found = (row == expert).nonzero()[0]
            logical[layer, expert, : len(found)] = found
    return logical, number


def _as_array(values: Any) -> npt.NDArray[Any]:
    """Convert a tensor (through its methods, torch is not imported) or array-like to numpy."""
    if hasattr(values, "detach"):
        return np.array(values.detach().cpu().tolist())
    return np.array(values)


def _like(weight: Any, table: Counts) -> Any:
    if hasattr(weight, "detach"):
        return weight.new_zeros(1).long().new_tensor(table.tolist())  # whole numbers stay whole
    return table
