"""Rows of micro-batches as the engine deals them, by pipeline or by pipeline and stage. Pure.

The rule is that of `core/layout/apportion.py`: pipelines have consecutive places of the global
batch in the order of their leaders, the row at place j is in micro-batch j modulo their number, and
all pipelines have as many micro-batches. So a partition has the micro-batches that a trainer runs
under its layout.
"""

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper.controller.planning.model.partition import Pipeline
from pacekeeper.core.layout.apportion import micro_batch_places, num_micro_batches


def deal_rows(
    pipelines: Sequence[Pipeline],
    rows_per_microbatch: int,
    stage_rows: Sequence[Sequence[int]] = (),
) -> tuple[Pipeline, ...]:
    """Return the pipelines with their rows dealt into micro-batches.

    A pipeline without experts skips micro-batches in which it has no row; others run a placeholder.

    Args:
        pipelines: their `rows` count, not how these are divided.
        rows_per_microbatch: the most, of a pipeline at a stage.
        stage_rows: [pipelines][stages] rows that pipelines compute at each stage; (): `rows` at
            all.
    """
    order = sorted(range(len(pipelines)), key=lambda at: pipelines[at].cells[0].attention[0].rank)
    rows = [pipeline.rows for pipeline in pipelines]
    stages: list[Sequence[int]] = list(zip(*stage_rows, strict=True))
    count = num_micro_batches(max(map(max, stages or [rows])), rows_per_microbatch)

    def dealt(of_pipelines: Sequence[int]) -> dict[int, tuple[int, ...]]:
        found, first = {}, 0
        for at in order:
            places = range(first, first + of_pipelines[at])
            found[at] = tuple(len(micro_batch_places(places, k, count)) for k in range(count))
            first = places.stop
        return found

    batches, by_stage = dealt(rows), [dealt(of) for of in stages]
    return tuple(
        replace(
            pipeline,
            micro_batches=batches[at]
            if pipeline.expert_group is not None or stages
            else tuple(filter(None, batches[at])),
            stage_batches=tuple(of[at] for of in by_stage),
        )
        for at, pipeline in enumerate(pipelines)
    )
