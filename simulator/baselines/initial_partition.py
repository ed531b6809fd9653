"""The partition of a healthy job: even shards and rows, stages as even as can be. Pure.

Rank = tensor + T * (data + D * stage): a tensor group stands in one node, and so do the groups of
one stage, as far as they fit.
"""

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import Device, Links, ModelCost
from pacekeeper.controller.planning.partition.row_split import micro_batches, plan_lockstep_group
from pacekeeper.controller.planning.partition.shard_split import runs
from pacekeeper.controller.planning.partition_cost.compute import group_cost, layer_sums
from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.pipeline_schedule import Schedule


def baseline_partition(
    model: ModelCost,
    links: Links,
    devices: Sequence[Device],
    *,
    tensor: int,
    data: int,
    stages: int,
    rows_per_batch: int,
    num_microbatches: int,
    pipelines_per_expert_group: int = 0,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> Partition:
    """All of `devices` in their order. 0 pipelines in an expert group: a model without experts.

    Raises ValueError where the numbers do not fit the devices, or memory does not hold the model.
    """
    if tensor * data * stages != len(devices) or min(tensor, data, stages) < 1:
        raise ValueError(f"{tensor} x {data} x {stages} ranks, {len(devices)} devices")
    if pipelines_per_expert_group and data % pipelines_per_expert_group:
        raise ValueError(f"{data} pipelines in groups of {pipelines_per_expert_group}")
    ranks = [device.rank for device in devices]
    device_of = {d.rank: replace(d, speed=1.0, link_speed=1.0) for d in devices}

    sums = layer_sums(model, links)
    heads = apportion(model.num_attention_shards, [1.0] * tensor)
    columns = apportion(model.num_mlp_shards, [1.0] * tensor)
    groups = [
        [_group(ranks, tensor, dp + data * stage) for stage in range(stages)] for dp in range(data)
    ]
    together = pipelines_per_expert_group or 1
    costs = tuple(
        tuple(
            group_cost(runs(g, heads), runs(g, columns), model, links, device_of)
            for g in groups[dp]
        )
        for dp in range(together)
    )
    rows = rows_per_batch * num_microbatches
    plan = plan_lockstep_group(
        costs,
        sums,
        rows=rows * together,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    if plan is None:
        raise ValueError("the devices' memory does not hold the model")
    pipelines = []
    for dp in range(data):
        cells = tuple(
            StageShard(
                first_layer=first,
                end_layer=end,
                attention=runs(group, heads),
                mlp=runs(group, columns),
            )
            for group, first, end in zip(groups[dp], (0, *plan.ends[:-1]), plan.ends, strict=True)
        )
        pipelines.append(
            Pipeline(
                cells=cells,
                micro_batches=micro_batches(
                    rows, per_batch=rows_per_batch, num_microbatches=num_microbatches
                ),
                expert_group=dp // together if pipelines_per_expert_group else None,
            )
        )
    return Partition(pipelines=tuple(pipelines), schedule=schedule)


def _group(ranks: Sequence[int], tensor: int, place: int) -> tuple[int, ...]:
    return tuple(ranks[tensor * place : tensor * (place + 1)])
