"""Hard constraints of a partition: lockstep of pipelines with shared experts, whole model, memory.

Pipelines that share experts wait for each other at every expert layer: they have the same stage
boundaries and number of micro-batches, and differ in rows only, which may be other ones at each
stage where the trainer deals them so.
"""

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.memory import memory_bytes


def check_partition(partition: Partition, problem: PartitionProblem) -> None:
    """Raises ValueError that names the violated constraint, the ranks and the pipeline."""
    model = problem.model
    first = partition.pipelines[0].cells[0]
    shape = (partition.pipelines[0].cuts[-1], first.attention[-1].end, first.mlp[-1].end)
    expected = (len(model.layers), model.num_attention_shards, model.num_mlp_shards)
    if shape != expected:
        raise ValueError(f"layers and shards {shape} are not the model's {expected}")
    if partition.rows_per_step != problem.rows_per_step:
        raise ValueError(f"{partition.rows_per_step} rows, a step has {problem.rows_per_step}")
    dead = [rank for rank in partition.ranks if problem.device_of[rank].speed <= 0.0]
    if dead:
        raise ValueError(f"ranks {dead} are dead and have work")
    check_lock_step(partition, has_experts=model.has_experts)
    for rank, used in memory_bytes(partition, problem).items():
        if used > problem.device_of[rank].memory_bytes:
            raise ValueError(
                f"rank {rank} needs {used:.3g} bytes, it has"
                f" {problem.device_of[rank].memory_bytes:.3g}"
            )


def is_allowed(partition: Partition, problem: PartitionProblem) -> bool:
    """Whether the partition violates no constraint of the problem, its `is_whole` included."""
    try:
        check_partition(partition, problem)
    except ValueError:
        return False
    return not problem.is_whole or partition.ranks == problem.living


def check_lock_step(partition: Partition, *, has_experts: bool) -> None:
    """Pipelines that share experts: the same layers, as many micro-batches. Raises ValueError."""
    first_of: dict[int, int] = {}
    for at, pipeline in enumerate(partition.pipelines):
        if pipeline.expert_group is None:
            if has_experts:
                raise ValueError(f"pipeline {at} runs experts and names no expert group")
            continue
        first = first_of.setdefault(pipeline.expert_group, at)
        other = partition.pipelines[first]
        if pipeline.cuts != other.cuts:
            raise ValueError(
                f"pipelines {first} and {at} share experts, but their stages end at"
                f" {other.cuts} and {pipeline.cuts}"
            )
        if len(pipeline.micro_batches) != len(other.micro_batches):
            raise ValueError(
                f"pipelines {first} and {at} share experts, but run"
                f" {len(other.micro_batches)} and {len(pipeline.micro_batches)} micro-batches"
            )
