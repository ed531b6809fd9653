"""Memory of a partition on each rank: state, and activations of micro-batches in flight."""

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.compute import held_bytes, layer_sums, shares_of
from pacekeeper.core.layout.pipeline_schedule import num_in_flight


def memory_bytes(partition: Partition, problem: PartitionProblem) -> dict[int, float]:
    """By rank of the partition. Experts are spread evenly over the ranks that share them."""
    sums = layer_sums(problem.model, problem.links)
    result: dict[int, float] = {}
    groups = partition.expert_groups()
    known: dict[tuple[object, ...], float] = {}  # most ranks of a large job are alike
    for at, stage, cell in partition.places():
        pipeline = partition.pipelines[at]
        rows = max(pipeline.batches_at(stage))
        held = num_in_flight(
            partition.schedule,
            stage,
            num_stages=len(pipeline.cells),
            num_microbatches=len(pipeline.micro_batches),
        )
        sharers = 1 if pipeline.expert_group is None else len(groups[pipeline.expert_group, stage])
        heads, columns = shares_of(cell.attention), shares_of(cell.mlp)
        for rank in cell.ranks:
            share = heads.get(rank, 0.0), columns.get(rank, 0.0)
            key = (*share, cell.first_layer, cell.end_layer, rows, held, sharers)
            if key not in known:
                used = held_bytes(sums, *share, rows=rows, num_held=held, sharers=sharers)
                known[key] = float(used[cell.end_layer] - used[cell.first_layer])
            result[rank] = known[key]
    return result
