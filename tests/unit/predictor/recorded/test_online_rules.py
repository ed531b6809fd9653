"""Why a rank of a recorded run was slow: what its node showed around the onset, beside peers."""

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.simulator.readers.native import read_native
from support.trace_files import RecordedJob, write_job


def trace_of(directory: Path, job: RecordedJob) -> Trace:
    return read_native(write_job(directory, job))


def the_slow(trace: Trace) -> Anomaly:
    (found,) = (t for t in analyze(trace).anomalies if t.kind is AnomalyKind.COMPUTE)
    return found


def test_a_hot_device_is_the_cause(tmp_path: Path) -> None:
    found = the_slow(trace_of(tmp_path, RecordedJob(is_hot=True)))
    assert (found.rank, found.first_step) == (5, 30)
    assert found.cause.startswith("confirmed thermal")
    assert "peers" in found.cause


def test_a_thread_that_stood_still_is_the_cause(tmp_path: Path) -> None:
    found = the_slow(trace_of(tmp_path, RecordedJob(stall_ratio=1.0, slowdown=1.5)))
    assert " stalled:" in found.cause


def test_where_nothing_was_seen_that_is_said(tmp_path: Path) -> None:
    found = the_slow(trace_of(tmp_path, RecordedJob()))
    assert found.cause.startswith("nothing seen; not unusual: ")


def test_without_samples_that_is_said(tmp_path: Path) -> None:
    found = the_slow(trace_of(tmp_path, RecordedJob(has_samples=False)))
    assert found.cause.startswith("nothing seen: no device samples, no host samples")


def test_heat_before_the_onset_and_long_after_it_explains_nothing(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, RecordedJob(is_hot=True, steps=200, onset=20))
    (node,) = (n for n in trace.samples if "GPU-5" in n.devices)

    def moved(by_s: float) -> Trace:
        """All samples of the hot device taken at another time."""
        hot = tuple(replace(s, sampled_s=s.sampled_s + by_s) for s in node.devices["GPU-5"])
        changed = replace(node, devices={**node.devices, "GPU-5": hot})
        return replace(trace, samples=tuple(changed if n is node else n for n in trace.samples))

    assert "thermal" in the_slow(moved(0.0)).cause
    assert "thermal" not in the_slow(moved(-1000.0)).cause
    assert "thermal" not in the_slow(moved(1000.0)).cause


def test_heat_that_healthy_peers_share_is_no_cause(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, RecordedJob(is_hot=True))
    (node,) = (n for n in trace.samples if "GPU-5" in n.devices)
    hot = node.devices["GPU-5"]
    alike = {uuid: tuple(replace(s, device_uuid=uuid) for s in hot) for uuid in node.devices}
    everywhere = tuple(
        replace(n, devices={u: _at(alike["GPU-5"], n is node) for u in n.devices})
        for n in trace.samples
    )
    assert "thermal" not in the_slow(replace(trace, samples=everywhere)).cause


def test_who_is_slow_as_well_is_no_witness(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, RecordedJob(is_hot=True, slow=(5, 6), nodes=3))
    found = [t for t in analyze(trace).anomalies if t.kind is AnomalyKind.COMPUTE]
    assert sorted(str(t.rank) for t in found) == ["5", "6"]
    for anomaly in found:
        assert anomaly.cause.startswith("confirmed thermal"), "no healthy peer is hot"
        assert "none of" in anomaly.cause


def _at(samples: tuple, is_same_node: bool) -> tuple:  # type: ignore[type-arg]
    """Node 0's clock is 1,000 s behind node 1's."""
    shift_s = 0.0 if is_same_node else -1000.0
    return tuple(replace(s, sampled_s=s.sampled_s + shift_s) for s in samples)


@pytest.mark.parametrize("onset", [0, 1, 59])
def test_an_onset_at_the_edge_of_the_record_does_no_harm(tmp_path: Path, onset: int) -> None:
    trace = trace_of(tmp_path, RecordedJob(is_hot=True, onset=onset, slowdown=2.0))
    for found in analyze(trace).anomalies:
        assert found.cause or found.rank is None


def test_a_source_that_tells_nothing_of_threads_has_no_cause(tmp_path: Path) -> None:
    trace = replace(trace_of(tmp_path, RecordedJob()), threads=None)
    assert the_slow(trace).cause == ""
