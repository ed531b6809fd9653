"""Late input of a recorded job: whose, since when, until when, by how much - and not of healthy."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.core.telemetry.trace_jsonl import SUFFIX, TraceHeader, header_line, record_line
from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.predictor.recorded.online_rules import slow_inputs
from pacekeeper.predictor.recorded.trace import OwnInputTable, Trace, Worker
from pacekeeper.simulator.readers.native import read_native
from support.examples import seeds

NUM_STEPS, FIRST, END = 120, 70, 95
REST_S, USUAL_S = 0.1, 0.003


def recorded(
    late_s: Mapping[int, float], *, seed: int = 0, num_ranks: int = 4, end: int = NUM_STEPS
) -> Trace:
    """`late_s`: what a rank waits beside the usual in the steps [FIRST, end)."""
    draw = np.random.default_rng(seed)
    step, rank = (grid.ravel() for grid in np.indices((NUM_STEPS, num_ranks)))
    waits = USUAL_S * np.exp(draw.normal(0.0, 0.3, len(step)))
    is_late = (step >= FIRST) & (step < end)
    waits += np.where(is_late, np.array([late_s.get(r, 0.0) for r in range(num_ranks)])[rank], 0.0)
    longest = waits.reshape(NUM_STEPS, num_ranks).max(axis=1)[step]
    return Trace(
        name="job",
        source="test",
        workers=tuple(Worker(rank=r) for r in range(num_ranks)),
        own_inputs=OwnInputTable(step=step, rank=rank, duration_s=REST_S + longest, input_s=waits),
    )


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("late_s", [0.025, 0.3])
def test_a_rank_whose_input_is_late_is_a_host_finding_of_that_rank(
    seed: int, late_s: float
) -> None:
    (found,) = slow_inputs(recorded({seed: late_s}, seed=seed))
    assert (found.kind, found.rank) == (AnomalyKind.HOST, seed)
    assert (found.first_step, found.last_step) == (FIRST, None)
    assert found.low < found.slowdown < found.high
    assert found.slowdown == pytest.approx(1.0 + late_s / (REST_S + USUAL_S), rel=0.05)


def test_one_that_recovered_says_until_when() -> None:
    (found,) = slow_inputs(recorded({2: 0.05}, end=END))
    assert (found.first_step, found.last_step) == (FIRST, END - 1)


def test_input_that_is_late_for_all_names_nobody() -> None:
    (found,) = slow_inputs(recorded(dict.fromkeys(range(4), 0.05), end=END))
    assert (found.kind, found.rank) == (AnomalyKind.HOST, None)
    assert found.slowdown == pytest.approx(1.0 + 0.05 / (REST_S + USUAL_S), rel=0.05)


@pytest.mark.parametrize("seed", seeds(10))
def test_healthy_loaders_are_no_finding(seed: int) -> None:
    assert slow_inputs(recorded({}, seed=seed)) == ()


def test_steps_that_a_rank_does_not_tell_are_passed_over_and_none_told_is_no_table() -> None:
    trace = recorded({1: 0.1})
    table = trace.own_inputs
    assert table is not None
    holes = np.where((table.step % 7 == 3) & (table.rank == 0), np.nan, table.input_s)
    (found,) = slow_inputs(replace(trace, own_inputs=replace(table, input_s=holes)))
    assert found.rank == 1
    assert slow_inputs(replace(trace, own_inputs=None)) == ()


def test_our_own_files_hold_it_and_replay_says_it(tmp_path: Path) -> None:
    table = recorded({1: 0.1}).own_inputs
    assert table is not None
    lines = [header_line(TraceHeader(job="job", node="node-0"))]
    lines += [
        record_line(
            StepRecord(
                rank=rank, step=step, generation=0, duration_s=duration_s, tokens=512,
                sum_len_squared=9_000, input_wait_s=input_s,
            )
        )
        for step, rank, duration_s, input_s in zip(
            table.step.tolist(), table.rank.tolist(), table.duration_s.tolist(),
            table.input_s.tolist(), strict=True,
        )
    ]  # fmt: skip
    path = tmp_path / f"job{SUFFIX}"
    path.write_text("\n".join(lines) + "\n")
    trace = read_native([path])
    assert trace.steps is not None and set(trace.steps.sum_len_squared.tolist()) == {9000.0}
    found = analyze(trace).anomalies
    assert (AnomalyKind.HOST, 1) in [(anomaly.kind, anomaly.rank) for anomaly in found]
