"""Power-capped runs: read with their caps, and joined to onsets of known place and time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.recorded.trace import Chunk
from pacekeeper.simulator.readers.perseus import (
    CappedRun,
    is_perseus,
    joined,
    perseus_traces,
    read_perseus,
)

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROW = {
    "scheduler": "zeus_global", "setting": 0, "rank": 0, "iteration": 1, "fwd_sum_s": 2.0,
    "bwd_sum_s": 4.0, "state_min": 300, "model": "bert", "partition": "p", "dp": 1, "pp": 2,
    "tp": 1, "mbs": 8, "nmb": 32, "label_kind": "power_cap_W",
}  # fmt: skip


def run_rows(scheduler: str, setting: int, caps: tuple[int, ...], **other: object) -> list[Any]:
    return [
        ROW
        | {"scheduler": scheduler, "setting": setting, "rank": rank, "iteration": iteration}
        | {"state_min": cap, "fwd_sum_s": 10.0 * setting + rank + 0.01 * iteration}
        | other
        for rank, cap in enumerate(caps)
        for iteration in (0, 1, 2, 3)
    ]


def written(path: Path, rows: Sequence[object]) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[CappedRun, ...]:
    rows = run_rows("zeus_global", 0, (300, 300)) + run_rows("zeus_global", 1, (300, 300))
    rows += run_rows("zeus_global", 2, (275, 275)) + run_rows("zeus_local", 3, (300, 200))
    rows += run_rows("perseus", 4, (1410, 1410), label_kind="sm_clock_MHz")
    return read_perseus(written(tmp_path / "rank_iterations_X.parquet", rows))


def test_runs_under_power_caps_are_read_without_the_warm_up(runs: tuple[CappedRun, ...]) -> None:
    assert [(r.scheduler, r.setting) for r in runs] == [
        ("zeus_global", 0), ("zeus_global", 1), ("zeus_global", 2), ("zeus_local", 3),
    ]  # fmt: skip
    assert [r.is_healthy for r in runs] == [True, True, False, False]
    assert runs[3].cap_w == {0: 300, 1: 200}
    table = runs[3].trace.compute
    assert table is not None
    assert sorted(set(table.step.tolist())) == [1, 2, 3]
    forward = table.compute_s[(table.chunk == Chunk.FORWARD) & (table.rank == 1)]
    assert np.sort(forward) == pytest.approx([31.01, 31.02, 31.03])
    assert [(w.rank, w.stage, w.dp) for w in runs[3].trace.workers] == [(0, 0, 0), (1, 1, 0)]


def forward_of(trace: object, rank: int) -> list[float]:
    table = trace.compute  # type: ignore[attr-defined]
    rows = np.flatnonzero((table.rank == rank) & (table.chunk == Chunk.FORWARD))
    rows = rows[np.argsort(table.step[rows])]
    assert table.step[rows].tolist() == list(range(len(rows)))
    return [round(float(x), 2) for x in table.compute_s[rows]]


def test_an_onset_is_joined_from_measured_runs(runs: tuple[CappedRun, ...]) -> None:
    whole = joined(runs[:2], runs[3])
    assert forward_of(whole, 1) == [1.01, 1.02, 1.03, 11.01, 11.02, 11.03, 31.01, 31.02, 31.03]
    assert "full power before step 6, then setting 3 of zeus_local" in whole.notes[-1]
    one = joined(runs[:2], runs[3], victims=[1])
    assert forward_of(one, 1) == [1.01, 1.02, 1.03, 31.01, 31.02, 31.03]
    assert forward_of(one, 0) == [0.01, 0.02, 0.03, 10.01, 10.02, 10.03]
    assert "ranks [1] only" in one.notes[-1]


def test_an_onset_ends_with_the_shorter_of_its_runs(tmp_path: Path) -> None:
    longer = [ROW | {"setting": 3, "scheduler": "zeus_local", "rank": rank, "iteration": iteration,
                     "state_min": 200} for rank in (0, 1) for iteration in range(1, 9)]  # fmt: skip
    rows = run_rows("zeus_global", 0, (300, 300)) + run_rows("zeus_global", 1, (300, 300))
    *healthy, capped = read_perseus(written(tmp_path / "t", rows + longer))
    for trace in (joined(healthy, capped, victims=[1]), joined(healthy[::-1], capped, victims=[0])):
        assert len(forward_of(trace, 0)) == len(forward_of(trace, 1)) == 6


def test_what_can_not_be_joined_is_refused(runs: tuple[CappedRun, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="healthy run before"):
        joined(runs[:1], runs[3], victims=[1])
    rows = run_rows("zeus_global", 0, (300, 300), model="other")
    (other,) = read_perseus(written(tmp_path / "other", rows))
    with pytest.raises(ValueError, match="different jobs"):
        joined([other], runs[3])


def test_replicas_of_a_stage_are_told_from_their_times(tmp_path: Path) -> None:
    for order in ((0, 0, 1, 1), (0, 1, 0, 1)):
        rows = [
            ROW | {"rank": rank, "iteration": i, "dp": 2, "bwd_sum_s": 4.0 + stage + 0.01 * i}
            for rank, stage in enumerate(order)
            for i in (1, 2)
        ]
        (run,) = read_perseus(written(tmp_path / "t", rows))
        assert tuple(w.stage for w in run.trace.workers) == order
        assert sorted({(w.stage, w.dp) for w in run.trace.workers}) == [
            (0, 0), (0, 1), (1, 0), (1, 1),
        ]  # fmt: skip


def test_other_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match="text: "):
        read_perseus(tmp_path / "text")
    with pytest.raises(DataError, match="not a Perseus table: no column bwd_sum_s"):
        read_perseus(written(tmp_path / "other", [{"x": 1}]))
    clocks = run_rows("perseus", 4, (1410, 1410))
    with pytest.raises(DataError, match="no power-capped iteration"):
        read_perseus(written(tmp_path / "clocks", clocks))
    assert is_perseus(list(ROW))


def test_each_setting_is_a_run_that_begins_at_full_power(tmp_path: Path) -> None:
    rows = run_rows("zeus_global", 0, (300, 300)) + run_rows("zeus_global", 2, (275, 275))
    rows += run_rows("zeus_local", 3, (300, 200)) + run_rows("perseus", 4, (1410, 1410))
    traces = perseus_traces(written(tmp_path / "t.parquet", rows))
    assert [t.name for t in traces] == [
        "t-bert-perseus-4",
        "t-bert-zeus_global-0",
        "t-bert-zeus_global-2-onset-3",
        "t-bert-zeus_local-3-onset-3",
    ]
    assert forward_of(traces[3], 1) == [1.01, 1.02, 1.03, 31.01, 31.02, 31.03]


def test_a_run_that_goes_on_in_its_file_keeps_its_numbers(tmp_path: Path) -> None:
    rows = run_rows("zeus_global", 0, (300, 300))
    rows += [
        row | {"iteration": row["iteration"] + 4} for row in run_rows("zeus_local", 3, (300, 200))
    ]
    _, trace = perseus_traces(written(tmp_path / "t.parquet", rows))
    assert trace.compute is not None
    assert sorted(set(trace.compute.step.tolist())) == [1, 2, 3, 4, 5, 6, 7]


def test_columns_that_only_name_the_run_may_be_missing_and_text(tmp_path: Path) -> None:
    names = ("rank", "iteration", "bwd_sum_s", "fwd_sum_s")
    lines = [",".join(names)] + [f"{r},{i},4.5,2.5" for r in (0, 1) for i in (0, 1, 2, 2)]
    (tmp_path / "t.csv").write_text("\n".join([*lines, "1,x,3,4", "1,3,,4"]))
    (trace,) = perseus_traces(tmp_path / "t.csv")
    assert trace.compute is not None
    assert sorted(set(trace.compute.step.tolist())) == [1, 2]
    assert len(trace.compute.step) == 8
    assert trace.notes == (
        "sums per iteration: single micro-batches are not told",
        "2 rows without a possible place and time left out",
        "4 times told twice: the last one counts",
    )


def test_single_instructions_are_read_as_micro_batches(tmp_path: Path) -> None:
    rows = [
        {"setting": 1, "rank": rank, "iteration": 1, "phase": phase, "microbatch": at,
         "seconds": 0.5, "power_cap_W": 300, "scheduler": "zeus_global"}
        for rank in (0, 1) for phase in ("forward", "backward", "dance") for at in (0, 1, 2)
    ]  # fmt: skip
    (trace,) = perseus_traces(written(tmp_path / "t.parquet", rows))
    assert trace.compute is not None
    assert sorted(set(trace.compute.micro_batch.tolist())) == [0, 1, 2]
    assert trace.notes == ("6 rows without a possible place and time left out",)
