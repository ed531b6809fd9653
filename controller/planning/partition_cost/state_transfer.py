"""State to transfer between two partitions, and the duration of the transfer.

A rank receives what it will hold and does not hold now, from any living rank; state without a
living holder comes from a checkpoint. Experts are moved by the expert planner; of a layer that is
new to a stage each of its ranks receives an even part of them.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pacekeeper.controller.planning.model.partition import Moves, Partition, StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.compute import layer_sums
from pacekeeper.core.layout.layout import ShardRun

Held = tuple[int, int, int, int]  # first layer, layer after the last, first shard, shard after it


def moves(new: Partition, problem: PartitionProblem) -> Moves:
    """From what runs now. `move_s`: the slowest rank's, with the pause; 0 where nothing changes."""
    now = problem.now
    if new == now:
        return Moves(bytes_in=(), bytes_from_checkpoint=0.0, move_s=0.0)
    bytes_in = lacking_bytes(_by_rank(now), _by_rank(new), problem, _sharers(new))
    return Moves(
        bytes_in=tuple(sorted(bytes_in.items())),
        bytes_from_checkpoint=lost_bytes([cell for _, _, cell in now.places()], problem),
        move_s=move_s(bytes_in, problem),
    )


def lacking_bytes(
    old: Mapping[int, StageShard],
    new: Mapping[int, StageShard],
    problem: PartitionProblem,
    sharers: Mapping[int, int] | None = None,
) -> dict[int, float]:
    """By rank, where any: state of its new cell that it does not hold in its old one.

    `sharers`: how many ranks share the experts of each rank's new layers; None: without experts.
    """
    model = problem.model
    sums = layer_sums(model, problem.links)
    shards = (model.num_attention_shards, model.num_mlp_shards)
    attention_bytes = (sums.attention_bytes / shards[0]).tolist()  # of one shard, summed
    mlp_bytes = (sums.mlp_bytes / shards[1]).tolist()
    whole_bytes = sums.replicated_bytes.tolist()
    expert_bytes = sums.expert_bytes.tolist()
    bytes_in: dict[int, float] = {}
    for rank, cell in new.items():
        had = old.get(rank)
        if had == cell:
            continue
        lacking = _lacking(
            _held(cell, cell.attention, rank),
            None if had is None else _held(had, had.attention, rank),
            attention_bytes,
        ) + _lacking(
            _held(cell, cell.mlp, rank),
            None if had is None else _held(had, had.mlp, rank),
            mlp_bytes,
        )
        layers = (cell.first_layer, cell.end_layer, 0, 1)
        before = None if had is None else (had.first_layer, had.end_layer, 0, 1)
        lacking += _lacking(layers, before, whole_bytes)
        if sharers is not None:
            lacking += _lacking(layers, before, expert_bytes) / sharers[rank]
        if lacking > 0.0:
            bytes_in[rank] = lacking
    return bytes_in


def move_s(bytes_in: Mapping[int, float], problem: PartitionProblem) -> float:
    """The pause, and the slowest rank's share over its link."""
    bytes_per_s = problem.prices.bytes_per_s or problem.links.between_bytes_per_s
    return problem.prices.pause_s + max(
        (
            count / (bytes_per_s * problem.device_of[rank].link_speed)
            for rank, count in bytes_in.items()
        ),
        default=0.0,
    )


def lost_bytes(cells: Iterable[StageShard], problem: PartitionProblem) -> float:
    """Bytes of the state of these shards that no living rank holds."""
    model = problem.model
    held = list(cells)
    if all(problem.device_of[rank].speed > 0.0 for cell in held for rank in cell.ranks):
        return 0.0
    sums = layer_sums(model, problem.links)
    has_heads = np.zeros((len(model.layers), model.num_attention_shards), dtype=np.bool_)
    has_columns = np.zeros((len(model.layers), model.num_mlp_shards), dtype=np.bool_)
    for cell in held:
        layers = slice(cell.first_layer, cell.end_layer)
        for runs, has in ((cell.attention, has_heads), (cell.mlp, has_columns)):
            for run in runs:
                if problem.device_of[run.rank].speed > 0.0:
                    has[layers, run.first : run.end] = True
    attention_bytes = np.diff(sums.attention_bytes) / model.num_attention_shards
    mlp_bytes = np.diff(sums.mlp_bytes) / model.num_mlp_shards
    return float(
        ((~has_heads).sum(axis=1) * attention_bytes).sum()
        + ((~has_columns).sum(axis=1) * mlp_bytes).sum()
    )


def _by_rank(partition: Partition) -> dict[int, StageShard]:
    return {rank: cell for _, _, cell in partition.places() for rank in cell.ranks}


def _sharers(partition: Partition) -> dict[int, int]:
    """By rank: how many ranks share the experts of its layers."""
    groups = partition.expert_groups()
    result = {}
    for at, stage, cell in partition.places():
        group = partition.pipelines[at].expert_group
        number = 1 if group is None else len(groups[group, stage])
        result.update(dict.fromkeys(cell.ranks, number))
    return result


def _held(cell: StageShard, runs: Iterable[ShardRun], rank: int) -> Held:
    for run in runs:
        if run.rank == rank:
            return cell.first_layer, cell.end_layer, run.first, run.end
    return cell.first_layer, cell.end_layer, 0, 0


def _lacking(new: Held, old: Held | None, shard_bytes: Sequence[float]) -> float:
    """Bytes of the rectangle `new` of layers x shards without what `old` covers of it."""
    whole = (shard_bytes[new[1]] - shard_bytes[new[0]]) * (new[3] - new[2])
    if old is None:
        return whole
    first, end = max(new[0], old[0]), min(new[1], old[1])
    shards = min(new[3], old[3]) - max(new[2], old[2])
    if end <= first or shards <= 0:
        return whole
    return whole - (shard_bytes[end] - shard_bytes[first]) * shards
