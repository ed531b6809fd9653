"""Builds a partition from candidate groups: shards, then layers, then rows.

Results are cached by shape: most groups of a large job are healthy and equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, inf

import numpy as np

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.group_search import (
    CandidateGroups,
    Ranks,
    shard_ranks,
)
from pacekeeper.controller.planning.partition.row_deal import deal_rows
from pacekeeper.controller.planning.partition.row_split import (
    LockstepPlan,
    lock_step_batches,
    micro_batches,
    plan_lockstep_group,
    share_rows,
)
from pacekeeper.controller.planning.partition.shard_split import GroupShape, shape_group
from pacekeeper.controller.planning.partition_cost.compute import (
    GroupCost,
    held_bytes,
    layer_sums,
    shard_cost,
)
from pacekeeper.controller.planning.partition_cost.step_time import Pricer
from pacekeeper.core.layout.apportion import apportion, num_micro_batches
from pacekeeper.core.layout.layout import ShardRun
from pacekeeper.core.layout.pipeline_schedule import Schedule

ROUNDS = 2  # of rows set right by the times that they led to
NUM_COUNTS = 8  # of micro-batches, from the fewest to those that rows by speed need

Shapes = tuple[tuple[GroupShape, ...], ...]
StageRows = tuple[tuple[int, ...], ...]  # [stages, or one for all][pipelines] of a unit


@dataclass(frozen=True, slots=True, kw_only=True)
class _LockstepGroup:
    """Pipelines that run in lock-step: their shapes and their plan."""

    members: tuple[int, ...]
    expert_group: int | None
    shapes: Shapes
    plan: LockstepPlan


class Builder:
    """Builds partitions of one schedule for one problem; remembers shapes and cuts."""

    def __init__(self, problem: PartitionProblem, pricer: Pricer, schedule: Schedule) -> None:
        self.problem = problem
        self.pricer = pricer
        self.schedule = schedule
        self._rows_per_microbatch = problem.rows_per_microbatch
        self.sums = layer_sums(problem.model, problem.links)
        self.num_microbatches = max(len(p.micro_batches) for p in problem.baseline.pipelines)
        self.per_batch = max(max(p.micro_batches) for p in problem.baseline.pipelines)
        self._shapes: dict[object, GroupShape | None] = {}
        self._units: dict[object, LockstepPlan | None] = {}

    def build(
        self, draft: CandidateGroups, *, is_tight: bool = False, is_by_stage: bool = False
    ) -> Partition | None:
        """The partition of these groups.

        Args:
            draft: the groups.
            is_tight: shards by memory where speed asks more.
            is_by_stage: pipelines that share experts have other rows at each stage.

        Returns:
            None where the model does not fit, or rows by stage are asked for and there are none.
        """

        def shapes(at: int) -> list[GroupShape | None]:
            groups = draft.groups[at]
            return [self._shape(ranks, len(groups), is_tight) for ranks in groups]

        if is_by_stage and not self._has_rows_by_stage(draft.expert_groups, len(draft.groups[0])):
            return None
        units = self._find_units(draft.expert_groups, shapes, is_by_stage=is_by_stage)
        return None if units is None else self._divided(units)

    def rebuild(
        self, now: Partition, *, has_other_shards: bool, is_by_stage: bool = False
    ) -> Partition | None:
        """The same groups and layers with the best rows, and shards by speed if asked for.

        Shards leave every rank at least one. None where a group has more ranks than shards, there
        are fewer rows than pipelines need, or rows by stage are asked for and there are none.
        """
        problem, device_of = self.problem, self.problem.device_of

        def shapes(at: int) -> list[GroupShape | None]:
            if has_other_shards:
                return [
                    shape_group(shard_ranks(cell), self.sums, device_of, is_whole=True)
                    for cell in now.pipelines[at].cells
                ]
            return [
                GroupShape(
                    attention=cell.attention,
                    mlp=cell.mlp,
                    cost=shard_cost(cell, problem.model, problem.links, device_of),
                )
                for cell in now.pipelines[at].cells
            ]

        expert_groups = [pipeline.expert_group for pipeline in now.pipelines]
        cuts = [pipeline.cuts for pipeline in now.pipelines]
        if is_by_stage and not self._has_rows_by_stage(expert_groups, len(cuts[0])):
            return None
        units = self._find_units(expert_groups, shapes, cuts, is_by_stage=is_by_stage)
        return None if units is None else self._divided(units)

    def _divided(self, units: Sequence[_LockstepGroup]) -> Partition | None:
        """The partition of these units with the best rows; None: there are too few."""
        least = [len(unit.members) * self._least_rows(unit) for unit in units]
        if sum(least) > self.problem.rows_per_step:
            return None
        slopes = [unit.plan.row_s for unit in units]
        constants = [unit.plan.constant_s for unit in units]
        numbers = self._numbers_of_micro_batches(units, least)
        best: Partition | None = None
        best_s = inf
        for _ in range(ROUNDS):
            of_units = self._best_rows(units, numbers, slopes, constants, least)
            partition = self._assemble(units, of_units)
            found = self.pricer.price(partition, is_exact=False)
            if found.step_s < best_s:
                best, best_s = partition, found.step_s
            rows = [sum(of_stages[0]) for of_stages in of_units]
            slopes = [
                max(found.pipeline_s[unit.members[0]] - constant, slope * count * 0.5) / count
                for unit, constant, slope, count in zip(units, constants, slopes, rows, strict=True)
            ]
        return best

    def _best_rows(
        self,
        units: Sequence[_LockstepGroup],
        numbers: Sequence[int],
        slopes: Sequence[float],
        constants: Sequence[float],
        least: Sequence[int],
    ) -> list[StageRows]:
        """The rows of each unit's pipelines, with the best of these numbers of micro-batches."""
        has_lockstep = any(len(unit.members) > 1 for unit in units)
        at_once = self._rows_per_microbatch
        best: list[StageRows] = []
        best_s = inf
        for count in numbers:
            most = [at_once * count * len(unit.members) for unit in units] if at_once else None
            rows = share_rows(self.problem.rows_per_step, slopes, constants, least, most)
            for multiple in (1, count) if has_lockstep else (1,):
                of_units = [
                    unit.plan.rows(
                        number,
                        num_microbatches=count,
                        least=self._least_rows(unit),
                        most=at_once * count or None,
                        multiple=multiple,
                    )
                    for unit, number in zip(units, rows, strict=True)
                ]
                run = count
                if at_once:
                    run = num_micro_batches(max(map(max, chain(*of_units))), at_once)
                step_s = max(
                    unit.plan.step_s(of_stages, run, is_dealt=at_once > 0)
                    for unit, of_stages in zip(units, of_units, strict=True)
                )
                if step_s < best_s:
                    best, best_s = of_units, step_s
        return best

    def _numbers_of_micro_batches(
        self, units: Sequence[_LockstepGroup], least: Sequence[int]
    ) -> list[int]:
        """Numbers of micro-batches to try: each costs its launches, fewer limit uneven rows."""
        at_once = self._rows_per_microbatch
        if not at_once:
            return [self.num_microbatches]
        total = self.problem.rows_per_step
        fewest = num_micro_batches(ceil(total / sum(len(u.members) for u in units)), at_once)
        slopes = [unit.plan.row_s for unit in units]
        constants = [unit.plan.constant_s for unit in units]
        rows = share_rows(total, slopes, constants, least)
        most = max(
            max(map(max, unit.plan.rows(count, num_microbatches=fewest, least=1)))
            for unit, count in zip(units, rows, strict=True)
        )
        wanted = num_micro_batches(most, at_once)
        return sorted({*np.linspace(fewest, wanted + 1, NUM_COUNTS, dtype=int).tolist()})

    def _find_units(
        self,
        expert_groups: Sequence[int | None],
        shapes_of: Callable[[int], list[GroupShape | None]],
        cuts: Sequence[tuple[int, ...]] | None = None,
        *,
        is_by_stage: bool = False,
    ) -> list[_LockstepGroup] | None:
        """Pipelines that share experts are one unit, each other one is a unit by itself.

        `shapes_of`: the tensor groups of a pipeline; None among them: it is not possible.
        """
        members: dict[object, list[int]] = {}
        for at, expert_group in enumerate(expert_groups):
            alone = ("alone", at) if expert_group is None else expert_group
            members.setdefault(alone, []).append(at)
        pipelines_rows = self.problem.rows_per_step / len(expert_groups)
        units = []
        for of_unit in members.values():
            shapes = []
            for at in of_unit:
                found = shapes_of(at)
                shapes.append(tuple(shape for shape in found if shape is not None))
                if len(shapes[-1]) < len(found):
                    return None
            plan = self._plan(
                tuple(tuple(shape.cost for shape in of) for of in shapes),
                ceil(len(of_unit) * pipelines_rows),
                None if cuts is None else cuts[of_unit[0]],
                is_by_stage,
            )
            if plan is None:
                return None
            units.append(
                _LockstepGroup(
                    members=tuple(of_unit),
                    expert_group=expert_groups[of_unit[0]],
                    shapes=tuple(shapes),
                    plan=plan,
                )
            )
        return units

    def _shape(self, ranks: Ranks, num_stages: int, is_tight: bool) -> GroupShape | None:
        device_of = self.problem.device_of
        devices = [device_of[rank] for rank in ranks]
        nodes = [device.node for device in devices]
        key = (
            tuple((d.speed, d.memory_bytes, d.link_speed) for d in devices),
            len(set(nodes)) == 1,
            num_stages if is_tight else 0,
        )
        if key not in self._shapes:
            self._shapes[key] = shape_group(
                range(len(ranks)),
                self.sums,
                {at: replace(device, rank=at) for at, device in enumerate(devices)},
                most_share=self._most_share(ranks, num_stages) if is_tight else 1.0,
                is_whole=self.problem.is_whole,
            )
        shape = self._shapes[key]
        if shape is None:
            return None
        return replace(
            shape, attention=_renamed(shape.attention, ranks), mlp=_renamed(shape.mlp, ranks)
        )

    def _most_share(self, ranks: Ranks, num_stages: int) -> float:
        """Largest part of the shards whose even share of the layers fits the memory of a rank."""
        part = min(1.0, ceil(len(self.problem.model.layers) / num_stages) / self.sums.num_layers)
        kept, sharers = min(num_stages, self.num_microbatches), len(self.problem.living)

        def used(share: float) -> float:
            of_rank = held_bytes(
                self.sums, share, share, rows=self.per_batch, num_held=kept, sharers=sharers
            )
            return part * float(of_rank[-1])

        whole = used(0.0)
        cut = used(1.0) - whole
        memory_bytes = min(self.problem.device_of[rank].memory_bytes for rank in ranks)
        return min(1.0, max((memory_bytes - whole) / max(cut, 1.0), 0.0))

    def _plan(
        self,
        costs: tuple[tuple[GroupCost, ...], ...],
        rows: int,
        ends: tuple[int, ...] | None,
        is_by_stage: bool,
    ) -> LockstepPlan | None:
        key = (costs, rows, ends, is_by_stage)
        if key not in self._units:
            self._units[key] = plan_lockstep_group(
                costs,
                self.sums,
                rows=rows,
                num_microbatches=min(self.num_microbatches, max(rows // len(costs), 1)),
                unevenness=self.problem.unevenness,
                schedule=self.schedule,
                ends=ends,
                rows_per_microbatch=self._rows_per_microbatch,
                is_by_stage=is_by_stage,
            )
        return self._units[key]

    def _has_rows_by_stage(self, expert_groups: Sequence[int | None], num_stages: int) -> bool:
        """Whether the trainer deals rows by stage, and several pipelines share all experts."""
        is_one = len(expert_groups) > 1 and {*expert_groups} == {expert_groups[0]} != {None}
        return self._rows_per_microbatch > 0 and num_stages > 1 and is_one

    def _least_rows(self, unit: _LockstepGroup) -> int:
        is_alone = unit.expert_group is None or self._rows_per_microbatch
        return 1 if is_alone else self.num_microbatches

    def _assemble(
        self, units: Sequence[_LockstepGroup], of_units: Sequence[StageRows]
    ) -> Partition:
        """The partition of units with these rows."""
        pipelines: dict[int, Pipeline] = {}
        by_stage: dict[int, tuple[int, ...]] = {}
        for unit, of_stages in zip(units, of_units, strict=True):
            plan = unit.plan
            counts = apportion(sum(of_stages[0]), map(sum, zip(*of_stages, strict=True)))
            firsts = (0, *plan.ends[:-1])
            for place, (at, shapes) in enumerate(zip(unit.members, unit.shapes, strict=True)):
                cells = tuple(
                    StageShard(first_layer=first, end_layer=end, attention=s.attention, mlp=s.mlp)
                    for s, first, end in zip(shapes, firsts, plan.ends, strict=True)
                )
                pipelines[at] = Pipeline(
                    cells=cells,
                    micro_batches=self._batches(counts[place], unit),
                    expert_group=unit.expert_group,
                )
                by_stage[at] = tuple(of[place] for of in of_stages)
        order = sorted(pipelines)
        found = tuple(pipelines[at] for at in order)
        if self._rows_per_microbatch:
            has_stages = len(units) == 1 and len(by_stage[order[0]]) > 1
            stage_rows = [by_stage[at] for at in order] if has_stages else ()
            found = deal_rows(found, self._rows_per_microbatch, stage_rows)
        return Partition(pipelines=found, schedule=self.schedule)

    def _batches(self, rows: int, unit: _LockstepGroup) -> tuple[int, ...]:
        """Micro-batches of a pipeline; one where `deal_rows` deals them."""
        if self._rows_per_microbatch:
            return (rows,)
        if unit.expert_group is None:
            return micro_batches(
                rows, per_batch=self.per_batch, num_microbatches=self.num_microbatches
            )
        return lock_step_batches(rows, self.num_microbatches)


def _renamed(runs: Sequence[ShardRun], ranks: Ranks) -> tuple[ShardRun, ...]:
    return tuple(ShardRun(ranks[run.rank], run.first, run.end) for run in runs)
