"""What a layout makes of a step on paper: parts of ranks, times of pipelines, counted loads."""

from collections.abc import Mapping, Sequence

from pacekeeper.core.layout import Layout
from pacekeeper.core.records import ExpertLoadRecord


def held_part(layout: Layout, rank: int) -> float:
    """A rank's part of the model's dense work on a row: layers of its stage, shards of its run."""
    layers = [x for x in range(layout.num_layers) if rank in layout.stage_of(x).ranks]
    shards = len(layout.shards_on(rank, layers[0])) / layout.num_virtual_shards
    return shards * len(layers) / layout.num_layers


def pipelined_s(layout: Layout, compute_s: Mapping[int, float], num_microbatches: int) -> float:
    """A step of 1F1B with even micro-batches: each stage once, then at the pace of the slowest.

    compute_s: of all micro-batches, by rank. Of one stage that is its slowest rank's.
    """
    stages_s = [max(compute_s[rank] for rank in stage.ranks) for stage in layout.stages]
    return (sum(stages_s) + (num_microbatches - 1) * max(stages_s)) / num_microbatches


def counted_loads(
    layout: Layout, rank: int, step: int, loads: Sequence[Sequence[float]], num_rows: int
) -> list[ExpertLoadRecord]:
    """Of its slice of its pipeline's tokens, in the layers it runs. loads[layer][expert]."""
    share = layout.rows_of(num_rows)[layout.batch_rank(rank)] / num_rows
    records = []
    for layer, layer_loads in enumerate(loads):
        held = len(layout.shards_on(rank, layer)) / layout.num_virtual_shards
        if held:
            records.append(
                ExpertLoadRecord(
                    rank=rank,
                    step=step,
                    generation=layout.generation,
                    layer=layer,
                    first_expert=0,
                    counts=tuple(round(load * share * held) for load in layer_loads),
                )
            )
    return records
