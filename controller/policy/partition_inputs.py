"""The partition planner's problem for a live job, from what its ranks measured and report. Pure.

Work per layer comes from the healthy times of ranks, sizes of blocks, activations, messages and
memory from the reported model shape, the speed of messages from transfers within steps, that of
moves from earlier plans. Messages that are not reported or not measured are part of the unexplained
time, which is the same for all compared layouts. Called by `pricing.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf

from pacekeeper.controller.mitigation.migration_costs import MoveCosts
from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import (
    SPEEDS,
    Device,
    LayerCost,
    Links,
    ModelCost,
    MovePrices,
    PartitionProblem,
)
from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.planning.partition.layout_codec import partition_of
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import number_domains
from pacekeeper.core.telemetry.attachment import Capability, ModelShape

BACKWARD_RATIO = 2.0  # of a forward pass; ranks report the sum of both


def problem_of(
    view: PlanningSnapshot, config: PolicyConfig, costs: MoveCosts, *, unevenness: float
) -> PartitionProblem:
    """Return the problem: present layout, baseline, and devices.

    Args:
        view: The inputs of the decision.
        config: The policy's settings.
        costs: The prices of moving state.
        unevenness: How much longer the experts' work takes than if it were spread evenly.

    Raises:
        ValueError: Times are not measured yet, a pipeline has fewer rows than micro-batches, or the
            schedule is unknown.
    """
    can_change = Capability.SCHEDULE in view.capabilities
    if not can_change and view.shape.schedule is None:
        raise ValueError(
            "the job runs a pipeline schedule that this version does not know; install the "
            "trainer's version of pacekeeper on its nodes and for the controller"
        )
    if view.work.keys() < set(view.layout.working):
        raise ValueError("the times of its stages are not measured yet")
    now = as_partition(view, view.layout)
    baseline = view.baseline
    speeds = view.speeds
    node = number_domains(view.node_of, view.layout.ranks)
    # A message of one byte is sent by one rank and received by another: half of what moves.
    messages = 0.5 / view.link_s_per_byte if view.link_s_per_byte > 0.0 else inf
    per_byte = costs.busiest_s_per_byte
    return PartitionProblem(
        model=_model_cost(view),
        devices=tuple(
            Device(
                rank=rank,
                node=node[rank],
                memory_bytes=_memory_bytes(view, config, rank),
                speed=max(speeds[rank], SPEEDS[0]),
                link_speed=max(1.0 / view.slow_links.get(rank, 1.0), SPEEDS[0]),
                is_doubted=rank in view.doubted,
            )
            for rank in view.layout.ranks
        ),
        links=Links(
            inside_bytes_per_s=messages,
            between_bytes_per_s=messages,
            inside_latency_s=0.0,
            between_latency_s=0.0,
        ),
        baseline=now
        if baseline is None or baseline.ranks != view.layout.ranks
        else as_partition(view, baseline),
        present=now,
        may_change_schedule=can_change,
        prices=MovePrices(
            num_steps=config.horizon_steps,
            pause_s=costs.pause_s,
            bytes_per_s=1.0 / per_byte if per_byte > 0.0 else inf,
        ),
        unevenness=unevenness,
        rows_per_microbatch=view.shape.rows_per_microbatch,
    )


def unreported(view: PlanningSnapshot, config: PolicyConfig) -> tuple[str, ...]:
    """Return what the job does not report, so that its layouts are priced without it."""
    shape = view.shape
    missing = {
        "sizes of blocks": not shape.attention_bytes,
        "activations": not (shape.activation_bytes or shape.whole_activation_bytes),
        "memory": not config.memory_bytes and view.memory_of.keys() < set(view.layout.ranks),
        "sizes of messages": not (shape.hidden_bytes and shape.tokens_per_row),
        "speed of links": not view.link_s_per_byte,
        "number of micro-batches": not shape.num_microbatches,
        "rows of a micro-batch": not shape.rows_per_microbatch,
    }
    return tuple(name for name, is_missing in missing.items() if is_missing)


def check_live_plan(layout: Layout, view: PlanningSnapshot, problem: PartitionProblem) -> None:
    """Reject a layout that the job cannot follow: its form, its rows, or a device's memory.

    Raises:
        ValueError: The reason.
    """
    check_partition(as_partition(view, layout), problem)


def as_partition(view: PlanningSnapshot, layout: Layout) -> Partition:
    """Return the partition of a layout.

    Raises:
        ValueError: A running job cannot follow the layout (`check_live_layout`), or a
            pipeline has fewer rows than micro-batches.
    """
    healthy = view.baseline or view.layout
    count = view.workload.num_microbatches
    if Capability.SCHEDULE not in view.capabilities and view.shape.schedule is not None:
        layout = replace(layout, schedule=view.shape.schedule)
    return partition_of(
        layout,
        num_rows=view.shape.rows_per_step,
        num_microbatches=count,
        rows_per_batch=ceil(max(healthy.rows_of(view.shape.rows_per_step).values()) / count),
        rows_per_microbatch=view.shape.rows_per_microbatch,
    )


def _memory_bytes(view: PlanningSnapshot, config: PolicyConfig, rank: int) -> float:
    """Return what a rank may hold, without its part of optimizer state that has owners."""
    if not (limit := config.memory_bytes or view.memory_of.get(rank, 0)):
        return inf
    if not view.layout.state_owners:
        return float(limit)
    owned = 2 * view.shape.optimizer_bytes / len(view.layout.working)  # by owner and mirror
    return max(1.0, limit - owned)


def unevenness_of(
    layout: Layout, loads: Sequence[Sequence[float]], speeds: Mapping[int, float]
) -> float:
    """Return the imbalance of the experts in the worst stage; 1 is none.

    In each layer the time of its slowest rank counts, divided by the time that rows spread in
    proportion to the ranks' speeds would take.
    """
    worst = 1.0
    for span in layout.spans:
        whole = sum(speeds[rank] for rank in layout.ranks_of_layer(span.start))
        taken = fluid = 0.0
        for layer in span:
            rows: dict[int, float] = {}
            for replicas, load in zip(layout.experts[layer], loads[layer], strict=True):
                for replica in replicas:
                    rows[replica.rank] = rows.get(replica.rank, 0.0) + replica.share * load
            taken += max((count / speeds[rank] for rank, count in rows.items()), default=0.0)
            fluid += sum(rows.values()) / whole
        if fluid > 0.0:
            worst = max(worst, taken / fluid)
    return worst


def _model_cost(view: PlanningSnapshot) -> ModelCost:
    """Estimate costs per layer from the ranks' measured work and the reported sizes.

    Time of a layer follows the size of its shards; layers are alike where sizes are not reported.
    The head is the time of the last stages beyond their layers; embedding look-ups count as free.
    """
    layout, shape = view.layout, view.shape
    per_row = (1.0 + BACKWARD_RATIO) * shape.rows_per_step
    sizes = [_shard_bytes(layout, shape, layer) for layer in range(layout.num_layers)]
    per_byte_s, head_s = _dense_times(view, [sum(of_layer) for of_layer in sizes])
    with_experts = sum(map(bool, layout.experts))
    expert_s = sum(time.expert_s for time in view.work.values()) / max(1, with_experts)
    fixed_s = sum(time.fixed_s for time in view.work.values()) / len(view.work)
    replicas = len(layout.replicas) * shape.expert_bytes / max(1, with_experts)
    # What a rank holds of dense blocks: optimizer state with owners is counted by `_memory_bytes`.
    # Norms and routers have none.
    dense = max(shape.dense_bytes, 1)
    held = 1.0 - (shape.optimizer_bytes / dense if layout.state_owners else 0.0)
    gradients = shape.gradient_bytes / dense
    whole, held = 1.0 + gradients, held + gradients
    tokens = shape.tokens_per_row
    ends = {0: shape.embedding_bytes, layout.num_layers - 1: shape.head_bytes}
    return ModelCost(
        layers=tuple(
            LayerCost(
                attention_s=per_byte_s * attention / per_row,
                mlp_s=per_byte_s * mlp / per_row,
                attention_bytes=held * attention,
                mlp_bytes=held * mlp,
                replicated_bytes=whole * shape.norm_router_bytes + held * ends.get(layer, 0),
                activation_bytes=float(tokens * shape.activation_bytes),
                whole_activation_bytes=float(tokens * shape.whole_activation_bytes),
                expert_s=expert_s / per_row if experts else 0.0,
                expert_bytes=whole * replicas if experts else 0.0,
                slot_bytes=whole * shape.slots_per_rank * shape.expert_bytes if experts else 0.0,
                dispatch_bytes=2.0 * shape.experts_per_token * tokens * shape.hidden_bytes
                if experts
                else 0.0,
            )
            for layer, ((attention, mlp), experts) in enumerate(
                zip(sizes, layout.experts, strict=True)
            )
        ),
        num_attention_shards=layout.num_attention_shards,
        num_mlp_shards=layout.num_mlp_shards,
        boundary_bytes=float(tokens * shape.hidden_bytes),
        head_s=head_s / per_row,
        head_activation_bytes=float(tokens * shape.head_activation_bytes),
        # Per rank and step: each micro-batch launches each layer of the stage once.
        launch_s=fixed_s
        * len(layout.pipelines[0].stages)
        / (layout.num_layers * view.workload.num_microbatches * (1.0 + BACKWARD_RATIO)),
        gradient_share=gradients / held,
        backward_ratio=BACKWARD_RATIO,
    )


def _shard_bytes(layout: Layout, shape: ModelShape, layer: int) -> tuple[float, float]:
    """Return the bytes of all attention shards and of all MLP shards of a layer."""
    has_mlp = layout.has_dense_mlp(layer)
    if not shape.attention_bytes:  # spread evenly over the layers, all that is not experts'
        return max(shape.dense_bytes, 1) / layout.num_layers, 0.0
    mlp = shape.shared_mlp_bytes if layout.experts[layer] else shape.mlp_bytes
    return (
        float(shape.attention_bytes * layout.num_attention_shards),
        float(mlp * layout.num_mlp_shards * has_mlp),
    )


def _dense_times(view: PlanningSnapshot, layer_bytes: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of a step's dense work for each byte of a layer, and of the head."""
    layers_s = head_s = layers = last_layers = 0.0
    for pipeline in view.layout.pipelines:
        for number, stage in enumerate(pipeline.stages):
            spent_s = sum(view.work[rank].dense_s for rank in stage.group)
            own = pipeline.share_at(number) * sum(layer_bytes[stage.first_layer : stage.end_layer])
            if stage is pipeline.stages[-1]:
                head_s, last_layers = head_s + spent_s, last_layers + own
            else:
                layers_s, layers = layers_s + spent_s, layers + own
    per_byte_s = layers_s / layers if layers else head_s / last_layers
    beyond_s = head_s - last_layers * per_byte_s
    if beyond_s < 0.0:  # noise, or an embedding that does take time
        return (layers_s + head_s) / (layers + last_layers), 0.0
    return per_byte_s, beyond_s
