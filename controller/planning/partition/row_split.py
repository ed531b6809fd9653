"""Lockstep groups: common stage boundaries of pipelines that share experts, and their rows.

A pipeline without experts is a group by itself. In a group a stage takes as long as its slowest
pipeline: the rows of a micro-batch, and what the micro-batch costs whatever its rows (launches,
latencies), which a slow rank multiplies, too. Experts run at the speed of all ranks together.
Boundaries and rows are optimised in turns, each exactly for the other. Where each stage has shares
of the rows of its own, its time for any layers follows from them, and both are optimised at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.model.problem import LEAST_S
from pacekeeper.controller.planning.partition.layer_split import best_stage_boundaries
from pacekeeper.controller.planning.partition_cost.compute import (
    Array,
    GroupCost,
    LayerSums,
    constant_s,
    expert_row_s,
    fits,
    row_s,
    spans,
)
from pacekeeper.core.layout.pipeline_schedule import Schedule, num_in_flight

Place = tuple[int, int, int]  # a stage, how many there are, ranks that share its experts

NEXT_TO_NOTHING = 1e-9  # of the slowest stage
TURNS = 4  # of cuts and rows; the best of them is kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRowTimes:
    """Times of the stages of a lockstep group, forward and backward.

    Attributes:
        own_s: [pipelines, stages] of one row of the pipeline.
        constant_s: [pipelines, stages] of a micro-batch, whatever its rows.
        expert_s: [stages] of one row of the group.
    """

    own_s: Array
    constant_s: Array
    expert_s: Array

    def step_s(self, rows: Array) -> float:
        """Time of a step by the mean micro-batch; rows [pipelines, stages, micro-batches]."""
        stages_s = (rows * self.own_s[:, :, None] + self.constant_s[:, :, None]).max(axis=0)
        stages_s += rows.sum(axis=0) * self.expert_s[:, None]
        means_s = stages_s.mean(axis=1)
        return float(means_s.sum() + (rows.shape[2] - 1) * means_s.max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LockstepPlan:
    """Stage boundaries of a lockstep group, and the times that its rows follow from.

    Attributes:
        ends: the layer after each stage.
        times: of these stages.
        is_by_stage: pipelines compute other rows at each stage.
        row_s: slope of the step time in rows of the group.
        constant_s: its intercept.
    """

    ends: tuple[int, ...]
    times: StageRowTimes
    is_by_stage: bool
    row_s: float
    constant_s: float

    def rows(
        self,
        total: int,
        *,
        num_microbatches: int,
        least: int,
        most: int | None = None,
        multiple: int = 1,
    ) -> tuple[tuple[int, ...], ...]:
        """Whole rows of a step, the least time of the slowest stage in each micro-batch.

        Args:
            total: rows of all pipelines.
            num_microbatches: of each pipeline.
            least: rows of a pipeline.
            most: rows of a pipeline; None: no limit.
            multiple: as of `share_rows`.

        Returns:
            [stages][pipelines]; of one stage only where the rows are the same at all.
        """
        times = self.times
        number = len(times.own_s)
        stages = range(len(self.ends))
        parts = [slice(at, at + 1) for at in stages] if self.is_by_stage else [slice(None)]
        return tuple(
            share_rows(
                total,
                times.own_s[:, part],
                num_microbatches * times.constant_s[:, part] + total * times.expert_s[None, part],
                [least] * number,
                None if most is None else [most] * number,
                multiple=multiple,
            )
            for part in parts
        )

    def step_s(
        self, rows: Sequence[Sequence[int]], num_microbatches: int, *, is_dealt: bool
    ) -> float:
        """Time of a step with whole rows.

        Args:
            rows: as of `rows`.
            num_microbatches: of each pipeline.
            is_dealt: by the rule of `core/layout/apportion`; else as `lock_step_batches`.
        """
        numbers = np.arange(num_microbatches)
        counts = np.array(rows).T[:, :, None]  # [pipelines, stages or 1, 1]
        if is_dealt:
            ends = counts.cumsum(axis=0)
            before = [(at - numbers - 1) // num_microbatches for at in (ends, ends - counts)]
            sizes = before[0] - before[1]
        else:
            sizes = (counts + numbers) // num_microbatches
        number, num_stages = self.times.own_s.shape
        return self.times.step_s(np.broadcast_to(sizes, (number, num_stages, num_microbatches)))


def plan_lockstep_group(
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    *,
    rows: int,
    num_microbatches: int,
    unevenness: float = 1.0,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    ends: tuple[int, ...] | None = None,
    rows_per_microbatch: int = 0,
    is_by_stage: bool = False,
) -> LockstepPlan | None:
    """Cuts of pipelines in lock-step, and the times of their stages.

    Args:
        costs: costs[pipeline][stage].
        sums: prefix sums over layers.
        rows: about so many, of all pipelines.
        num_microbatches: of each.
        unevenness: of the experts, as in `PartitionProblem`.
        schedule: how long activations are kept.
        ends: the cuts, where they are given.
        rows_per_microbatch: the most, where there is a limit; 0: as many as there are.
        is_by_stage: pipelines compute other rows at each stage.

    Returns:
        None where they do not fit into memory; given cuts are not checked.
    """
    micro = _MicroBatches(
        rows=rows, count=num_microbatches, most=rows_per_microbatch, schedule=schedule
    )
    find = _cuts_by_stage if is_by_stage else _cuts_by_pipeline
    found = find(costs, sums, micro, unevenness, ends)
    if found is None:
        return None
    times = _stage_times(costs, sums, found, unevenness)
    plan = LockstepPlan(ends=found, times=times, is_by_stage=is_by_stage, row_s=0.0, constant_s=0.0)
    best = plan.rows(rows, num_microbatches=num_microbatches, least=0)
    step_s = times.step_s(_even(best, costs, num_microbatches))
    rest_s = times.step_s(np.zeros((*times.own_s.shape, num_microbatches)))
    return replace(plan, row_s=(step_s - rest_s) / rows, constant_s=rest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatches:
    """Rows of a step and `count` micro-batches, each of `most` rows of a pipeline (0: no limit)."""

    rows: int
    count: int
    most: int
    schedule: Schedule

    @property
    def per_batch(self) -> float:
        return self.rows / self.count

    def limit(self, sums: LayerSums, groups: Sequence[GroupCost], rows: Array, at: Place) -> Array:
        """0 where layers [a, b) fit into the memory of the stage's groups, else infinite.

        Args:
            sums: prefix sums over layers.
            groups: of the stage.
            rows: [groups] of a micro-batch.
            at: number of the stage, of how many, and ranks that share its experts.
        """
        stage, num_stages, sharers = at
        held = num_in_flight(
            self.schedule, stage, num_stages=num_stages, num_microbatches=self.count
        )
        limit = np.zeros((sums.num_layers + 1, sums.num_layers + 1))
        for group, count in zip(groups, rows.tolist(), strict=True):
            most = ceil(count - 1e-9)
            most = min(most, self.most) if self.most else most
            limit = np.maximum(limit, fits(sums, group, rows=most, num_held=held, sharers=sharers))
        return limit


def _cuts_by_pipeline(
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    micro: _MicroBatches,
    unevenness: float,
    ends: tuple[int, ...] | None,
) -> tuple[int, ...] | None:
    """The best cuts for rows that are the same at all stages; in turns with these rows."""
    if ends is not None:
        return ends
    best: tuple[int, ...] | None = None
    best_s = inf
    for weights in _starts(costs, sums):
        last: tuple[int, ...] = ()
        for _ in range(TURNS if len(costs) > 1 else 1):
            cuts = _cut(costs, sums, weights, micro, unevenness)
            if cuts is None or cuts == last:
                break
            last = cuts
            times = _stage_times(costs, sums, cuts, unevenness)
            constants_s = micro.count * times.constant_s + micro.rows * times.expert_s
            counts = share_rows(micro.rows, times.own_s, constants_s, [0] * len(costs))
            weights = np.array(counts) / micro.rows
            step_s = times.step_s(_even([counts], costs, micro.count))
            if step_s < best_s:
                best, best_s = cuts, step_s
    return best


def _cuts_by_stage(
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    micro: _MicroBatches,
    unevenness: float,
    ends: tuple[int, ...] | None,
) -> tuple[int, ...] | None:
    """The best cuts, where the pipelines of each stage have rows by speed.

    A pipeline without rows runs a placeholder, which takes its constant time.
    """
    if ends is not None:
        return ends
    table = []
    for stage, groups in enumerate(zip(*costs, strict=True)):
        own_s = np.stack([spans(row_s(sums, group)) for group in groups])
        constants_s = np.stack([spans(constant_s(sums, group)) for group in groups])
        expert_s = expert_row_s(sums, groups, unevenness)
        some = np.isfinite(constants_s[0])
        own_s = np.maximum(np.where(some, own_s, 1.0), LEAST_S)  # layers of experts alone take none
        constants_s = np.where(some, constants_s, 0.0)
        shared_s = np.where(some, expert_s[None, :] - expert_s[:, None], 0.0)
        together_s = micro.per_batch + (constants_s / own_s).sum(axis=0)
        together_s /= (1.0 / own_s).sum(axis=0)
        slowest_s = np.maximum(together_s, constants_s.max(axis=0))
        sharers = sum(group.num_ranks for group in groups)
        rows = np.full(len(groups), micro.per_batch / len(groups))  # checked again when they differ
        limit = micro.limit(sums, groups, rows, (stage, len(costs[0]), sharers))
        table.append(np.where(some, slowest_s + micro.per_batch * shared_s + limit, np.inf))
    found = best_stage_boundaries(table, micro.count)
    return None if found is None else found.ends


def _even(rows: Sequence[Sequence[int]], costs: Sequence[Sequence[GroupCost]], count: int) -> Array:
    """[pipelines, stages, micro-batches] with as many rows in each micro-batch, not whole ones.

    rows [stages or 1][pipelines]: of the step.
    """
    each = np.array(rows, dtype=float).T[:, :, None] / count
    return np.broadcast_to(each, (len(costs), len(costs[0]), count))


def _starts(costs: Sequence[Sequence[GroupCost]], sums: LayerSums) -> list[Array]:
    """Rows to begin with: as many for all; by the pace of each pipeline's slowest group."""
    even = np.full(len(costs), 1.0 / len(costs))
    if len(costs) == 1:
        return [even]
    slowest = [max(float(row_s(sums, group)[-1]) for group in of) for of in costs]
    paces = 1.0 / np.array(slowest)
    by_pace = paces / paces.sum()
    return [even] if np.allclose(even, by_pace) else [even, by_pace]


