"""Which layouts a running job can follow: what the planner offers and the trainer accepts."""

from pacekeeper.core.layout.layout import Layout


def check_live_layout(layout: Layout) -> None:
    """Reject a layout that a running job cannot follow.

    Any other layout can be put in force: pipelines of a dense model may have cuts of their own,
    each stage has its own runs of attention and of MLP shards, and ranks may stand by.

    Raises:
        ValueError: pipelines share experts and have other cuts, so that they would not meet at the
            experts of a layer, or a rank has MLP shards and none of the attention.
    """
    runs = (run for stages in layout.mesh for stage in stages for run in stage.attention)
    if idle := sorted(run.rank for run in runs if run.first == run.end):
        raise ValueError(f"ranks {idle} of tensor groups have no attention shard")
    if any(layout.experts) and not layout.has_equal_cuts:
        ends = sorted({pipeline.ends for pipeline in layout.pipelines})
        raise ValueError(
            f"pipelines share experts, but their stages end at layers {ends[0]} and {ends[1]}"
        )
