"""What an iteration of a pipelined job should take, from the work of its micro-batches."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.cost.features import FeatureTable, work_of
from pacekeeper.predictor.cost.iteration import CHUNK_PARTS, iteration_paths
from pacekeeper.predictor.cost.longest_path import ends_of_many, schedule_graph, stage_ends

SCHEDULES = list(CHUNK_PARTS)
# Two pipelines of two stages; the second stage of the first is held by two ranks.
PLACES = {0: (0, 0), 1: (1, 0), 2: (1, 0), 3: (0, 1), 4: (1, 1)}
BATCHES = 4


def work(seconds: dict[tuple[int, int], float]) -> FeatureTable:
    """Seconds of (rank, micro-batch), 1.0 where none are given."""
    records = [
        MicroBatchRecord(
            rank=rank,
            step=1,
            micro_batch=batch,
            generation=1,
            compute_s=seconds.get((rank, batch), 1.0),
            tokens=1,
        )
        for rank in PLACES
        for batch in range(BATCHES)
    ]
    return work_of([table_from_records(records)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_at_once_end_when_each_of_them_alone_ends(schedule: Schedule) -> None:
    graph = schedule_graph(schedule, 3, 5)
    chunk_s = np.random.default_rng(0).uniform(0.1, 1.0, (*graph.shape, 4))
    no_s = np.zeros(graph.shape)
    alone = [stage_ends(graph, chunk_s=chunk_s[..., k], message_s=no_s) for k in range(4)]
    assert ends_of_many(graph, chunk_s) == pytest.approx(np.stack(alone, axis=1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_even_work_takes_what_the_schedule_makes_of_it(schedule: Schedule) -> None:
    even = work({})
    found = iteration_paths(even, even["compute_s"], PLACES, schedule)
    assert found is not None
    # 1F1B of two equal stages: one bubble of a micro-batch. Zero bubble: of a third of it.
    bubble = 1.0 if schedule is Schedule.ONE_F_ONE_B else 1.0 / 3.0
    assert found.expected_s == pytest.approx(BATCHES + bubble)
    assert found.even_stages_s == found.even_microbatches_s == found.observed_s == found.expected_s


def test_a_heavy_stage_and_a_long_micro_batch_are_told_apart_from_slow_computing() -> None:
    expected = work({(rank, batch): 1.5 for rank in (1, 2, 4) for batch in range(BATCHES)})
    heavy = iteration_paths(expected, expected["compute_s"], PLACES, Schedule.ONE_F_ONE_B)
    assert heavy is not None and heavy.heaviest_stage == 1
    assert heavy.even_stages_s < heavy.expected_s == heavy.even_microbatches_s

    early = work({(rank, 0): 2.0 for rank in (0, 1, 2)})
    found = iteration_paths(early, early["compute_s"], PLACES, Schedule.ONE_F_ONE_B)
    assert found is not None and found.longest_microbatch == 0
    assert found.even_microbatches_s < found.expected_s == found.even_stages_s

    slow = work({(2, batch): 1.3 for batch in range(BATCHES)})
    even_s = np.ones(len(slow))
    found = iteration_paths(slow, even_s, PLACES, Schedule.ONE_F_ONE_B)
    assert found is not None
    assert found.observed_s > found.expected_s == pytest.approx(BATCHES + 1.0)


def test_what_cannot_be_predicted_is_not() -> None:
    whole = work({})
    expected_s = whole["compute_s"]
    one_stage = {rank: (0, rank) for rank in PLACES}
    assert iteration_paths(whole, expected_s, one_stage, Schedule.ONE_F_ONE_B) is None
    assert iteration_paths(whole, expected_s, PLACES, Schedule.INTERLEAVED) is None
    assert iteration_paths(whole, expected_s, {0: (0, 0), 1: (1, 0)}, SCHEDULES[0]) is None
    lost = ~((whole["rank"] == 0) & (whole["micro_batch"] == 2))
    assert iteration_paths(whole.only(lost), expected_s[lost], PLACES, SCHEDULES[0]) is None


def test_pipelines_may_run_different_numbers_of_micro_batches() -> None:
    whole = work({})
    fewer = ~((whole["rank"] >= 3) & (whole["micro_batch"] >= 2))
    found = iteration_paths(whole.only(fewer), np.ones(fewer.sum()), PLACES, SCHEDULES[0])
    assert found is not None and found.expected_s == pytest.approx(BATCHES + 1.0)
    only_first = whole.only(whole["rank"] < 3)
    found = iteration_paths(only_first, np.ones(len(only_first)), PLACES, SCHEDULES[0])
    assert found is not None and found.expected_s == pytest.approx(BATCHES + 1.0)
    moved = replace(whole, columns={**whole.columns, "micro_batch": whole["micro_batch"] + 7})
    found = iteration_paths(moved, np.ones(len(moved)), PLACES, SCHEDULES[0])
    assert found is not None and found.expected_s == pytest.approx(BATCHES + 1.0)
