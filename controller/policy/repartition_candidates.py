"""Candidates with other tensor shards, other layers per stage, or a rank left out. Pure.

Pipelines that share experts have equal cuts and equal numbers of micro-batches; those of a dense
model may differ in both (`check_live_layout`). The partition planner's result becomes
a layout with a placement of experts. Called by `candidates.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pacekeeper.controller.planning.experts.problem import Floors, Prices
from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.planning.partition.incremental import with_other_shards
from pacekeeper.controller.planning.partition.joint import (
    JointPlan,
    PlacementRequest,
    plan_jointly,
)
from pacekeeper.controller.planning.partition.layout_codec import layout_of
from pacekeeper.controller.policy.failure_domains import SpreadFloor
from pacekeeper.controller.policy.failure_rates import failure_probability
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.layout import BlockKind, Layout, ReplicaSet
from pacekeeper.core.layout.replica_spread import number_domains
from pacekeeper.core.layout.state_owners import assign_state_owners

MAX_GROUPS_SHOWN = 3  # in a reason

Experts = tuple[tuple[ReplicaSet, ...], ...]
Speeds = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout to be priced, with a text about what is proven of it."""

    level: MitigationLevel
    layout: Layout
    proof: str = ""


def repartitions(
    view: PlanningSnapshot,
    problem: PartitionProblem,
    config: PolicyConfig,
    replicas: Sequence[Experts],
    speeds: Speeds,
    floor: SpreadFloor,
) -> list[Candidate]:
    """Return candidates that change the partition, cheapest first.

    Args:
        view: The inputs of the decision.
        problem: The partition problem of the job.
        config: The policy's settings.
        replicas: Placements of experts; each gives one candidate with other tensor shards.
        speeds: The speeds of the slow ranks, as a layout holds them.
        floor: Over how many nodes and racks experts must be spread.
    """
    found = []
    shards = with_other_shards(problem.now, problem)
    if shards is not None and _is_other(shards, problem):
        for experts in replicas:
            layout = _layout(view, shards, experts, speeds)
            found.append(_candidate(MitigationLevel.TENSOR_SHARDS, layout, view.layout))
    request = _placement_request(view, config, problem, floor)
    whole = _plan_jointly(replace(problem, is_whole=True), request)
    if whole is not None and _places(whole.plan.partition) != _places(problem.now):
        found.append(_of_joint(MitigationLevel.MOVE_LAYERS, whole, view, speeds))
    if config.may_leave_out:
        fewer = _plan_jointly(problem, request)
        if fewer is not None and fewer.plan.standby:
            found.append(_of_joint(MitigationLevel.LEAVE_OUT, fewer, view, speeds))
    return found


def difference(new: Layout, old: Layout) -> str:
    """Describe the schedule, rows by stage, and the layers and shards that move; empty: none."""
    words = [] if new.schedule is old.schedule else [f"schedule {old.schedule} -> {new.schedule}"]
    if new.stage_shares != old.stage_shares:
        words.append("other rows at each stage" if new.stage_shares else "rows stay in a pipeline")
    counts = ["+".join(str(len(span)) for span in layout.spans) for layout in (old, new)]
    if counts[0] != counts[1]:
        words.append(f"layers of the stages {counts[0]} -> {counts[1]}")
    before = {run.rank: run for stages in old.mesh for stage in stages for run in stage.attention}
    changed = []
    for span in new.spans:
        for stage in new.stages_of_layer(span.start):
            known = [before[run.rank] for run in stage.attention if run.rank in before]
            if known != list(stage.attention):
                sizes = [
                    "+".join(str(run.end - run.first) for run in runs)
                    for runs in (known, stage.attention)
                ]
                names = ", ".join(map(str, stage.group))
                changed.append(f"shards {sizes[0]} -> {sizes[1]} on ranks {names}")
    words += changed[:MAX_GROUPS_SHOWN]
    if len(changed) > MAX_GROUPS_SHOWN:
        words.append(f"and of {len(changed) - MAX_GROUPS_SHOWN} more groups")
    for what, ranks in (
        ("become standby", set(new.standing_by) - set(old.standing_by)),
        ("work again", set(old.standing_by) - set(new.standing_by)),
    ):
        if ranks:
            words.append(f"ranks {format_ranks(ranks)} {what}")
    return "; ".join(words)


