"""Timers of a mixture-of-experts job: own compute and expert layers apart, waits left out."""

from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.recorded.trace import Chunk, Worker
from pacekeeper.simulator.readers.formats import Format
from pacekeeper.simulator.readers.registry import detect
from pacekeeper.simulator.readers.smartmoe import read_smartmoe

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def row(rank: int, iteration: int, **changed: float) -> dict[str, float]:
    """Two expert layers: 30 and 40 ms forward, 50 and 60 ms backward."""
    return {
        "rank": rank, "iteration": iteration, "pp_rank": rank // 4, "dp_rank": rank % 4,
        "fwd-encoder|total": 100.0, "MoEMLP|total": 70.0, "backward-compute|total": 200.0,
        "MoE_L0_fwd|total": 30.0, "MoE_L1_fwd|total": 40.0,
        "MoE_L0_bwd|total": 50.0, "MoE_L1_bwd|total": 60.0,
    } | changed  # fmt: skip


def written(path: Path, rows: list[dict[str, float]]) -> Path:
    parquet.write_table(arrow.table({name: [r[name] for r in rows] for name in rows[0]}), path)
    return path


def test_own_compute_is_without_expert_layers(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [row(rank, at) for at in (1, 2) for rank in range(8)])
    assert detect(path) is Format.SMARTMOE
    trace = read_smartmoe(path, group_size=2)
    assert trace.workers[5] == Worker(rank=5, stage=1, dp=1)
    assert trace.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert trace.compute is not None and trace.expert_compute is not None
    forward = trace.compute.chunk == Chunk.FORWARD
    assert trace.compute.compute_s[forward] == pytest.approx([0.03] * 16)
    assert trace.compute.compute_s[~forward] == pytest.approx([0.09] * 16)
    assert sorted(set(trace.compute.step.tolist())) == [1, 2]


def test_layers_that_first_meet_others_are_left_out(tmp_path: Path) -> None:
    experts = read_smartmoe(written(tmp_path / "run", [row(0, 1), row(1, 1)])).expert_compute
    assert experts is not None
    kept = zip(experts.chunk.tolist(), experts.model_chunk.tolist(), strict=True)
    assert set(kept) == {(Chunk.FORWARD, 1), (Chunk.BACKWARD, 0)}
    assert np.unique(experts.compute_s) == pytest.approx([0.04, 0.05])


def test_other_tables_are_refused_with_the_reason(tmp_path: Path) -> None:
    part = [{name: value for name, value in row(0, 1).items() if name != "MoE_L1_bwd|total"}]
    with pytest.raises(DataError, match=r"no column MoE_L1_bwd\|total"):
        read_smartmoe(written(tmp_path / "a", part))
    with pytest.raises(DataError, match="two places"):
        read_smartmoe(written(tmp_path / "b", [row(0, 1), row(0, 2, dp_rank=3)]))
    (tmp_path / "c").write_text("hello")
    with pytest.raises(DataError, match="c: "):
        read_smartmoe(tmp_path / "c")
