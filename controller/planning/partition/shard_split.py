"""Virtual shards to the ranks of a tensor group, in whole numbers, by speed. Pure.

The slowest rank decides, so shards go one by one to the rank that would be done first with one
more: no other whole numbers have a lower maximum. All but the last few follow from the fluid split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from pacekeeper.controller.planning.model.problem import Device
from pacekeeper.controller.planning.partition_cost.compute import (
    GroupCost,
    LayerSums,
    group_cost,
    halves_s,
)
from pacekeeper.core.layout.layout import ShardRun

SETTLED = 1e-9  # relative: two splits that are closer take as long


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Runs of the ranks that stay in the group, and what they cost."""

    attention: tuple[ShardRun, ...]
    mlp: tuple[ShardRun, ...]
    cost: GroupCost


def split_shards(
    num_shards: int,
    speeds: Sequence[float],
    limits: Sequence[int] | None = None,
    *,
    least: int = 0,
) -> tuple[int, ...]:
    """The whole numbers that add up to `num_shards` with the least max number / speed.

    `limits`: most shards of each, `least`: of each that has a speed above 0 and the room. Ties go
    to the first. Raises ValueError where no rank of speed above 0 has room, or fewer shards are
    there than the least.
    """
    room = [num_shards] * len(speeds) if limits is None else list(limits)
    room = [most if speed > 0.0 else 0 for most, speed in zip(room, speeds, strict=True)]
    if sum(room) < num_shards:
        raise ValueError(f"{num_shards} shards do not fit the limits {room}")
    if least:  # one by one from there: the fluid split may be too much beside it
        counts = [min(most, least) for most in room]
        if sum(counts) > num_shards:
            raise ValueError(f"{num_shards} shards are fewer than {least} for each of {len(room)}")
    else:
        whole = sum(speeds)
        counts = [
            min(most, int(num_shards * speed / whole + SETTLED))
            for most, speed in zip(room, speeds, strict=True)
        ]
    while sum(counts) < num_shards:
        free = [i for i in range(len(counts)) if counts[i] < room[i]]
        counts[min(free, key=lambda i: ((counts[i] + 1) / speeds[i], i))] += 1
    return tuple(counts)


def runs(ranks: Sequence[int], counts: Sequence[int]) -> tuple[ShardRun, ...]:
    """Contiguous runs in the order of `ranks`; ranks without shards have none."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return tuple(
        ShardRun(rank, first, end)
        for rank, (first, end) in zip(ranks, pairwise(ends), strict=True)
        if end > first
    )


def shape_group(
    ranks: Sequence[int],
    sums: LayerSums,
    device_of: Mapping[int, Device],
    *,
    most_share: float = 1.0,
    is_whole: bool = False,
) -> GroupShape | None:
    """The fastest group of the k fastest ranks, over all k; shards in the order of `ranks`.

    Each rank of a group has an attention shard; it may have none of the MLP. `most_share`: of the
    shards on one rank, rounded up. None where no rank lives or has room. Where fewer ranks are as
    fast, all stay in: their memory counts, too. `is_whole`: all that live stay in, each with a
    shard of either kind; None where there are too few.
    """
    living = [rank for rank in ranks if device_of[rank].speed > 0.0]
    by_speed = sorted(living, key=lambda rank: (-device_of[rank].speed, living.index(rank)))
    best: GroupShape | None = None
    best_s = inf
    for size in [len(by_speed)] if is_whole else range(len(by_speed), 0, -1):
        chosen = set(by_speed[:size])
        members = [rank for rank in ranks if rank in chosen]
        shape = _shape(members, sums, device_of, most_share, int(is_whole))
        if shape is None:
            continue
        taken_s = layers_s(sums, shape.cost)
        if taken_s < best_s * (1.0 - SETTLED):
            best, best_s = shape, taken_s
    return best


def layers_s(sums: LayerSums, cost: GroupCost) -> float:
    """One row through all layers and back, without experts: what groups are compared by."""
    messages_s = 2.0 * sums.num_layers * (cost.sum_row_s + cost.sum_s)
    return (1.0 + sums.model.backward_ratio) * float(halves_s(sums, cost)[-1]) + messages_s


def _shape(
    members: Sequence[int],
    sums: LayerSums,
    device_of: Mapping[int, Device],
    most_share: float,
    least_mlp: int,
) -> GroupShape | None:
    model = sums.model
    speeds = [device_of[rank].speed for rank in members]
    found = []
    for num_shards, least in ((model.num_attention_shards, 1), (model.num_mlp_shards, least_mlp)):
        most = max(1, int(most_share * num_shards + SETTLED))
        if not members or not least * len(members) <= num_shards <= most * len(members):
            return None
        counts = split_shards(num_shards, speeds, [most] * len(members), least=least)
        found.append(runs(members, counts))
    attention, mlp = found
    cost = group_cost(attention, mlp, model, sums.links, device_of)
    return GroupShape(attention=attention, mlp=mlp, cost=cost)