def _candidate(level: MitigationLevel, layout: Layout, old: Layout) -> Candidate:
    words = difference(layout, old)
    return Candidate(level=level, layout=layout, proof=f"; {words}" if words else "")


def _of_joint(
    level: MitigationLevel, joint: JointPlan, view: PlanningSnapshot, speeds: Speeds
) -> Candidate:
    layout = _layout(view, joint.plan.partition, joint.experts, speeds)
    found = _candidate(level, layout, view.layout)
    idle = set(layout.standing_by) - set(view.layout.standing_by) - view.slow.keys()
    if not (rested := idle & view.doubted):
        return found
    why = f", {format_ranks(rested)} first: on nodes that were slow repeatedly"
    return replace(found, proof=found.proof + why)


def _layout(
    view: PlanningSnapshot, partition: Partition, experts: Experts, speeds: Speeds
) -> Layout:
    """Return the next layout; ranks without a part in the partition become standby ranks."""
    layout = layout_of(
        partition,
        experts,
        generation=view.next_generation,
        shared_mlp_layers=view.layout.shared_mlp_layers,
        speeds=speeds,
        standing_by=tuple(sorted(set(view.layout.ranks) - set(partition.ranks))),
    )
    if not view.layout.state_owners:
        return layout
    shape = view.shape
    size_of = {
        BlockKind.EMBEDDING: shape.embedding_bytes,
        BlockKind.HEAD: shape.head_bytes,
        BlockKind.ATTENTION: shape.attention_bytes,
    }
    sizes = {}
    for block in layout.owned_blocks():
        mlp = shape.shared_mlp_bytes if layout.experts[block.layer] else shape.mlp_bytes
        sizes[block] = max(size_of.get(block.kind, mlp), 1)
    return assign_state_owners(layout, before=view.layout, sizes=sizes, domain_of=view.node_of)


def _plan_jointly(problem: PartitionProblem, request: PlacementRequest) -> JointPlan | None:
    try:
        return plan_jointly(problem, request)
    except ValueError:
        return None  # no partition that is allowed, or no room for its experts


def _placement_request(
    view: PlanningSnapshot, config: PolicyConfig, problem: PartitionProblem, floor: SpreadFloor
) -> PlacementRequest:
    """Return the request for expert replicas, as in `replica_candidates.py` for fixed stages."""
    expert_s = sum(time.expert_s for time in view.work.values())
    whole = sum(device.speed for device in problem.devices)
    rack = number_domains(floor.rack_of, view.layout.ranks) if floor.rack_of else {}
    racks = min(floor.least_racks, max(1, len(set(rack.values()))))
    return PlacementRequest(
        loads=tuple(
            tuple(loads) if experts else ()
            for loads, experts in zip(view.workload.loads, view.layout.experts, strict=True)
        ),
        slots_per_rank=max(1, view.shape.slots_per_rank),
        floors=Floors(
            ranks=config.min_hosts, nodes=max(floor.least, racks), racks=racks, is_strict=False
        ),
        prices=Prices(
            step_s=expert_s / whole,
            num_steps=config.horizon_steps,
            restart_s=config.restart_s,
            move_s=view.shape.expert_bytes / problem.prices.bytes_per_s,
        ),
        failure_probability=failure_probability(config.failure_probability, view.history.losses),
        rack_of={device.node: rack[device.rank] for device in problem.devices} if rack else {},
        rack_failure_probability=config.rack_failure_probability,
        present=tuple(
            tuple(tuple(replica.rank for replica in on) for on in experts)
            for experts in view.layout.experts
        ),
    )


def _is_other(shards: Partition, problem: PartitionProblem) -> bool:
    """Whether the partition is allowed and changes a shard."""
    try:
        check_partition(shards, problem)
    except ValueError:
        return False
    cells = [[pipeline.cells for pipeline in one.pipelines] for one in (shards, problem.now)]
    return cells[0] != cells[1]


def _places(partition: Partition) -> object:
    """Return the layers and ranks of each stage, without shards and rows; and the schedule."""
    return partition.schedule, {
        tuple((cell.first_layer, cell.end_layer, cell.ranks) for cell in pipeline.cells)
        for pipeline in partition.pipelines
    }
