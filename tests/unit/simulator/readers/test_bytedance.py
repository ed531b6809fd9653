"""Parquet traces of whole jobs: read, or refused with a reason; partial ones are said to be."""

from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.recorded.trace import Chunk, OpType, Worker
from pacekeeper.simulator.readers.bytedance import read_bytedance

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROW = {
    "dp_rank": 1, "stage": 2, "rank": 6, "step": 16, "optype": "forward-compute", "start_ts": 0.5,
    "duration": 0.25, "seq_id": 3, "mc": 0, "mb_id": 3,
}  # fmt: skip


def written(path: Path, *rows: dict[str, object]) -> Path:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parquet.write_table(arrow.table(columns), path)
    return path


def test_every_operation_has_its_place_and_time(tmp_path: Path) -> None:
    trace = read_bytedance(
        written(tmp_path / "trace-X.parquet", ROW, ROW | {"optype": "forward-send", "mb_id": 4})
    )
    assert (trace.name, trace.workers) == ("trace-X", (Worker(rank=6, stage=2, dp=1),))
    assert trace.ops is not None and trace.compute is not None
    assert trace.ops.op.tolist() == [OpType.FORWARD, OpType.FORWARD_SEND]
    assert trace.ops.duration_s.tolist() == [0.25, 0.25]
    assert trace.compute.chunk.tolist() == [Chunk.FORWARD]
    assert trace.compute.micro_batch.tolist() == [3]
    assert np.isnan(trace.compute.tokens).all()
    assert trace.notes == ()


def test_what_can_not_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    trace = read_bytedance(
        written(tmp_path / "t", ROW, ROW | {"optype": "dance"}, ROW | {"duration": float("nan")})
    )
    assert trace.ops is not None and len(trace.ops.step) == 1
    assert trace.notes == (
        "1 operations of unknown types left out: ['dance']",
        "1 operations without a possible time left out",
    )


def test_other_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match="text: "):
        read_bytedance(tmp_path / "text")
    with pytest.raises(DataError, match="nothing: "):
        read_bytedance(tmp_path / "nothing")
    with pytest.raises(DataError, match="not a StragglerAnalysis trace: no column dp_rank"):
        read_bytedance(written(tmp_path / "other", {"x": 1}))
    why = "holds no operation that can be read .1 operations without a possible time left out"
    with pytest.raises(DataError, match=why):
        read_bytedance(written(tmp_path / "useless", ROW | {"duration": -1.0}))
    with pytest.raises(DataError, match="two places"):
        read_bytedance(written(tmp_path / "twice", ROW, ROW | {"stage": 3}))


def test_a_clock_may_count_from_1970(tmp_path: Path) -> None:
    trace = read_bytedance(written(tmp_path / "t", ROW | {"start_ts": 1.8e9}))
    assert trace.ops is not None and trace.ops.start_s.tolist() == [1.8e9]
    assert trace.notes == ()
