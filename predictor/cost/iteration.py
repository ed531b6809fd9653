"""Predicts the time of a pipelined iteration: the longest path of its step program.

The longest path (ResiHP, eq. 2) through the chunks of all stages and micro-batches, each as long as
the cost model expects for its work, is the time explained by schedule and work. The rest of a
healthy iteration (messages, optimizer, gradient exchange) is estimated by
`predictor/job_level/iteration.py`, which judges running jobs. `benchmarks.critical_path_error`
compares the prediction with recorded pipelines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.core.layout.pipeline_schedule import ChunkKind, Schedule
from pacekeeper.predictor.cost.features import Array, FeatureTable
from pacekeeper.predictor.cost.longest_path import ends_of_many, schedule_graph

# Fractions of a micro-batch's compute by kind of chunk, if ranks time it as a whole: a backward
# pass computes two matrix products for each one of the forward pass.
CHUNK_PARTS = {
    Schedule.ONE_F_ONE_B: {ChunkKind.FORWARD: 1 / 3, ChunkKind.BACKWARD: 2 / 3},
    Schedule.ZERO_BUBBLE: {
        ChunkKind.FORWARD: 1 / 3,
        ChunkKind.BACKWARD: 1 / 3,
        ChunkKind.WEIGHT_GRADIENT: 1 / 3,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPaths:
    """Seconds of the longest path of one iteration, excluding the rest beyond its chunks.

    Attributes:
        expected_s: with all chunks as expected.
        observed_s: with all chunks as measured.
        even_stages_s: as expected, with the work of a micro-batch the same on all stages.
        even_microbatches_s: as expected, with the work of a stage the same in all micro-batches.
        heaviest_stage: the stage with the most expected work.
        longest_microbatch: the micro-batch with the most expected work relative to its pipeline's
            mean; its position in the order of the pipeline.
    """

    expected_s: float
    observed_s: float
    even_stages_s: float
    even_microbatches_s: float
    heaviest_stage: int
    longest_microbatch: int


def _path_s(schedule: Schedule, chunk_s: Sequence[Array]) -> Array:
    """Seconds [k] from the first chunk of an iteration to its last, the maximum over pipelines.

    `chunk_s`: of each pipeline, in k variants [kinds, stages, micro-batches, k].
    """
    longest_s = np.zeros(1)
    same: dict[tuple[int, ...], list[int]] = {}
    for at, chunks in enumerate(chunk_s):
        same.setdefault(chunks.shape, []).append(at)
    for (_, num_stages, num_microbatches, k), places in same.items():
        graph = schedule_graph(schedule, num_stages, num_microbatches)
        chunks = np.concatenate([chunk_s[at] for at in places], axis=-1)
        ends = ends_of_many(graph, chunks)
        longest_s = np.maximum(longest_s, ends.max(axis=0).reshape(len(places), k).max(axis=0))
    return longest_s


def iteration_paths(
    work: FeatureTable,
    expected_s: Array,
    places: Mapping[int, tuple[int, int]],
    schedule: Schedule,
) -> IterationPaths | None:
    """Compute the longest paths of one iteration of a pipelined job.

    A stage takes as long as the slowest of its ranks, because they synchronize in every layer.

    Args:
        work: the micro-batches of the iteration.
        expected_s: [rows] expected seconds of each micro-batch.
        places: (stage, pipeline) of each rank.
        schedule: of the pipelines.

    Returns:
        None if the job has no pipeline with at least two stages, if there is no program of its
        schedule, or if the stages of a pipeline did not report the same micro-batches.
    """
    parts = CHUNK_PARTS.get(schedule)
    num_stages = 1 + max((stage for stage, _ in places.values()), default=0)
    if parts is None or num_stages < 2 or not len(work):
        return None
    ranks, row = np.unique(work["rank"].astype(np.intp), return_inverse=True)
    if not set(ranks.tolist()) <= places.keys():
        return None
    stage, pipeline = np.array([places[rank] for rank in ranks.tolist()])[row].T
    numbers, batch = np.unique(work["micro_batch"], return_inverse=True)
    shape = (int(pipeline.max()) + 1, num_stages, len(numbers))
    tables = []
    for seconds in (expected_s, work["compute_s"]):
        table = np.full(shape, -1.0)
        np.maximum.at(table, (pipeline, stage, batch), seconds)
        tables.append(table)
    ran = tables[0] >= 0.0
    stages_of = {at: 1 + max(s for s, p in places.values() if p == at) for at in range(shape[0])}
    chunks = []
    totals = np.zeros(num_stages)
    longest = (0.0, 0)
    for at in range(shape[0]):
        held = ran[at, : stages_of[at]]
        if not held.any():
            continue  # its ranks reported nothing
        there = held.any(axis=0)
        if not held[:, there].all():
            return None
        expected, observed = (table[at, : stages_of[at]][:, there] for table in tables)
        totals[: stages_of[at]] += expected.sum(axis=1)
        by_batch = expected.sum(axis=0)
        excess = float(by_batch.max() / max(by_batch.mean(), 1e-12))
        longest = max(longest, (excess, int(by_batch.argmax())))
        ways = np.stack(
            [
                expected,
                observed,
                np.broadcast_to(expected.mean(axis=0), expected.shape),
                np.broadcast_to(expected.mean(axis=1, keepdims=True), expected.shape),
            ],
            axis=-1,
        )
        table = np.zeros((len(ChunkKind), *ways.shape))
        for kind, part in parts.items():
            table[kind] = part * ways
        chunks.append(table)
    expected_path, observed_path, even_stages, even_batches = _path_s(schedule, chunks).tolist()
    return IterationPaths(
        expected_s=expected_path,
        observed_s=observed_path,
        even_stages_s=even_stages,
        even_microbatches_s=even_batches,
        heaviest_stage=int(totals.argmax()),
        longest_microbatch=longest[1],
    )
