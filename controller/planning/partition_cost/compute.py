"""Compute and message time of layers on a tensor group, as prefix sums over layers.

Attention ends with an all-reduce over the group, the MLP with another; each waits for its slowest
rank. Replicated work (norms) is split evenly before both. The slowest rank there may not be the
slowest at its shards, so the sum of each rank is compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.model.partition import StageShard
from pacekeeper.controller.planning.model.problem import Device, LayerCost, Links, ModelCost
from pacekeeper.core.layout.layout import ShardRun

Array = npt.NDArray[np.float64]
RelativeTimes = tuple[float, float, float]

SUMS_PER_LAYER = 2  # over the tensor group in a forward pass: after attention, after the MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """Cost of a tensor group.

    Attributes:
        relative_times: (attention, MLP, replicated) forward time of each rank, relative to one
            device of speed 1 with all shards; distinct, without ranks that another one dominates.
        sum_row_s: message seconds of one layer's forward for each row.
        sum_s: message seconds independent of rows.
        speed: sum over its ranks.
        num_ranks: of the group.
        dispatch_bytes_per_s: bandwidth to other nodes, all ranks together.
        shares: distinct (attention part, MLP part, memory) of its ranks.
    """

    relative_times: tuple[RelativeTimes, ...]
    sum_row_s: float
    sum_s: float
    speed: float
    num_ranks: int
    dispatch_bytes_per_s: float
    shares: tuple[tuple[float, float, float], ...]

    @property
    def relative_time_max(self) -> float:
        """Time of its slowest rank for replicated work, over that of a device of speed 1."""
        return max(replicated for _, _, replicated in self.relative_times)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerSums:
    """Prefix sums [layers + 1] of each quantity over the layers, and the links."""

    model: ModelCost
    links: Links
    attention_s: Array
    mlp_s: Array
    replicated_s: Array
    expert_s: Array
    dispatch_bytes: Array
    attention_bytes: Array
    mlp_bytes: Array
    replicated_bytes: Array
    expert_bytes: Array
    slot_bytes: Array
    activation_bytes: Array
    whole_activation_bytes: Array

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)


def layer_sums(model: ModelCost, links: Links) -> LayerSums:
    """Embedding and head count as MLP time of the first and the last layer."""

    def sums(name: str) -> Array:
        of_layers = np.array([getattr(layer, name) for layer in model.layers])
        result: Array = np.concatenate([[0.0], np.cumsum(of_layers)])
        return result

    found = {name: sums(name) for name in LayerCost.__slots__}
    for name, ends in (
        ("mlp_s", (model.embedding_s, model.head_s)),
        ("mlp_bytes", (model.embedding_bytes, model.head_bytes)),
    ):
        found[name][1:] += ends[0]
        found[name][-1] += ends[1]
    return LayerSums(model=model, links=links, **found)


def group_cost(
    attention: Sequence[ShardRun],
    mlp: Sequence[ShardRun],
    model: ModelCost,
    links: Links,
    device_of: Mapping[int, Device],
) -> GroupCost:
    """Raises ValueError where a rank with shards is dead."""
    heads, columns = shares_of(attention), shares_of(mlp)
    ranks = sorted(heads.keys() | columns.keys())
    devices = [device_of[rank] for rank in ranks]
    if any(device.speed <= 0.0 for device in devices):
        raise ValueError(f"a dead rank among {ranks} has shards")
    size = len(ranks)
    is_inside = len({device.node for device in devices}) == 1
    slowest_link = min(device.link_speed for device in devices)
    bandwidth = links.inside_bytes_per_s if is_inside else links.between_bytes_per_s * slowest_link
    latency_s = links.inside_latency_s if is_inside else links.between_latency_s
    ring = 2.0 * (size - 1) / size  # of a ring's reduce-scatter and all-gather
    return GroupCost(
        relative_times=_waited_for(
            (heads.get(d.rank, 0.0) / d.speed, columns.get(d.rank, 0.0) / d.speed, 1.0 / d.speed)
            for d in devices
        ),
        sum_row_s=SUMS_PER_LAYER * ring * model.boundary_bytes / bandwidth,
        sum_s=SUMS_PER_LAYER * 2.0 * latency_s if size > 1 else 0.0,
        speed=sum(device.speed for device in devices),
        num_ranks=size,
        dispatch_bytes_per_s=sum(links.between_bytes_per_s * d.link_speed for d in devices),
        shares=tuple(
            sorted(
                {
                    (heads.get(d.rank, 0.0), columns.get(d.rank, 0.0), d.memory_bytes)
                    for d in devices
                }
            )
        ),
    )


def _waited_for(relative_times: Iterable[RelativeTimes]) -> tuple[RelativeTimes, ...]:
    """Distinct ones, without those that another one is as slow as in everything."""
    kept: list[RelativeTimes] = []
    for relative in sorted(
        set(relative_times), reverse=True
    ):  # who is as slow in everything comes before
        if not any(slow[1] >= relative[1] and slow[2] >= relative[2] for slow in kept):
            kept.append(relative)
    return tuple(kept)


def shard_cost(
    cell: StageShard, model: ModelCost, links: Links, device_of: Mapping[int, Device]
) -> GroupCost:
    return group_cost(cell.attention, cell.mlp, model, links, device_of)


def forward_messages_s(sums: LayerSums, group: GroupCost) -> Array:
    """Sums over layers [layers + 1] of the messages of one row's forward."""
    messages: Array = (
        group.sum_row_s * np.arange(sums.num_layers + 1.0)
        + sums.dispatch_bytes / group.dispatch_bytes_per_s
    )
    return messages


