"""Removes ranks from and adds ranks to the pipelines and tensor groups of a layout.

The remaining ranks of a group close its gap. Pipelines with equal cuts that lost whole groups share
their other groups: they make as many pipelines as every stage has groups left, and the ranks beyond
that join the remaining groups of their layers; ranks without room become standby ranks. A pipeline
that lost no rank keeps its cuts. Standby ranks get no work when others leave, unless no other rank
is left: a death moves as little as possible.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.even_layout import shard_runs
from pacekeeper.core.layout.layout import (
    Block,
    BlockKind,
    Layout,
    Pipeline,
    ShardRun,
    Stage,
    with_batch_shares,
)

Members = tuple[int, ...]  # of a tensor group, in the order of their runs
Runs = tuple[ShardRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMesh:
    """Pipelines and standby ranks: fields of a `Layout`."""

    pipelines: tuple[Pipeline, ...]
    standing_by: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A pipeline while it changes: the layers [first, end) and the ranks of each stage."""

    layers: list[tuple[int, int]]
    groups: list[Members]
    weight: float = 1.0  # relative to other pipelines: its batch share


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
        LostStateError: a layer has no living rank, or a shard no living holder.
    """
    if not is_restored:
        _check_held(layout, gone)
    living = [[_without(stage.group, gone) for stage in stages] for stages in layout.mesh]
    if is_restored and not any(map(any, living)):  # who stood by is all that is left
        left = tuple(rank for rank in layout.standing_by if rank not in gone)
        living[0][0] = left[: _most_ranks(layout)]
    drafts, spare = list[_Draft](), list[tuple[int, Stage]]()
    for numbers in _kept_classes(layout, living):
        made, more = _recombined(layout, numbers, living)
        drafts, spare = drafts + made, spare + more
    placed = {rank for draft in drafts for group in draft.groups for rank in group}
    placed |= {rank for rank, _ in spare}
    spare += [
        (rank, stage)
        for stages, groups in zip(layout.mesh, living, strict=True)
        for stage, group in zip(stages, groups, strict=True)
        for rank in group
        if rank not in placed
    ]
    for rank, stage in spare:
        _join(drafts, rank, layout.speed_by_rank, below=_most_ranks(layout), near=stage)
    return _arranged(layout, drafts, set(layout.ranks).difference(gone), layout.speed_by_rank)


def add_ranks(layout: Layout, newcomers: Sequence[int]) -> PipelineMesh:
    """The mesh of `layout` with `newcomers`, which hold no state yet.

    New ranks first fill groups that are smaller than the largest, the weakest first; then they form
    whole pipelines, with the cuts that most pipelines have; the rest joins the weakest groups.
    Batch shares are proportional to the speed of each pipeline's weakest group, per layer where
    cuts differ.
    """
    speeds = layout.speed_by_rank | dict.fromkeys(newcomers, 1.0)
    drafts = [
        _Draft(layers=_layers(stages), groups=[stage.group for stage in stages])
        for stages in layout.mesh
    ]
    size = max(len(group) for draft in drafts for group in draft.groups)
    left = sorted([*newcomers, *_welcome(layout)])
    while left and _join(drafts, left[0], speeds, below=size):
        left.pop(0)
    (ends, _), *_ = Counter(pipeline.ends for pipeline in layout.pipelines).most_common(1)
    while len(left) >= size * len(ends):
        groups = [tuple(left[at : at + size]) for at in range(0, size * len(ends), size)]
        drafts.append(_Draft(layers=list(zip((0, *ends), ends, strict=False)), groups=groups))
        del left[: size * len(ends)]
    while left and _join(drafts, left[0], speeds, below=_most_ranks(layout)):
        left.pop(0)
    for draft in drafts:
        draft.weight = min(
            sum(speeds[rank] for rank in group) / (1 if layout.has_equal_cuts else end - first)
            for (first, end), group in zip(draft.layers, draft.groups, strict=True)
        )
    return _arranged(layout, drafts, {*layout.ranks, *newcomers}, speeds)


def _welcome(layout: Layout) -> list[int]:
    """Standby ranks that lack room, not speed."""
    return [rank for rank in layout.standing_by if rank not in dict(layout.speeds)]


def _most_ranks(layout: Layout) -> int:
    """The most ranks that a tensor group can have: each needs a shard of one kind."""
    return max(layout.num_attention_shards, layout.num_mlp_shards)


def _without(group: Members, gone: Collection[int]) -> Members:
    return tuple(rank for rank in group if rank not in gone)


def _layers(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    return [(stage.first_layer, stage.end_layer) for stage in stages]


def _check_held(layout: Layout, gone: Collection[int]) -> None:
    names = {BlockKind.ATTENTION: "attention", BlockKind.DENSE_MLP: "MLP"}
    for span in layout.spans:
        layers = f"layers {span.start} to {span.stop - 1}"
        if set(layout.ranks_of_layer(span.start)) <= set(gone):
            raise LostStateError(
                f"no living rank holds {layers}", remedy="restart from a checkpoint"
            )
        dense = next((layer for layer in span if layout.has_dense_mlp(layer)), None)
        for kind, layer, count in (
            (BlockKind.ATTENTION, span.start, layout.num_attention_shards),
            (BlockKind.DENSE_MLP, dense, layout.num_mlp_shards),
        ):
            if layer is None:
                continue
            held = [layout.holders(Block(kind, layer, shard)) for shard in range(count)]
            lost = [shard for shard, on in enumerate(held) if all(rank in gone for rank in on)]
            if lost:
                raise LostStateError(
                    f"no living rank holds the {names[kind]} shards {lost} of {layers}",
                    remedy="restart from a checkpoint, with more data-parallel pipelines",
                )


def _kept_classes(layout: Layout, living: Sequence[Sequence[Members]]) -> Iterator[list[int]]:
    """Pipelines with equal cuts that have a living group for each stage; else the largest such set.

    Yields the numbers of the pipelines.
    """
    classes: dict[tuple[int, ...], list[int]] = {}
    for at, pipeline in enumerate(layout.pipelines):
        classes.setdefault(pipeline.ends, []).append(at)
    whole = [
        numbers
        for ends, numbers in classes.items()
        if all(any(living[at][n] for at in numbers) for n in range(len(ends)))
    ]
    if whole:
        yield from whole
    else:
        yield max(
            classes.values(), key=lambda numbers: sum(len(g) for at in numbers for g in living[at])
        )


def _recombined(
    layout: Layout, numbers: Sequence[int], living: Sequence[Sequence[Members]]
) -> tuple[list[_Draft], list[tuple[int, Stage]]]:
    """The pipelines that the groups of these `numbers`, with equal cuts, still make.

    Also the ranks of the groups beyond that, with the stage that they ran. Layers of a stage
    without any rank go to the previous stage, or the next.
    """
    stages = layout.mesh[numbers[0]]
    kept = [n for n in range(len(stages)) if any(living[at][n] for at in numbers)]
    if not kept:
        raise LostStateError("no rank is left", remedy="restart from a checkpoint")
    firsts = [0, *(stages[n].first_layer for n in kept[1:])]
    layers = list(zip(firsts, [*firsts[1:], layout.num_layers], strict=True))
    count = min(sum(bool(living[at][n]) for at in numbers) for n in kept)
    whole = [at for at in numbers if all(living[at][n] for n in kept)]
    broken = [at for at in numbers if not all(living[at][n] for n in kept)]
    order = [[*whole, *(at for at in broken if living[at][n])] for n in kept]
    drafts = [
        _Draft(
            layers=list(layers),
            groups=[living[ats[i]][n] for n, ats in zip(kept, order, strict=True)],
            weight=layout.pipelines[order[0][i]].batch_share
            * _kept_part(layout, order[0][i], [(n, living[order[0][i]][n]) for n in kept]),
        )
        for i in range(count)
    ]
    spare = [
        (rank, layout.mesh[at][n])
        for n, ats in zip(kept, order, strict=True)
        for at in ats[count:]
        for rank in living[at][n]
    ]
    return drafts, spare


def _kept_part(layout: Layout, at: int, living: Sequence[tuple[int, Members]]) -> float:
    """The part of its speed that the weakest living group of a pipeline kept.

    `living`: (stage, ranks) of its groups.
    """
    speed, kept = layout.speed_by_rank, [1.0]
    for number, group in living:
        if group:
            before = sum(speed[rank] for rank in layout.mesh[at][number].group)
            kept.append(sum(speed[rank] for rank in group) / before)
    return min(kept)


def _join(
    drafts: Sequence[_Draft],
    rank: int,
    speeds: Mapping[int, float],
    *,
    below: int,
    near: Stage | None = None,
) -> bool:
    """Add `rank` to the slowest group of fewer than `below` ranks; False: none has room.

    `near`: only to a group that runs a layer of this stage.
    """
    places = [
        (sum(speeds[member] for member in group), number, at)
        for at, draft in enumerate(drafts)
        for number, ((first, end), group) in enumerate(zip(draft.layers, draft.groups, strict=True))
        if len(group) < below
        and (near is None or (first < near.end_layer and near.first_layer < end))
    ]
    if places:
        _, number, at = min(places)
        drafts[at].groups[number] += (rank,)
    return bool(places)


def _arranged(
    layout: Layout,
    drafts: Sequence[_Draft],
    living: Collection[int],
    speeds: Mapping[int, float],
) -> PipelineMesh:
    """Pipelines in the order of their leaders; runs are cut again where members changed."""
    old = {stage.group: stage for stages in layout.mesh for stage in stages}
    order = sorted(drafts, key=lambda draft: draft.groups[0][0])
    pipelines = []
    for draft in order:
        stages = []
        for (first, end), group in zip(draft.layers, draft.groups, strict=True):
            if group in old:
                attention, mlp = old[group].attention, old[group].mlp
            else:
                attention, mlp = _cut(group, layout, speeds)
            stages.append(Stage(first_layer=first, end_layer=end, attention=attention, mlp=mlp))
        pipelines.append(Pipeline(stages=tuple(stages), batch_share=0.0))
    total = sum(draft.weight for draft in drafts)
    shares = [draft.weight / total if total > 0.0 else 1.0 / len(order) for draft in order]
    made = with_batch_shares(pipelines, shares)
    working = {rank for draft in drafts for group in draft.groups for rank in group}
    return PipelineMesh(pipelines=made, standing_by=tuple(sorted(set(living) - working)))


def _cut(group: Members, layout: Layout, speeds: Mapping[int, float]) -> tuple[Runs, Runs]:
    """The attention and MLP runs of a group.

    Of more ranks than shards of a kind the slowest get none of it, but one of the other kind.
    """
    by_speed = sorted(range(len(group)), key=lambda i: (-speeds[group[i]], i))
    with_attention = set(by_speed[: layout.num_attention_shards])
    by_need = sorted(by_speed, key=lambda i: i in with_attention)
    with_mlp = set(by_need[: layout.num_mlp_shards])
    return (
        _runs(group, with_attention, layout.num_attention_shards, speeds),
        _runs(group, with_mlp, layout.num_mlp_shards, speeds),
    )


def _runs(
    group: Members, able: Collection[int], num_shards: int, speeds: Mapping[int, float]
) -> Runs:
    """Runs of the `able` positions of a group, empty ones of the others."""
    runs = iter(shard_runs([group[i] for i in sorted(able)], num_shards, speeds))
    found: list[ShardRun] = []
    for i, rank in enumerate(group):
        at = found[-1].end if found else 0
        found.append(next(runs) if i in able else ShardRun(rank, at, at))
    return tuple(found)
