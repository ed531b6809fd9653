"""What an agent reads can be kept and replayed; keeping it disturbs nobody."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.agent.trace_recorder import TraceRecorder
from pacekeeper.core.errors import DataError, HostError
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, Record, StepRecord
from pacekeeper.core.telemetry.samples import HostSample
from pacekeeper.predictor.recorded.trace import Chunk, Worker
from pacekeeper.simulator.readers.native import read_native
from support.trace_files import device_sample


def attachment(rank: int) -> Attachment:
    return Attachment(job="moe", rank=rank, world_size=2, pid=9, run_id=7)


def records(rank: int, step: int, seconds: float = 0.5) -> tuple[Record, ...]:
    return (
        MicroBatchRecord(
            rank=rank, step=step, micro_batch=0, generation=1, compute_s=seconds, tokens=100,
            sum_len_squared=400, expert_rows=200,
        ),
        ExpertLoadRecord(
            rank=rank, step=step, generation=1, layer=0, first_expert=0, counts=(3, 4)
        ),
        StepRecord(rank=rank, step=step, generation=1, duration_s=seconds + 0.1, tokens=200),
    )  # fmt: skip


def recorded(directory: Path, node: str, rank: int, max_bytes: int = 1 << 20) -> None:
    recording = TraceRecorder.begin(directory, node=node, max_bytes=max_bytes)
    reading = RingBatch(job="moe", run_id=7, attached=(attachment(rank),), records=records(rank, 0))
    recording.write([reading, RingBatch(job="idle")])
    recording.write([RingBatch(job="moe", run_id=7, records=records(rank, 1, seconds=0.7))])
    recording.close()


def test_the_files_of_all_nodes_make_one_run(tmp_path: Path) -> None:
    recorded(tmp_path, "node-0", 0)
    recorded(tmp_path, "node/1", 1)
    paths = sorted(tmp_path.iterdir())
    assert [p.name for p in paths] == ["moe-7-node-0.trace.jsonl", "moe-7-node_1.trace.jsonl"]
    trace = read_native(paths)
    assert trace.workers == (Worker(rank=0, node="node-0"), Worker(rank=1, node="node/1"))
    assert trace.compute is not None and trace.steps is not None
    assert trace.compute.compute_s.tolist() == [0.5, 0.5, 0.7, 0.7]
    assert trace.compute.chunk.tolist() == [Chunk.WHOLE] * 4
    assert trace.compute.expert_rows.tolist() == [200.0] * 4
    assert trace.steps.duration_s.tolist() == pytest.approx([0.6, 0.8])
    assert trace.expert_loads is not None
    assert trace.expert_loads.rows.tolist() == [6.0, 8.0, 6.0, 8.0]
    assert trace.notes == ()


def test_a_step_done_again_counts_once(tmp_path: Path) -> None:
    recording = TraceRecorder.begin(tmp_path, node="n", max_bytes=1 << 20)
    again = records(0, 0, seconds=0.9)
    recording.write([RingBatch(job="moe", run_id=7, records=(*records(0, 0), *again))])
    recording.close()
    trace = read_native(list(tmp_path.iterdir()))
    assert trace.compute is not None
    assert trace.compute.compute_s.tolist() == [0.9]


def test_another_life_of_the_agent_goes_on_in_the_same_file(tmp_path: Path) -> None:
    recorded(tmp_path, "n", 0)
    recorded(tmp_path, "n", 0)
    (path,) = tmp_path.iterdir()
    assert path.read_text().count('"header"') == 1


def test_a_file_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded(tmp_path, "n", 0, max_bytes=100)
    assert "is full" in caplog.text
    trace = read_native(list(tmp_path.iterdir()))
    assert trace.compute is not None
    assert np.unique(trace.compute.step).tolist() == [0]


def test_a_full_disk_ends_a_recording_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = TraceRecorder.begin(tmp_path, node="n", max_bytes=1 << 20)
    (tmp_path / "moe-7-n.trace.jsonl").symlink_to("/dev/full")
    for step in range(2):
        recording.write([RingBatch(job="moe", run_id=7, records=records(0, step))])
    recording.close()  # what could not be written is not tried again
    (record,) = caplog.records
    assert "job=moe" in record.getMessage()


def test_a_directory_that_can_not_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="record directory"):
        TraceRecorder.begin(tmp_path / "file" / "x", node="n", max_bytes=1)


def test_agents_that_start_together_do_not_disturb_each_other(tmp_path: Path) -> None:
    def begin(node: str) -> None:
        for _ in range(200):
            TraceRecorder.begin(tmp_path, node=node, max_bytes=1)

    with ThreadPoolExecutor() as pool:
        for started in [pool.submit(begin, f"node-{i}") for i in range(4)]:
            started.result()
    assert list(tmp_path.iterdir()) == []


def test_damaged_lines_are_left_out_and_told(tmp_path: Path) -> None:
    recorded(tmp_path, "n", 0)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + '{"kind": "step", "rank"\n{"kind": "new"}\n')
    (note,) = read_native([path]).notes
    assert note.startswith("moe-7-n.trace.jsonl: 2 damaged lines left out (")


def test_files_of_different_runs_are_not_mixed(tmp_path: Path) -> None:
    recorded(tmp_path, "n", 0)
    other = TraceRecorder.begin(tmp_path, node="n", max_bytes=1 << 20)
    other.write([RingBatch(job="moe", run_id=8, records=records(0, 0))])
    other.close()
    with pytest.raises(DataError, match="is of job 'moe', run 8"):
        read_native(sorted(tmp_path.iterdir()))


def test_a_file_without_records_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty: no JSON"):
        read_native([tmp_path / "empty"])
    with pytest.raises(DataError, match="no file"):
        read_native([])


def test_samples_go_once_into_the_file_of_each_job_that_runs(tmp_path: Path) -> None:
    recording = TraceRecorder.begin(tmp_path, node="n", max_bytes=1 << 20)
    first, later = (device_sample(0, at_s, is_hot=False) for at_s in (1.0, 2.0))
    host = HostSample(sampled_s=1.0, num_cores=8)
    recording.write([RingBatch(job="idle")], [first], host)
    assert list(tmp_path.iterdir()) == [], "who says nothing gets no file"
    began = RingBatch(job="moe", run_id=7, attached=(attachment(0),), records=records(0, 0))
    other = RingBatch(job="other", run_id=7, records=records(0, 0))
    recording.write([began, other], [later], replace(host, sampled_s=2.0))
    recording.write([began], [later], replace(host, sampled_s=2.0))
    recording.close()
    for path in tmp_path.iterdir():
        (node,) = read_native([path]).samples
        assert node.devices == {"GPU-0": (later,)}, path
        assert [sample.sampled_s for sample in node.host] == [2.0]
    (node,) = read_native([next(tmp_path.glob("moe*"))]).samples
    assert node.pids == {9}


def test_the_file_of_a_job_that_is_let_go_is_closed_and_goes_on_should_more_come(
    tmp_path: Path,
) -> None:
    recording = TraceRecorder.begin(tmp_path, node="n", max_bytes=1 << 20)
    num_open = len(os.listdir("/proc/self/fd"))
    for run_id in range(1, 20):  # as jobs come and go on a node, for months
        recording.write([RingBatch(job="moe", run_id=run_id, records=records(0, 0))])
    recording.write([RingBatch(job="moe", run_id=1, records=records(0, 1))])
    recording.write([])
    assert len(os.listdir("/proc/self/fd")) == num_open
    trace = read_native([tmp_path / "moe-1-n.trace.jsonl"])
    assert trace.compute is not None
    assert trace.compute.step.tolist() == [0, 1]


def test_what_an_earlier_life_of_the_agent_wrote_counts_for_the_limit(tmp_path: Path) -> None:
    for _ in range(10):
        recorded(tmp_path, "n", 0, max_bytes=1000)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 2000, "one portion more than the limit, whoever wrote it"