def micro_batch_s(sums: LayerSums, group: GroupCost, rows: float) -> Array:
    """Sums over layers [layers + 1] of a micro-batch's forward, with launches, without experts."""
    return halves_s(sums, group, rows=rows, launch_s=sums.model.launch_s)


def halves_s(
    sums: LayerSums, group: GroupCost, *, rows: float = 1.0, launch_s: float = 0.0
) -> Array:
    """Sums over layers [layers + 1] of the forward of rows: attention and MLP, each until its
    slowest rank has done its shards and half of what every rank does, launches included.
    """
    layers = np.arange(sums.num_layers + 1.0)
    if len(group.relative_times) == 1 or not (sums.replicated_s[-1] or launch_s):
        attention, mlp, replicated = (
            max(of_ranks) for of_ranks in zip(*group.relative_times, strict=True)
        )
        linear: Array = rows * (attention * sums.attention_s + mlp * sums.mlp_s)
        linear += replicated * (rows * sums.replicated_s + launch_s * layers)
        return linear
    attention, mlp, replicated = np.array(group.relative_times).T[:, :, None]  # each [ranks, 1]
    half_s = 0.5 * replicated * (rows * np.diff(sums.replicated_s) + launch_s)
    slowest_s = (rows * attention * np.diff(sums.attention_s) + half_s).max(axis=0)
    slowest_s += (rows * mlp * np.diff(sums.mlp_s) + half_s).max(axis=0)
    result: Array = np.concatenate([[0.0], np.cumsum(slowest_s)])
    return result


def row_s(sums: LayerSums, group: GroupCost) -> Array:
    """Sums over layers of one row's forward and backward, without experts."""
    compute_s = (1.0 + sums.model.backward_ratio) * halves_s(sums, group)
    return compute_s + 2.0 * forward_messages_s(sums, group)


def constant_s(sums: LayerSums, group: GroupCost) -> Array:
    """Sums over layers of what a micro-batch takes whatever its rows, forward and backward.

    Where a rank waits at the launches of a slower one, it is less: `micro_batch_s` is exact.
    """
    ratio = sums.model.backward_ratio
    return np.arange(sums.num_layers + 1.0) * (
        (1.0 + ratio) * sums.model.launch_s * group.relative_time_max + 2.0 * group.sum_s
    )


def expert_row_s(sums: LayerSums, groups: Sequence[GroupCost], unevenness: float) -> Array:
    """Sums over layers of what the experts take for one row of the whole expert group."""
    speed = sum(group.speed for group in groups)
    return (1.0 + sums.model.backward_ratio) * unevenness / speed * sums.expert_s


def spans(sums: Array) -> Array:
    """[layers + 1, layers + 1]: of layers [a, b), infinite where there are none."""
    between = sums[None, :] - sums[:, None]
    some = np.arange(len(sums))[None, :] > np.arange(len(sums))[:, None]
    return np.where(some, between, np.inf)


def shares_of(runs: Sequence[ShardRun]) -> dict[int, float]:
    """By rank: its part of the virtual shards."""
    return {run.rank: (run.end - run.first) / runs[-1].end for run in runs}


def held_bytes(
    sums: LayerSums, heads: float, columns: float, *, rows: int, num_held: int, sharers: int
) -> Array:
    """Sums over layers [layers + 1] of a rank's state and activations.

    Half of a layer's activations are the attention's, half the MLP's.

    Args:
        sums: prefix sums over layers.
        heads: the rank's part of the attention shards.
        columns: its part of the MLP shards.
        rows: of the largest micro-batch.
        num_held: micro-batches whose activations it keeps.
        sharers: ranks that share the experts.
    """
    experts = sums.slot_bytes if sums.slot_bytes[-1] else sums.expert_bytes / sharers
    kept = 0.5 * (heads + columns) * sums.activation_bytes + sums.whole_activation_bytes
    used: Array = heads * sums.attention_bytes + columns * sums.mlp_bytes + sums.replicated_bytes
    used = used + experts + num_held * rows * kept
    used[-1] += rows * sums.model.head_activation_bytes
    return used


def fits(sums: LayerSums, group: GroupCost, *, rows: int, num_held: int, sharers: int) -> Array:
    """[layers + 1, layers + 1] of 0 where layers [a, b) fit into every rank's memory, else inf."""
    size = sums.num_layers + 1
    result: Array = np.zeros((size, size))
    for heads, columns, memory_bytes in group.shares:
        used = held_bytes(sums, heads, columns, rows=rows, num_held=num_held, sharers=sharers)
        if used[-1] > memory_bytes:
            result = np.where(used[None, :] - used[:, None] > memory_bytes, np.inf, result)
    return result


def message_s(
    rows: float,
    sender: Sequence[Device],
    receiver: Sequence[Device],
    model: ModelCost,
    links: Links,
) -> float:
    """One boundary from cell to cell, cut over the smaller side's ranks (ResiHP, research 3.5)."""
    devices = (*sender, *receiver)
    is_inside = len({device.node for device in devices}) == 1
    lanes = min(len(sender), len(receiver))
    if is_inside:
        return links.inside_latency_s + rows * model.boundary_bytes / (
            links.inside_bytes_per_s * lanes
        )
    slowest = min(device.link_speed for device in devices)
    return links.between_latency_s + rows * model.boundary_bytes / (
        links.between_bytes_per_s * slowest * lanes
    )
