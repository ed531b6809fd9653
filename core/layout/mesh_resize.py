"""Removes ranks from and adds ranks to the stages and tensor groups of a layout.

A data-parallel coordinate is a pipeline: one tensor group in each stage. The remaining ranks of a
group close its gap. The remaining ranks of a pipeline that lost a whole group join the other groups
of their stages; ranks without room become standby ranks. Standby ranks get no work when others
leave, unless no other rank is left: a death moves as little as possible.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.layout import Layout, ShardRun, Stage, shard_runs

Members = tuple[int, ...]  # of a tensor group, in the order of their runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMesh:
    """Stages, batch shares by data-parallel coordinate, and standby ranks: fields of a `Layout`."""

    stages: tuple[Stage, ...]
    batch_shares: tuple[tuple[int, float], ...]
    standing_by: tuple[int, ...] = ()


def remove_ranks(
    layout: Layout, gone: Collection[int], *, is_restored: bool = False
) -> PipelineMesh:
    """The mesh of `layout` without the ranks that are `gone`.

    A pipeline's batch share shrinks in proportion to its weakest group. A group that lost no rank
    keeps its runs.

    Args:
        layout: the layout in use.
        gone: the ranks to remove.
        is_restored: a checkpoint fills the layout, so that a neighbour may take over a stage that
            has no rank left.

    Raises:
        LostStateError: a stage has no living rank, or a shard no living holder.
    """
    living = [[_staying(group, gone) for group in stage.groups] for stage in layout.stages]
    if not is_restored:
        _check_held(layout, gone)
    if is_restored and not any(map(any, living)):  # who stood by is all that is left
        living[0][0] = tuple(r for r in layout.standing_by if r not in gone)[
            : layout.num_virtual_shards
        ]
    stages, living = _without_empty(layout, living)
    count = min(sum(map(bool, groups)) for groups in living)
    coordinates = range(len(layout.stages[0].groups))
    whole = [c for c in coordinates if all(groups[c] for groups in living)]
    columns = []
    for groups in living:
        order = whole + [c for c in coordinates if groups[c] and c not in whole]
        spare = [rank for c in order[count:] for rank in groups[c]]
        columns.append((order[:count], _joined([groups[c] for c in order[:count]], spare, layout)))
    share = dict(layout.batch_shares)
    shares = [
        share[layout.stages[0].groups[c][0].rank] * _left(layout, stages, living, c)
        for c in columns[0][0]
    ]
    made = [groups for _, groups in columns]
    return _arranged(layout, stages, made, shares, set(layout.ranks).difference(gone))


def add_ranks(layout: Layout, newcomers: Sequence[int]) -> PipelineMesh:
    """The mesh of `layout` with `newcomers`, which hold no state yet.

    New ranks first fill groups that are smaller than the largest, the weakest first; then they form
    whole pipelines; the rest joins the weakest groups. Batch shares are proportional to the speed
    of each pipeline's weakest group.
    """
    speeds = layout.speed_by_rank | dict.fromkeys(newcomers, 1.0)
    columns = [[_staying(group, ()) for group in stage.groups] for stage in layout.stages]
    size = max(len(group) for groups in columns for group in groups)
    left = sorted([*newcomers, *_welcome(layout)])
    while left and (place := _weakest(columns, speeds, below=size)) is not None:
        _add(columns, place, left.pop(0))
    while len(left) >= size * len(columns):
        for groups in columns:
            groups.append(tuple(left[:size]))
            del left[:size]
    most = layout.num_virtual_shards
    while left and (place := _weakest(columns, speeds, below=most)) is not None:
        _add(columns, place, left.pop(0))
    pace = [
        min(sum(speeds[rank] for rank in groups[c]) for groups in columns)
        for c in range(len(columns[0]))
    ]
    return _arranged(layout, layout.stages, columns, pace, {*layout.ranks, *newcomers})


def _welcome(layout: Layout) -> list[int]:
    """Standby ranks that lack room, not speed."""
    return [rank for rank in layout.standing_by if rank not in dict(layout.speeds)]


def _staying(group: Sequence[ShardRun], gone: Collection[int]) -> Members:
    return tuple(run.rank for run in group if run.rank not in gone)


def _check_held(layout: Layout, gone: Collection[int]) -> None:
    for stage in layout.stages:
        layers = f"layers {stage.first_layer} to {stage.end_layer - 1}"
        runs = [run for group in stage.groups for run in group if run.rank not in gone]
        if not runs:
            raise LostStateError(
                f"no living rank holds {layers}", remedy="restart from a checkpoint"
            )
        held = {shard for run in runs for shard in range(run.first, run.end)}
        lost = [shard for shard in range(layout.num_virtual_shards) if shard not in held]
        if lost:
            raise LostStateError(
                f"no living rank holds the attention shards {lost} of {layers}",
                remedy="restart from a checkpoint, with more data-parallel pipelines",
            )


def _without_empty(
    layout: Layout, living: list[list[Members]]
) -> tuple[tuple[Stage, ...], list[list[Members]]]:
    """The stages with living ranks; other layers go to the previous stage, or the next."""
    kept = [i for i, groups in enumerate(living) if any(groups)]
    if not kept:
        raise LostStateError("no rank is left", remedy="restart from a checkpoint")
    firsts = [0, *(layout.stages[i].first_layer for i in kept[1:])]
    ends = [*firsts[1:], layout.num_layers]
    stages = tuple(
        replace(layout.stages[i], first_layer=first, end_layer=end)
        for i, first, end in zip(kept, firsts, ends, strict=True)
    )
    return stages, [living[i] for i in kept]


def _joined(groups: list[Members], spare: Sequence[int], layout: Layout) -> list[Members]:
    """Assign each spare rank to the weakest group with room; without room it gets no work."""
    column = [list(groups)]
    for rank in spare:
        place = _weakest(column, layout.speed_by_rank, below=layout.num_virtual_shards)
        if place is not None:
            _add(column, place, rank)
    return column[0]


def _weakest(
    columns: Sequence[Sequence[Members]], speeds: Mapping[int, float], *, below: int
) -> tuple[int, int] | None:
    """(stage, coordinate) of the slowest group of fewer than `below` ranks."""
    places = [
        (sum(speeds[rank] for rank in group), stage, coordinate)
        for stage, groups in enumerate(columns)
        for coordinate, group in enumerate(groups)
        if len(group) < below
    ]
    return min(places)[1:] if places else None


def _add(columns: list[list[Members]], place: tuple[int, int], rank: int) -> None:
    stage, coordinate = place
    columns[stage][coordinate] += (rank,)


def _left(
    layout: Layout,
    stages: Sequence[Stage],
    living: Sequence[Sequence[Members]],
    coordinate: int,
) -> float:
    """The part of its speed that the weakest group of a pipeline kept, in the `stages` before."""
    speed, kept = layout.speed_by_rank, [1.0]
    for stage, groups in zip(stages, living, strict=True):
        before = sum(speed[run.rank] for run in stage.groups[coordinate])
        if groups[coordinate]:
            kept.append(sum(speed[rank] for rank in groups[coordinate]) / before)
    return min(kept)


def _arranged(
    layout: Layout,
    stages: Sequence[Stage],
    columns: Sequence[Sequence[Members]],
    weights: Sequence[float],
    living: Collection[int],
) -> PipelineMesh:
    """Coordinates in the order of their first ranks; runs are cut again where members changed."""
    old = {_staying(group, ()): group for stage in layout.stages for group in stage.groups}
    order = sorted(range(len(weights)), key=lambda c: columns[0][c][0])
    total = sum(weights)
    shares = [
        (columns[0][c][0], weights[c] / total if total > 0.0 else 1.0 / len(order)) for c in order
    ]
    runs = [
        tuple(
            old.get(groups[c])
            or shard_runs(groups[c], layout.num_virtual_shards, layout.speed_by_rank)
            for c in order
        )
        for groups in columns
    ]
    made = tuple(replace(stage, groups=own) for stage, own in zip(stages, runs, strict=True))
    working = {rank for stage in made for rank in stage.ranks}
    standing_by = tuple(sorted(set(living) - working))
    return PipelineMesh(stages=made, batch_shares=tuple(shares), standing_by=standing_by)
