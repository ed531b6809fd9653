"""Rows of micro-batches at each stage: which a rank computes, and who has them before and after.

Where pipelines have shares of the rows by stage, a micro-batch's rows over all pipelines are one
list that each stage cuts anew (`core/layout/apportion.py`), so hidden states go to whoever computes
the next stage. Elsewhere a pipeline keeps its rows.
"""

from dataclasses import dataclass

from pacekeeper.core.layout.apportion import micro_batch_places, micro_batch_rows
from pacekeeper.core.layout.layout import Layout, Stage
from pacekeeper.trainer.parallel.mesh.token_slices import MeshPlace, crossing, token_slices

Neighbours = tuple[tuple[Stage, range], ...]
"""Stages that run at the same time, and their rows of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRows:
    """Rows of one micro-batch, by their numbers in it.

    Attributes:
        own: Of this rank's stage.
        before: Of the stages that compute their layers before; empty for the first.
        after: Of those after; empty for the last.
    """

    own: range
    before: Neighbours
    after: Neighbours

    def crossing(self, own: range, others: Neighbours, row_tokens: int) -> dict[int, range]:
        """Return which of this rank's tokens each rank of neighbouring stages has, from its first.

        Args:
            own: Tokens of this rank, counted from its stage's first.
            others: `before` or `after`.
            row_tokens: Tokens of a row.
        """
        first = self.own.start * row_tokens
        there = {
            rank: _shifted(cut, rows.start * row_tokens)
            for stage, rows in others
            for rank, cut in token_slices(stage, len(rows) * row_tokens).items()
        }
        return crossing(_shifted(own, first), there)


def _shifted(tokens: range, by: int) -> range:
    return range(tokens.start + by, tokens.stop + by)


def rows_of_rank(layout: Layout, rank: int, num_rows: int) -> range:
    """Return the places in a global batch of `num_rows` rows that a rank's stage computes."""
    if rank not in layout.places:
        return range(0)
    stage, at = layout.places[rank]
    return layout.rows_at(stage, num_rows)[at]


def micro_batches_of(own: range, count: int) -> dict[int, range]:
    """Return the places of each of `count` micro-batches that has some of a rank's `own`."""
    return {k: one for k in range(count) if (one := micro_batch_places(own, k, count))}


def dealt_rows(layout: Layout, rank: int, num_rows: int, count: int) -> tuple[MicroBatchRows, ...]:
    """Return the rows of each micro-batch for a rank of a layout with stage shares.

    A rank without rows of a micro-batch exchanges nothing of it.
    """
    number, at = layout.places[rank]
    ranges = [layout.rows_at(stage, num_rows) for stage in range(len(layout.stage_shares))]

    def at_stage(stage: int, micro: int) -> Neighbours:
        if not 0 <= stage < len(ranges):
            return ()
        stages = [pipeline.stages[stage] for pipeline in layout.pipelines]
        rows = (micro_batch_rows(places, micro, count) for places in ranges[stage])
        return tuple((one, own) for one, own in zip(stages, rows, strict=True) if own)

    found = []
    for micro in range(count):
        own = micro_batch_rows(ranges[number][at], micro, count)
        before, after = at_stage(number - 1, micro), at_stage(number + 1, micro)
        found.append(
            MicroBatchRows(own=own, before=before if own else (), after=after if own else ())
        )
    return tuple(found)


def kept_rows(place: MeshPlace, num_rows: int) -> MicroBatchRows:
    """Return the rows of a micro-batch that stays in its pipeline."""
    own = range(num_rows)
    return MicroBatchRows(
        own=own,
        before=() if place.before is None else ((place.before, own),),
        after=() if place.after is None else ((place.after, own),),
    )
