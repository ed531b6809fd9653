"""Step time of a partition: longest path, or closed form for 1F1B.

Equal pipelines are priced once. The closed form prices the many candidates of a search. Both end
with the exchange of gradients, which begins when all holders of a layer have finished its last
backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.compute import Array
from pacekeeper.controller.planning.partition_cost.stage_times import PipelineTimes, StageTimeModel
from pacekeeper.core.layout.pipeline_schedule import ChunkKind, Schedule
from pacekeeper.predictor.cost.longest_path import schedule_graph, stage_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPrice:
    """step_s, and when each pipeline's own work ends."""

    step_s: float
    pipeline_s: tuple[float, ...]


class Pricer:
    """Prices partitions of one problem; pipelines that take as long are priced once for all."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        self._clock = StageTimeModel(problem)
        self._ends: dict[tuple[object, ...], Array] = {}

    def price(self, partition: Partition, *, is_exact: bool = True) -> PartitionPrice:
        """The longest path, or (1F1B only; else it is the longest path, too) the closed form."""
        is_exact = is_exact or partition.schedule is not Schedule.ONE_F_ONE_B
        kinds: dict[tuple[object, ...], PipelineTimes] = {}
        keys = []
        for times in self._clock.times(partition):
            key = (is_exact, *times.key())
            keys.append(key)
            kinds.setdefault(key, times)
            if key not in self._ends:
                self._ends[key] = path_ends(times) if is_exact else closed_ends(times)
        return PartitionPrice(
            step_s=_with_exchange(list(kinds.values()), [self._ends[key] for key in kinds]),
            pipeline_s=tuple(float(self._ends[key].max()) for key in keys),
        )


def price(
    partition: Partition, problem: PartitionProblem, *, is_exact: bool = True
) -> PartitionPrice:
    """One partition's price."""
    return Pricer(problem).price(partition, is_exact=is_exact)


def path_ends(times: PipelineTimes) -> Array:
    """[stages] when each has run its last chunk, by the longest path (ResiHP, eq. 2)."""
    num_stages, num_microbatches = times.forward_s.shape
    is_split = times.schedule is Schedule.ZERO_BUBBLE
    chunk_s = np.zeros((len(ChunkKind), num_stages, num_microbatches))
    chunk_s[ChunkKind.FORWARD] = times.forward_s
    chunk_s[ChunkKind.BACKWARD] = times.backward_s + (0.0 if is_split else times.weight_s)
    chunk_s[ChunkKind.WEIGHT_GRADIENT] = times.weight_s
    message_s = np.zeros(chunk_s.shape)
    message_s[ChunkKind.FORWARD, :-1] = times.message_s
    message_s[ChunkKind.BACKWARD, 1:] = times.message_s
    graph = schedule_graph(times.schedule, num_stages, num_microbatches)
    return stage_ends(graph, chunk_s=chunk_s, message_s=message_s)


def closed_ends(times: PipelineTimes) -> Array:
    """[stages] when each ends, for 1F1B: the largest of one bound for each stage.

    With stage j the slowest: the way there and back for one micro-batch, its own work on all, and
    twice its wait for the stages after it, less what it computes meanwhile: forwards when the step
    begins, backwards when it ends. Equal stages: (M + P - 1) times one.
    """
    forward_s = times.forward_s.mean(axis=1)
    backward_s = (times.backward_s + times.weight_s).mean(axis=1)
    both_s = forward_s + backward_s
    num_stages, num_microbatches = times.forward_s.shape
    way_s = np.concatenate([[0.0], np.cumsum(2.0 * times.message_s.mean(axis=1))])
    before_s = np.concatenate([[0.0], np.cumsum(both_s)])[:-1] + way_s
    after_s = both_s.sum() - np.cumsum(both_s) + way_s[-1] - way_s
    following = num_stages - 1 - np.arange(num_stages)
    meanwhile = np.minimum(following, num_microbatches - 1)
    begin_s = np.maximum(after_s - meanwhile * forward_s, 0.0)
    end_s = np.maximum(after_s - meanwhile * backward_s, 0.0) * (num_microbatches > following)
    own_s = num_microbatches * both_s
    whole_s = float((before_s + own_s + begin_s + end_s).max())
    back_s = np.concatenate([[0.0], np.cumsum(backward_s)])[:-1] + 0.5 * way_s
    ends: Array = whole_s - back_s
    return ends


def _with_exchange(found: Sequence[PipelineTimes], ends: Sequence[Array]) -> float:
    return with_exchange(
        np.concatenate(list(ends)),
        np.concatenate([times.sync_s for times in found]),
        np.concatenate([(0, *times.cuts[:-1]) for times in found]),
        np.concatenate([times.cuts for times in found]),
    )


def with_exchange(ends_s: Array, sync_s: Array, first: Array, last: Array) -> float:
    """When the last exchange of gradients ends.

    Each begins when all stages with a layer of it have ended, and takes as long as the slowest's.

    Args:
        ends_s: [stages of all pipelines] when each has run its last chunk.
        sync_s: its exchange.
        first: its first layer.
        last: the layer after its last.
    """
    meets = (first[:, None] < last[None, :]) & (first[None, :] < last[:, None])
    begins_s = np.where(meets, ends_s[None, :], 0.0).max(axis=1)
    takes_s = np.where(meets, sync_s[None, :], 0.0).max(axis=1)
    return float((begins_s + takes_s).max())
