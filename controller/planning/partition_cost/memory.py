"""Memory of a partition on each rank: state, and activations of micro-batches in flight."""

from collections.abc import Sequence

from pacekeeper.controller.planning.model.partition import Partition, StageShard
from pacekeeper.controller.planning.model.problem import LayerCost, ModelCost, PartitionProblem
from pacekeeper.core.layout.layout import ShardRun


def in_flight(num_stages: int, stage: int, num_microbatches: int) -> int:
    """Micro-batches whose activations a stage keeps at most; 1F1B, and ZB-H1 in the worst case.

    ZB-H1 keeps those of num_stages micro-batches until their weight gradients
    (`core.layout.pipeline_schedule`); what it keeps beyond 1F1B are the inputs only, which this
    leaves out.
    """
    return min(num_stages - stage, num_microbatches)


def memory_bytes(partition: Partition, problem: PartitionProblem) -> dict[int, float]:
    """By rank of the partition. Experts are spread evenly over the ranks that share them."""
    result: dict[int, float] = {}
    groups = partition.expert_groups()
    for at, stage, cell in partition.places():
        pipeline = partition.pipelines[at]
        held = in_flight(len(pipeline.cells), stage, len(pipeline.micro_batches))
        rows = held * max(pipeline.micro_batches)
        sharers = 1 if pipeline.expert_group is None else len(groups[pipeline.expert_group, stage])
        result |= shard_bytes(cell, problem.model, rows=rows, sharers=sharers)
    return result


def shard_bytes(cell: StageShard, model: ModelCost, *, rows: int, sharers: int) -> dict[int, float]:
    """By rank: state and the activations of `rows` rows."""
    layers = model.layers[cell.first_layer : cell.end_layer]
    attention = shares_of(cell.attention)
    mlp = shares_of(cell.mlp)
    ends = end_bytes(model, cell.first_layer, cell.end_layer)
    cut = (
        sum(layer.attention_bytes for layer in layers),
        sum(layer.mlp_bytes for layer in layers) + ends,
        rows * sum(layer.activation_bytes for layer in layers),
    )
    whole = sum(whole_bytes(layer, sharers) for layer in layers)
    result = {}
    for rank in cell.ranks:
        heads, columns = attention.get(rank, 0.0), mlp.get(rank, 0.0)
        result[rank] = (
            heads * cut[0] + columns * cut[1] + activation_share(heads, columns) * cut[2] + whole
        )
    return result


def end_bytes(model: ModelCost, first_layer: int, end_layer: int) -> float:
    """Bytes of embedding and head, if the layers include the first or the last one."""
    embedding = model.embedding_bytes if first_layer == 0 else 0.0
    return embedding + (model.head_bytes if end_layer == len(model.layers) else 0.0)


def whole_bytes(layer: LayerCost, sharers: int) -> float:
    """Bytes of a layer that a rank holds independently of its shards."""
    return layer.replicated_bytes + layer.expert_bytes / sharers


def activation_share(heads: float, columns: float) -> float:
    """A rank's part of a layer's activations: half of them are the attention's, half the MLP's."""
    return 0.5 * (heads + columns)


def shares_of(runs: Sequence[ShardRun]) -> dict[int, float]:
    """By rank: its part of the virtual shards."""
    return {run.rank: (run.end - run.first) / runs[-1].end for run in runs}