def _cut(
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    weights: Array,
    micro: _MicroBatches,
    unevenness: float,
) -> tuple[int, ...] | None:
    """The best cuts for weights [pipelines]; None where they do not fit into memory."""
    num_stages = len(costs[0])
    per_batch = weights * micro.per_batch
    sharers = sum(group.num_ranks for of_pipeline in costs for group in of_pipeline)
    sharers = max(1, sharers // num_stages)
    table = []
    for stage in range(num_stages):
        groups = [of_pipeline[stage] for of_pipeline in costs]
        expert = expert_row_s(sums, groups, unevenness)
        slowest = np.zeros((sums.num_layers + 1, sums.num_layers + 1))
        for group, count in zip(groups, per_batch.tolist(), strict=True):
            own = count * row_s(sums, group) + constant_s(sums, group)
            slowest = np.maximum(slowest, spans(own))
        limit = micro.limit(sums, groups, per_batch, (stage, num_stages, sharers))
        some = np.isfinite(slowest)
        shared = np.where(some, expert[None, :] - expert[:, None], 0.0) * per_batch.sum()
        table.append(slowest + shared + limit)
    cuts = best_stage_boundaries(table, micro.count)
    return None if cuts is None else cuts.ends


def _stage_times(
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    ends: tuple[int, ...],
    unevenness: float,
) -> StageRowTimes:
    """The times of stages with these cuts."""
    first, end = [0, *ends[:-1]], list(ends)
    stages = range(len(ends))

    def between(of_layers: Array) -> Array:
        """[..., stages, layers + 1] sums over layers to those of the stages."""
        found: Array = of_layers[..., stages, end] - of_layers[..., stages, first]
        return found

    def of_groups(sums_s: Callable[[LayerSums, GroupCost], Array]) -> Array:
        return between(np.array([[sums_s(sums, one) for one in groups] for groups in costs]))

    return StageRowTimes(
        own_s=of_groups(row_s),
        constant_s=of_groups(constant_s),
        expert_s=between(
            np.array([expert_row_s(sums, [of[at] for of in costs], unevenness) for at in stages])
        ),
    )


def share_rows(
    total: int,
    row_s: npt.ArrayLike,
    constants_s: npt.ArrayLike,
    least: Sequence[int],
    most: Sequence[int] | None = None,
    *,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Whole rows for units of which each stage takes rows * row_s + constant: the least maximum.

    Args:
        total: rows of all units.
        row_s: [units] or [units, stages] seconds of a row; almost nothing may be 0.
        constants_s: of the same shape, seconds whatever the rows.
        least: rows of each unit.
        most: rows of each unit; None: no limit.
        multiple: rows are multiples of it, except the least and those of the remainder.

    Raises:
        ValueError: there are fewer rows than the least, or more than the most.
    """
    floor = np.array(least)
    ceiling = np.full(len(floor), total) if most is None else np.array(most)
    if not floor.sum() <= total <= np.maximum(ceiling, floor).sum():
        raise ValueError(f"{total} rows, {floor.sum()} to {ceiling.sum()} are possible")
    slopes = np.array(row_s, dtype=float).reshape(len(floor), -1)
    rest_s = np.array(constants_s, dtype=float).reshape(slopes.shape)
    slopes = np.maximum(slopes, max(NEXT_TO_NOTHING * float(slopes.max() + rest_s.max()), LEAST_S))

    def counts_within(limit_s: float) -> npt.NDArray[np.int64]:
        found = np.floor(((limit_s - rest_s) / slopes).min(axis=1) + 1e-9)
        whole = np.minimum(found, ceiling) // multiple * multiple
        counts: npt.NDArray[np.int64] = np.maximum(whole, floor).astype(np.int64)
        return counts

    low, high = 0.0, float((rest_s + total * slopes).max())
    for _ in range(100):
        middle = 0.5 * (low + high)
        if counts_within(middle).sum() > total:
            high = middle
        else:
            low = middle
    counts = counts_within(low)
    while counts.sum() < total:
        left = np.minimum(ceiling - counts, total - counts.sum())
        more = np.minimum(multiple - counts % multiple, left)
        longest = -(-(counts + more) // multiple) * multiple  # micro-batch, times their number
        taken_s = (longest[:, None] * slopes + rest_s).max(axis=1)
        at = int(np.argmin(np.where(more > 0, taken_s, np.inf)))
        counts[at] += more[at]
    return tuple(counts.tolist())


def micro_batches(rows: int, *, per_batch: int, num_microbatches: int) -> tuple[int, ...]:
    """Rows of each: as many micro-batches as in the baseline, more where they would be larger.

    Fewer only where there are fewer rows. The smaller ones come first.
    """
    number = min(rows, max(num_microbatches, ceil(rows / per_batch)))
    least, more = divmod(rows, number)
    return (least,) * (number - more) + (least + 1,) * more


def lock_step_batches(rows: int, num_microbatches: int) -> tuple[int, ...]:
    """As many micro-batches for all. Raises ValueError for fewer rows than these."""
    if rows < num_microbatches:
        raise ValueError(f"{rows} rows can not be divided into {num_microbatches} micro-batches")
    return micro_batches(rows, per_batch=rows, num_microbatches=num_microbatches)
