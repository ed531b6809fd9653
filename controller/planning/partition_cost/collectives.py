"""Waiting at expert all-to-alls of unequal pipelines, and the exchange of gradients.

Pipelines that share experts meet at the all-to-all barrier of every expert layer. The slowest
pipeline may differ from barrier to barrier, so each interval takes its own maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.controller.planning.model.partition import StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.compute import (
    Array,
    GroupCost,
    LayerSums,
    forward_messages_s,
    micro_batch_s,
    shares_of,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedStage:
    """One stage of a lockstep group of unequal tensor groups.

    Time after the last barrier of a chunk counts to the first interval of the next chunk, because
    no rank waits in between.

    Attributes:
        compute: [kinds, barriers, micro-batches] forward seconds.
        communication: [kinds, barriers] seconds of one row's messages.
        fixed: [kinds, barriers] seconds of messages without rows.
        rows: [kinds, micro-batches] the most of each kind.
    """

    compute: Array
    communication: Array
    fixed: Array
    rows: Array

    def chunk_s(self, scale: float) -> Array:
        """[micro-batches]: of a forward or backward chunk, without the experts."""
        slowest: Array = self._ways_s(scale).max(axis=0).sum(axis=0)
        return slowest

    def weight_s(self, scale: float) -> Array:
        """[micro-batches] weight gradients; ranks wait for them at the next barrier only."""
        way_s = self._ways_s(scale)[:, 0]
        own_s = scale * self.compute.sum(axis=1)
        added: Array = (way_s + own_s).max(axis=0) - way_s.max(axis=0)
        return added

    def _ways_s(self, scale: float) -> Array:
        """[kinds, meetings, micro-batches]"""
        messages: Array = self.communication[:, :, None] * self.rows[:, None, :]
        return scale * self.compute + messages + self.fixed[:, :, None]


def mixed_stage(
    costs: Sequence[GroupCost], first: int, end: int, sums: LayerSums, rows: Array
) -> MixedStage | None:
    """Intervals between the all-to-all barriers of layers [first, end).

    Args:
        costs: of each tensor group.
        first: first layer.
        end: layer after the last.
        sums: prefix sums over layers.
        rows: [groups, micro-batches].

    Returns:
        None where there is no expert layer or all groups are equal; then the group with most rows
        is the slowest everywhere.
    """
    kinds: dict[GroupCost, list[int]] = {}
    for at, cost in enumerate(costs):
        kinds.setdefault(cost, []).append(at)
    layers = slice(first, end)
    meets = np.diff(sums.expert_s)[layers] > 0.0
    if len(kinds) == 1 or not meets.any():
        return None
    most = int(meets.sum())
    way = np.concatenate([[0], np.cumsum(meets)[:-1]])  # that each layer's shards lie on
    after = way + meets  # that what comes back from its experts lies on
    most_rows = np.array([rows[members].max(axis=0) for members in kinds.values()])
    compute = np.zeros((len(kinds), most, rows.shape[1]))
    parts = np.zeros((2, len(kinds), most))
    for of_batches, counts, cost in zip(compute, most_rows, kinds, strict=True):
        for count in np.unique(counts):
            compute_s = np.diff(micro_batch_s(sums, cost, float(count)))[layers]
            way_s = np.bincount(way % most, weights=compute_s, minlength=most)
            of_batches[:, counts == count] = way_s[:, None]
    for communication, fixed, cost in zip(*parts, kinds, strict=True):
        communication_s = np.diff(forward_messages_s(sums, cost))[layers]
        back_s = 0.5 * np.diff(sums.dispatch_bytes)[layers] / cost.dispatch_bytes_per_s
        np.add.at(communication, way % most, communication_s - back_s)
        np.add.at(communication, after % most, back_s)
        np.add.at(fixed, way % most, cost.sum_s)
    return MixedStage(
        compute=compute,
        communication=parts[0],
        fixed=parts[1],
        rows=most_rows,
    )


def gradient_sync_s(
    cell: StageShard, num_pipelines: int, problem: PartitionProblem, *, is_inside: bool
) -> float:
    """A ring over the pipelines for what they all hold: the slowest rank's share of gradients."""
    if num_pipelines == 1:
        return 0.0
    model, links = problem.model, problem.links
    layers = model.layers[cell.first_layer : cell.end_layer]
    attention_bytes = sum(layer.attention_bytes for layer in layers)
    mlp_bytes = sum(layer.mlp_bytes for layer in layers)
    mlp_bytes += model.embedding_bytes if cell.first_layer == 0 else 0.0
    mlp_bytes += model.head_bytes if cell.end_layer == len(model.layers) else 0.0
    whole_bytes = sum(layer.replicated_bytes for layer in layers)
    heads, columns = shares_of(cell.attention), shares_of(cell.mlp)
    latency_s = links.inside_latency_s if is_inside else links.between_latency_s
    slowest_s = 0.0
    for rank in cell.ranks:
        count = heads.get(rank, 0.0) * attention_bytes + columns.get(rank, 0.0) * mlp_bytes
        link = problem.device_of[rank].link_speed
        bandwidth = links.inside_bytes_per_s if is_inside else links.between_bytes_per_s * link
        slowest_s = max(slowest_s, (count + whole_bytes) / bandwidth)
    ring = 2.0 * (num_pipelines - 1) / num_pipelines
    return ring * model.gradient_share * slowest_s + 2.0 * (num_pipelines - 1) * latency_s
