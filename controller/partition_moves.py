"""What state has to travel from one partition to another, and how long that takes. Pure.

A rank lacks what it will hold and does not hold. It comes from any living rank that has it; what
nobody living has comes from a checkpoint. Experts move by their own planner.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from pacekeeper.controller.partition_cost import Array, layer_sums
from pacekeeper.controller.partition_plan import Cell, Moves, Partition
from pacekeeper.controller.partition_problem import Problem
from pacekeeper.core.layout import ShardRun

Held = tuple[int, int, int, int]  # first layer, layer after the last, first shard, shard after it


def moves(new: Partition, problem: Problem) -> Moves:
    """From what runs now. `move_s`: the slowest rank's, with the pause; 0 where nothing changes."""
    now, model = problem.now, problem.model
    if new == now:
        return Moves(bytes_in=(), bytes_from_checkpoint=0.0, move_s=0.0)
    sums = layer_sums(model, problem.links)
    shards = (model.num_attention_shards, model.num_mlp_shards)
    attention_bytes = (sums.attention_bytes / shards[0]).tolist()  # of one shard, summed
    mlp_bytes = (sums.mlp_bytes / shards[1]).tolist()
    whole_bytes = sums.replicated_bytes.tolist()
    old_cells = {rank: cell for _, _, cell in now.places() for rank in cell.ranks}
    bytes_in: dict[int, float] = {}
    for _, _, cell in new.places():
        for rank in cell.ranks:
            old = old_cells.get(rank)
            if old == cell:
                continue
            lacking = _lacking(
                _held(cell, cell.attention, rank),
                None if old is None else _held(old, old.attention, rank),
                attention_bytes,
            ) + _lacking(
                _held(cell, cell.mlp, rank),
                None if old is None else _held(old, old.mlp, rank),
                mlp_bytes,
            )
            lacking += _lacking(
                (cell.first_layer, cell.end_layer, 0, 1),
                None if old is None else (old.first_layer, old.end_layer, 0, 1),
                whole_bytes,
            )
            if lacking > 0.0:
                bytes_in[rank] = lacking
    move_s = problem.prices.pause_s + max(
        (
            count / (problem.links.between_bytes_per_s * problem.device_of[rank].link_speed)
            for rank, count in bytes_in.items()
        ),
        default=0.0,
    )
    return Moves(
        bytes_in=tuple(sorted(bytes_in.items())),
        bytes_from_checkpoint=_lost_bytes(problem, np.diff(attention_bytes), np.diff(mlp_bytes)),
        move_s=move_s,
    )


def _held(cell: Cell, runs: Iterable[ShardRun], rank: int) -> Held:
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


def _lost_bytes(problem: Problem, attention_bytes: Array, mlp_bytes: Array) -> float:
    """Of what runs now: held by no living rank."""
    model = problem.model
    if all(problem.device_of[rank].speed > 0.0 for rank in problem.now.ranks):
        return 0.0
    has_heads = np.zeros((len(model.layers), model.num_attention_shards), dtype=np.bool_)
    has_columns = np.zeros((len(model.layers), model.num_mlp_shards), dtype=np.bool_)
    for _, _, cell in problem.now.places():
        layers = slice(cell.first_layer, cell.end_layer)
        for runs, has in ((cell.attention, has_heads), (cell.mlp, has_columns)):
            for run in runs:
                if problem.device_of[run.rank].speed > 0.0:
                    has[layers, run.first : run.end] = True
    return float(
        ((~has_heads).sum(axis=1) * attention_bytes).sum()
        + ((~has_columns).sum(axis=1) * mlp_bytes).sum()
    )
