"""Joint plan of a partition and its expert placement.

The placement determines how unevenly ranks compute experts, which prices the partition; the
partition determines which ranks share experts. Both are planned in turns until the unevenness
converges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose

from pacekeeper.controller.planning.experts.planner import (
    ExpertPlan,
    PresentPlacement,
    plan_experts,
)
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices
from pacekeeper.controller.planning.model.partition import Partition, PartitionPlan
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.layout import ExpertReplica, ReplicaSet
from pacekeeper.core.text import format_s

MAX_TURNS = 3
SETTLED = 1e-3  # of unevenness, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Expert placement that the joint planner is asked for.

    Attributes:
        loads: [layers][experts] rows; a dense layer has no experts.
        slots_per_rank: of each layer.
        floors: spread of every expert.
        prices: of waiting, losses and copies.
        failure_probability: of each rank.
        rack_of: rack of each node; empty: unknown.
        rack_failure_probability: of each rack as a whole.
        present: [layers][experts] replica ranks; None: no replicas yet.
    """

    loads: tuple[tuple[float, ...], ...]
    slots_per_rank: int
    floors: Floors
    prices: Prices
    failure_probability: float = 0.01
    rack_of: Mapping[int, int] = field(default_factory=dict)
    rack_failure_probability: float = 0.0
    present: tuple[tuple[tuple[int, ...], ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """experts[layer][expert]: the replicas, whose shares add up to 1 over all expert groups.

    unevenness: of the fullest stage, as in `Problem`; num_copied: replicas that have to be copied.
    """

    plan: PartitionPlan
    experts: tuple[tuple[ReplicaSet, ...], ...]
    unevenness: float
    num_copied: int


def plan_jointly(problem: PartitionProblem, request: PlacementRequest) -> JointPlan:
    """Plan partition and expert placement in turns.

    Args:
        problem: the partition problem; its `unevenness` is the first guess.
        request: the expert placement.

    Returns:
        The turn with the shortest step; the fluid limit is that of evenly spread experts.

    Raises:
        ValueError: either plan is impossible, or `loads` has other layers than the model.
    """
    if len(request.loads) != len(problem.model.layers):
        raise ValueError(f"loads of {len(request.loads)} layers, the model has others")
    fluid_s = 0.0
    best: JointPlan | None = None
    unevenness = problem.unevenness
    for turn in range(MAX_TURNS):
        plan = plan_partition(replace(problem, unevenness=unevenness))
        if turn == 0:
            fluid_s = plan.fluid_s
        found = _placed(replace(plan, fluid_s=fluid_s), problem, request)
        if best is None or found.plan.step_s < best.plan.step_s:
            best = found
        if isclose(found.unevenness, unevenness, rel_tol=SETTLED):
            break
        unevenness = found.unevenness
    assert best is not None
    return best


def _placed(plan: PartitionPlan, problem: PartitionProblem, request: PlacementRequest) -> JointPlan:
    """Experts of each stage on the ranks of each expert group, in proportion to its rows."""
    on: list[list[list[ExpertReplica]]] = [[[] for _ in of_layer] for of_layer in request.loads]
    unevenness, num_copied = 1.0, 0
    for (group, stage), ranks in plan.partition.expert_groups().items():
        share = _share(plan.partition, group)
        first, end = _layers(plan.partition, group, stage)
        layers = [layer for layer in range(first, end) if request.loads[layer]]
        if not layers:
            continue
        value = fluid = 0.0
        for alike in _alike(layers, ranks, request):
            found = _replicas(alike, ranks, share, problem, request)
            num_copied += found.proof.num_copied
            value += sum(proof.value for proof in found.proof.layers)
            fluid += sum(proof.fluid for proof in found.proof.layers)
            for layer, experts in zip(alike, found.replicas, strict=True):
                for expert, replicas in enumerate(experts):
                    on[layer][expert] += [
                        ExpertReplica(ranks[h.rank], h.share * share) for h in replicas
                    ]
        unevenness = max(unevenness, value / fluid if fluid > 0.0 else 1.0)
    step_s = price(plan.partition, replace(problem, unevenness=unevenness)).step_s
    said = f"{plan.reason}; with its experts {format_s(step_s)}, unevenness {unevenness:.3f}"
    return JointPlan(
        plan=replace(plan, step_s=step_s, reason=said),
        experts=tuple(tuple(tuple(sorted(replicas)) for replicas in of_layer) for of_layer in on),
        unevenness=unevenness,
        num_copied=num_copied,
    )


def _alike(
    layers: Sequence[int], ranks: Sequence[int], request: PlacementRequest
) -> list[tuple[int, ...]]:
    """Layers that are planned together: with as many experts, all there or come from elsewhere."""
    found: dict[tuple[int, bool], list[int]] = {}
    for layer in layers:
        key = (len(request.loads[layer]), _is_here(layer, ranks, request))
        found.setdefault(key, []).append(layer)
    return [tuple(alike) for alike in found.values()]


def _is_here(layer: int, ranks: Sequence[int], request: PlacementRequest) -> bool:
    """Has every expert of the layer a replica among these ranks now?"""
    here = frozenset(ranks)
    return request.present is not None and all(
        not here.isdisjoint(on) for on in request.present[layer]
    )


def _reached(floors: Floors, cluster: Cluster, num_experts: int) -> Floors:
    """The floors; where they are no promise, what these ranks can reach of them at most."""
    if floors.is_strict:
        return floors
    room = sum(min(slots, num_experts) for slots in cluster.slots) // num_experts
    replicas = max(1, min(floors.replicas, cluster.num_ranks, room))
    nodes = min(floors.nodes, len(set(cluster.nodes)), replicas)
    racks = min(floors.racks, _width(cluster.racks, cluster, num_experts), nodes)
    return replace(floors, ranks=replicas, nodes=nodes, racks=racks)


def _width(labels: Sequence[int], cluster: Cluster, num_experts: int) -> int:
    """In how many of these domains every expert can stand, by their slots."""
    slots: dict[int, int] = {}
    for label, number in zip(labels, cluster.slots, strict=True):
        slots[label] = slots.get(label, 0) + number
    return max(1, sum(min(number, num_experts) for number in slots.values()) // num_experts)


def _replicas(
    layers: Sequence[int],
    ranks: Sequence[int],
    share: float,
    problem: PartitionProblem,
    request: PlacementRequest,
) -> ExpertPlan:
    devices = [problem.device_of[rank] for rank in ranks]
    at = {rank: position for position, rank in enumerate(ranks)}
    present = None
    if request.present is not None and _is_here(layers[0], ranks, request):
        present = [
            [[at[rank] for rank in on if rank in at] for on in request.present[layer]]
            for layer in layers
        ]
    nodes = tuple(device.node for device in devices)
    racks = tuple(request.rack_of[node] for node in nodes) if request.rack_of else nodes
    rack_failure = request.rack_failure_probability if request.rack_of else 0.0
    cluster = Cluster(
        speeds=tuple(device.speed for device in devices),
        slots=(request.slots_per_rank,) * len(devices),
        failure_probability=(request.failure_probability,) * len(devices),
        nodes=nodes,
        racks=racks,
        rack_failure=dict.fromkeys(racks, rack_failure) if rack_failure else {},
    )
    return plan_experts(
        [[share * rows for rows in request.loads[layer]] for layer in layers],
        cluster,
        floors=_reached(request.floors, cluster, len(request.loads[layers[0]])),
        prices=request.prices,
        present=None if present is None else PresentPlacement(present),
    )


def _share(partition: Partition, group: int) -> float:
    """An expert group's part of the rows."""
    rows = sum(p.rows for p in partition.pipelines if p.expert_group == group)
    return rows / partition.rows_per_step


def _layers(partition: Partition, group: int, stage: int) -> tuple[int, int]:
    cell = next(p for p in partition.pipelines if p.expert_group == group).cells[stage]
    return cell.first_layer, cell.end_layer
