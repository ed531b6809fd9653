"""Profiler traces of all ranks: device time without collectives; what can not be used is said."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.simulator.readers.kineto import read_kineto


def event(kind: str, name: str, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}


EVENTS = [
    event("user_annotation", "ProfilerStep#7", 0.0, 100.0),
    event("kernel", "gemm", 10.0, 20.0),
    event("kernel", "gelu", 20.0, 20.0),  # on another stream: together 30 us
    event("kernel", "ncclDevKernel_AllReduce", 40.0, 50.0),
    event("kernel", "of the next step", 150.0, 9.0),
    {"ph": "M", "name": "process_name"},
]


def written(
    path: Path, rank: int | None, events: list[dict[str, Any]], *, num_ranks: int = 2
) -> Path:
    document: dict[str, Any] = {"traceEvents": events, "host_name": "a"}
    if rank is not None:
        document["distributedInfo"] = {"rank": rank, "world_size": num_ranks}
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_compute_is_the_time_with_a_kernel_that_is_no_collective(tmp_path: Path) -> None:
    (trace,) = read_kineto([written(tmp_path / "x.json.gz", 3, EVENTS)])
    assert trace.compute is not None
    assert (trace.workers[0].rank, trace.workers[0].node) == (3, "a")
    assert trace.compute.step.tolist() == [7]
    assert trace.compute.compute_s.tolist() == pytest.approx([30e-6])
    assert trace.waits is not None
    assert trace.waits.wait_s.tolist() == pytest.approx([50e-6])


def test_a_mark_on_the_device_counts_where_the_host_has_none(tmp_path: Path) -> None:
    late = [*EVENTS[1:], event("gpu_user_annotation", "ProfilerStep#7", 120.0, 100.0)]
    (trace,) = read_kineto([written(tmp_path / "x.json", 0, late)])
    assert trace.compute is not None
    assert trace.compute.compute_s.tolist() == pytest.approx([9e-6])
    (both,) = read_kineto([written(tmp_path / "y.json", 0, [*late, EVENTS[0]])])
    assert both.compute is not None
    assert both.compute.compute_s.tolist() == pytest.approx([30e-6])


def test_a_rank_may_be_named_by_its_file(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"rank-{rank}.json", None, EVENTS) for rank in (0, 5)]
    (trace,) = read_kineto(paths)
    assert [w.rank for w in trace.workers] == [0, 5]


def test_files_that_do_not_help_are_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "torn.json.gz").write_bytes(gzip.compress(b"{}")[:-9])
    (tmp_path / "list.json").write_text("[]")
    good = written(tmp_path / "good.json", 0, EVENTS)
    twice = written(tmp_path / "twice.json", 0, EVENTS)
    idle = written(tmp_path / "idle.json", 1, EVENTS[:1])
    (trace,) = read_kineto([tmp_path / "torn.json.gz", tmp_path / "list.json", good, twice, idle])
    assert len(trace.workers) == 1
    assert [note.split(":")[0] for note in trace.notes] == [
        "torn.json.gz", "list.json", "twice.json", "idle.json",
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"list\.json: no profiler trace"):
        read_kineto([tmp_path / "list.json"])


def test_files_that_do_not_belong_together_are_runs_of_their_own(tmp_path: Path) -> None:
    later = [event("user_annotation", "ProfilerStep#90", 0.0, 100.0), *EVENTS[1:]]
    slower = [EVENTS[0], event("kernel", "gemm", 10.0, 25.0)]
    paths = [
        written(tmp_path / "a.json", 0, EVENTS),
        written(tmp_path / "b.json", 1, EVENTS),
        written(tmp_path / "another-rank-0.json", 0, slower),
        written(tmp_path / "larger-job.json", 1, EVENTS, num_ranks=64),
        written(tmp_path / "later.json", 1, later),
    ]
    runs = read_kineto(paths)
    assert [[w.rank for w in run.workers] for run in runs] == [[0, 1], [0], [1], [1]]
    assert len({run.name for run in runs}) == 4
    assert all(any(note.startswith("4 runs") for note in run.notes) for run in runs)


def test_a_rank_that_does_not_tell_the_size_of_its_job_belongs_to_any(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / "a.json", 0, EVENTS),
        written(tmp_path / "rank1.json", None, EVENTS),
    ]
    (run,) = read_kineto(paths)
    assert [w.rank for w in run.workers] == [0, 1]
