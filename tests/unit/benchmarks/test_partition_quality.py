"""Plans that the benchmark counts are layouts that a running job can follow."""

import pytest
from benchmarks.partition_cases import CASES, Case, problem_of
from benchmarks.partition_quality import SEVERITIES, draw, is_met

from pacekeeper.controller.planning.partition.layout_codec import layout_of, partition_of
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.core.layout.live_rules import check_live_layout


@pytest.mark.parametrize("rows_per_batch", [16, 1])
@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_plan_is_a_layout_of_a_running_job(
    case: Case, severity: str, rows_per_batch: int
) -> None:
    problem = problem_of(case, draw(case, SEVERITIES[severity], 0), rows_per_batch=rows_per_batch)
    partition = plan_partition(problem).partition
    layout = layout_of(partition, ((),) * case.num_layers, generation=2)
    check_live_layout(layout)
    # It says all of the plan: its price is that of the plan.
    again = partition_of(
        layout,
        num_rows=problem.rows_per_step,
        num_microbatches=2 * case.stages,
        rows_per_batch=rows_per_batch,
    )
    by_rank = {pipeline.ranks: pipeline for pipeline in again.pipelines}
    assert by_rank == {pipeline.ranks: pipeline for pipeline in partition.pipelines}


@pytest.mark.parametrize(
    ("won", "gain", "expected"), [(18, 1.0, True), (17, 1.0, False), (18, 1.002, False)]
)
def test_a_lost_cell_or_a_gain_on_healthy_jobs_misses_the_bar(
    won: int, gain: float, expected: bool
) -> None:
    assert is_met({"cells": 18, "cells_won": won, "most_healthy_gain": gain}) is expected
