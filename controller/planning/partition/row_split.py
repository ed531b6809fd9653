"""Lockstep groups: common stage boundaries of pipelines that share experts, and their rows.

A pipeline without experts is a group by itself. In a group a stage takes as long as its slowest
pipeline, and its experts run at the speed of all ranks together; boundaries and rows are optimised
in turns, each exactly for the other. Where each stage has shares of the rows of its own, its time
for any layers follows from them, and both are optimised at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

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
from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.pipeline_schedule import Schedule, num_in_flight

Place = tuple[int, int, int]  # a stage, how many there are, ranks that share its experts

NEXT_TO_NOTHING = 1e-9  # of the slowest stage
TURNS = 4  # of cuts and rows; the best of them is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepPlan:
    """Stage boundaries and row weights of a lockstep group.

    Attributes:
        ends: the layer after each stage.
        weights: [pipelines][stages] rows of each pipeline, 1 in all; of one stage only where the
            rows are the same at all stages.
        row_s: slope of the step time in rows of the group.
        constant_s: its intercept.
    """

    ends: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    row_s: float
    constant_s: float

    @property
    def mean_weights(self) -> tuple[float, ...]:
        """Rows of each pipeline in the mean over the stages."""
        return tuple(sum(of_stages) / len(of_stages) for of_stages in self.weights)


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
    """Cuts and weights of pipelines in lock-step.

    Args:
        costs: costs[pipeline][stage].
        sums: prefix sums over layers.
        rows: about so many, of all pipelines.
        num_microbatches: of each.
        unevenness: of the experts, as in `PartitionProblem`.
        schedule: how long activations are kept.
        ends: the cuts, where they are given.
        rows_per_microbatch: the most, where there is a limit; 0: as many as there are.
        is_by_stage: each stage has weights of its own.

    Returns:
        None where they do not fit into memory; given cuts are not checked.
    """
    micro = _MicroBatches(
        rows=rows, count=num_microbatches, most=rows_per_microbatch, schedule=schedule
    )
    plan_group = _rows_by_stage if is_by_stage else _rows_by_pipeline
    best = plan_group(costs, sums, micro, unevenness, ends)
    if best is None:
        return None
    rest = sum(
        max(float(constant_s(sums, group)[-1]) for group in groups)
        for groups in zip(*costs, strict=True)
    ) / len(costs[0])
    return LockstepPlan(
        ends=best.ends,
        weights=best.weights,
        row_s=best.row_s,
        constant_s=rest / len(costs[0]) * (num_microbatches - 1) + rest,
    )


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


def _rows_by_pipeline(
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    micro: _MicroBatches,
    unevenness: float,
    ends: tuple[int, ...] | None,
) -> LockstepPlan | None:
    """The best cuts, and rows that are the same at all stages; in turns."""
    best: LockstepPlan | None = None
    for start in _starts(costs, sums):
        weights = start
        last: tuple[int, ...] = ()
        for _ in range(TURNS if len(costs) > 1 else 1):
            cuts = ends or _cut(costs, sums, weights, micro, unevenness)
            if cuts is None or cuts == last:
                break
            last = cuts
            own, fixed = _row_times(costs, sums, cuts, unevenness)
            balanced = row_weights(own, fixed)
            for tried in (weights, balanced):
                plan = _priced(cuts, tried[:, None], own, fixed, micro.count)
                if best is None or plan.row_s < best.row_s:
                    best = plan
            weights = balanced
    return best


def _rows_by_stage(
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    micro: _MicroBatches,
    unevenness: float,
    ends: tuple[int, ...] | None,
) -> LockstepPlan | None:
    """The best cuts, where the pipelines of each stage have rows by speed."""
    table = []
    for stage, groups in enumerate(zip(*costs, strict=True)):
        own = np.stack([spans(row_s(sums, group)) for group in groups])
        fixed = np.stack([spans(constant_s(sums, group)) for group in groups]).max(axis=0)
        expert = expert_row_s(sums, groups, unevenness)
        some = np.isfinite(fixed)
        shared = np.where(some, expert[None, :] - expert[:, None], 0.0)
        with np.errstate(divide="ignore"):  # layers of experts alone take no time of a pipeline
            together = 1.0 / np.where(some, (1.0 / own).sum(axis=0), 1.0)
        sharers = sum(group.num_ranks for group in groups)
        rows = np.full(len(groups), micro.per_batch / len(groups))  # checked again when they differ
        limit = micro.limit(sums, groups, rows, (stage, len(costs[0]), sharers))
        taken = micro.per_batch * (together + shared) + fixed
        table.append(np.where(some, taken + limit, np.inf))
    if ends is None:
        found = best_stage_boundaries(table, micro.count)
        if found is None:
            return None
        ends = found.ends
    own, fixed = _row_times(costs, sums, ends, unevenness)
    paces = 1.0 / np.maximum(own, NEXT_TO_NOTHING * float(own.max() + fixed.max()))
    return _priced(ends, paces / paces.sum(axis=0), own, fixed, micro.count)


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


def _row_times(
    costs: Sequence[Sequence[GroupCost]],
    sums: LayerSums,
    ends: tuple[int, ...],
    unevenness: float,
) -> tuple[Array, Array]:
    """Seconds of one row: own [pipelines, stages], and experts [stages] of all that share them."""
    first, end = [0, *ends[:-1]], list(ends)
    stages = range(len(ends))
    own = np.array([[row_s(sums, group) for group in of_pipeline] for of_pipeline in costs])
    experts = np.array(
        [expert_row_s(sums, [of[stage] for of in costs], unevenness) for stage in stages]
    )
    return (
        own[:, stages, end] - own[:, stages, first],
        experts[stages, end] - experts[stages, first],
    )


def row_weights(own: Array, experts: Array) -> Array:
    """Rows [pipelines], 1 in all, with the least slowest stage: bisection on its time.

    own [pipelines, stages]: seconds of a pipeline for one row of its own; experts [stages]: for one
    row of all that share them. A stage without work of its own takes next to nothing.
    """
    own = np.maximum(own, NEXT_TO_NOTHING * float(own.max() + experts.max()))
    low = float(experts.max())
    high = low + float(own.max())
    for _ in range(60):
        middle = 0.5 * (low + high)
        taken = ((middle - experts)[None, :] / own).min(axis=1).clip(min=0.0)
        if taken.sum() >= 1.0:
            high = middle
        else:
            low = middle
    taken = ((high - experts)[None, :] / own).min(axis=1).clip(min=0.0)
    result: Array = taken / taken.sum()
    return result


def _priced(
    ends: tuple[int, ...], weights: Array, own: Array, experts: Array, num_microbatches: int
) -> LockstepPlan:
    """weights: [pipelines, stages], or [pipelines, 1] for all stages; own, experts: of one row."""
    stages = (weights * own).max(axis=0) + experts
    whole = float(stages.sum() + (num_microbatches - 1) * stages.max()) / num_microbatches
    return LockstepPlan(
        ends=ends, weights=tuple(map(tuple, weights.tolist())), row_s=whole, constant_s=0.0
    )


def share_rows(
    total: int, row_s: Sequence[float], constants_s: Sequence[float], least: Sequence[int]
) -> tuple[int, ...]:
    """Whole rows for units whose steps take rows * row_s + constant: the least maximum.

    Each gets `least` at least. Raises ValueError where there are fewer rows than that.
    """
    if sum(least) > total:
        raise ValueError(f"{total} rows, at least {sum(least)} are needed")
    low, high = 0.0, max(c + total * r for r, c in zip(row_s, constants_s, strict=True))
    slopes, fixed, floor = np.array(row_s), np.array(constants_s), np.array(least)
    for _ in range(100):
        middle = 0.5 * (low + high)
        counts = np.maximum(np.floor((middle - fixed) / slopes + 1e-9), floor)
        if counts.sum() > total:
            high = middle
        else:
            low = middle
    counts = np.maximum(np.floor((low - fixed) / slopes + 1e-9), floor).astype(int)
    while counts.sum() < total:
        counts[int(np.argmin((counts + 1) * slopes + fixed))] += 1
    return tuple(counts.tolist())


def rows_at_least(total: int, weights: Sequence[float], least: int) -> tuple[int, ...]:
    """Rows by weight; those that would get fewer get `least`, the others divide the rest."""
    fixed: set[int] = set()
    while True:
        free = [at for at in range(len(weights)) if at not in fixed]
        counts = dict(
            zip(
                free,
                apportion(total - least * len(fixed), [weights[at] for at in free]),
                strict=True,
            )
        )
        low = {at for at, count in counts.items() if count < least}
        if not low:
            return tuple(counts.get(at, least) for at in range(len(weights)))
        fixed |= low


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
