"""The partition planner's problem for a live job, built from measured values only. Pure.

Work per layer comes from the healthy times of ranks, bytes from the reported model shape, bandwidth
from earlier moves. Communication within a step is not measured separately: it is part of the
unexplained time, which is the same for all compared layouts. Called by `pricing.py`.
"""

from collections.abc import Mapping, Sequence
from math import inf

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
from pacekeeper.controller.planning.partition.layout_codec import partition_of
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import number_domains

BACKWARD_RATIO = 2.0  # of a forward pass; ranks report the sum of both


def problem_of(
    view: PlanningSnapshot, config: PolicyConfig, costs: MoveCosts, *, unevenness: float
) -> PartitionProblem:
    """Return the problem: present layout, baseline, devices and the job's pipeline schedule.

    Args:
        view: The inputs of the decision.
        config: The policy's settings.
        costs: The prices of moving state.
        unevenness: How much longer the experts' work takes than if it were spread evenly.

    Raises:
        ValueError: Times are not measured yet, the layout is not regular, a pipeline has fewer rows
            than micro-batches, or the schedule is unknown.
    """
    if view.shape.schedule is None:
        raise ValueError(
            "the job runs a pipeline schedule that this version does not know; install the "
            "trainer's version of pacekeeper on its nodes and for the controller"
        )
    if view.work.keys() < set(view.layout.working):
        raise ValueError("the times of its stages are not measured yet")
    if not view.layout.is_regular:
        raise ValueError("its pipelines have cuts or runs of their own, which are not planned live")
    now = as_partition(view, view.layout)
    baseline = view.baseline
    speeds = view.speeds
    node = number_domains(view.node_of, view.layout.ranks)
    bandwidth = 1.0 / costs.busiest_s_per_byte if costs.busiest_s_per_byte > 0.0 else inf
    return PartitionProblem(
        model=_model_cost(view),
        devices=tuple(
            Device(
                rank=rank,
                node=node[rank],
                memory_bytes=float(config.memory_bytes) or inf,
                speed=max(speeds[rank], SPEEDS[0]),
                link_speed=max(1.0 / view.slow_links.get(rank, 1.0), SPEEDS[0]),
                is_doubted=rank in view.doubted,
            )
            for rank in view.layout.ranks
        ),
        links=Links(
            inside_bytes_per_s=bandwidth,
            between_bytes_per_s=bandwidth,
            inside_latency_s=0.0,
            between_latency_s=0.0,
        ),
        baseline=now
        if baseline is None or baseline.ranks != view.layout.ranks
        else as_partition(view, baseline),
        present=now,
        schedule=view.shape.schedule,
        prices=MovePrices(num_steps=config.horizon_steps, pause_s=costs.pause_s),
        unevenness=unevenness,
    )


def as_partition(view: PlanningSnapshot, layout: Layout) -> Partition:
    """Return the partition of a layout.

    Raises:
        ValueError: A pipeline has fewer rows than micro-batches.
    """
    return partition_of(
        layout,
        num_rows=view.shape.rows_per_step,
        num_microbatches=view.workload.num_microbatches,
    )


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
    """Estimate costs per layer from the ranks' measured work.

    All layers are assumed alike. The head is the time of the last stage beyond its layers;
    embedding look-ups count as free.
    """
    layout, shape = view.layout, view.shape
    per_row = (1.0 + BACKWARD_RATIO) * shape.rows_per_step
    number = [len(span) for span in layout.spans]
    on_spans = [layout.ranks_of_layer(span.start) for span in layout.spans]
    dense = [sum(view.work[rank].dense_s for rank in ranks) for ranks in on_spans]
    layer_s, head_s = dense[-1] / number[-1], 0.0
    if len(number) > 1:
        layer_s = sum(dense[:-1]) / sum(number[:-1])
        head_s = dense[-1] - number[-1] * layer_s
    if head_s < 0.0:  # noise, or an embedding that does take time
        layer_s, head_s = sum(dense) / sum(number), 0.0
    with_experts = [layer for layer, experts in enumerate(layout.experts) if experts]
    expert_s = sum(time.expert_s for time in view.work.values()) / max(1, len(with_experts))
    fixed_s = sum(time.fixed_s for time in view.work.values()) / len(view.work)
    replicas = len(layout.replicas) * shape.expert_bytes / max(1, len(with_experts))
    return ModelCost(
        layers=tuple(
            LayerCost(
                attention_s=layer_s / per_row,
                mlp_s=0.0,
                attention_bytes=shape.dense_bytes / layout.num_layers,
                mlp_bytes=0.0,
                activation_bytes=0.0,
                expert_s=expert_s / per_row if experts else 0.0,
                expert_bytes=replicas if experts else 0.0,
            )
            for experts in layout.experts
        ),
        num_attention_shards=layout.num_attention_shards,
        num_mlp_shards=layout.num_mlp_shards,
        boundary_bytes=0.0,
        head_s=head_s / per_row,
        # Per rank and step: each micro-batch launches each layer of the stage once.
        launch_s=fixed_s
        * len(number)
        / (layout.num_layers * view.workload.num_microbatches * (1.0 + BACKWARD_RATIO)),
        gradient_share=0.0,
        backward_ratio=BACKWARD_RATIO,
    )
