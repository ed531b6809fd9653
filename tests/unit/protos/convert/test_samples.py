"""Samples that are read when somebody looks are the samples that were sent."""

from dataclasses import replace

import pytest

from pacekeeper.controller.detection.root_cause import health_of, store_samples, windows
from pacekeeper.controller.state.state import NodeState
from pacekeeper.core.telemetry.node_report import AgentHealth, LazyNodeData, NodeReport
from pacekeeper.protos import control_pb2, telemetry_pb2
from pacekeeper.protos.convert import reports
from support.symptoms import DEVICE, HOST


def parts_of(report: NodeReport) -> telemetry_pb2.NodeReportParts:
    """As the controller gets it: the bytes of a whole request."""
    request = control_pb2.AttachRequest(report=reports.report_to_message(report))
    return control_pb2.ReportRequestParts.FromString(request.SerializeToString()).report


def at(second: int) -> NodeReport:
    """An agent's report of that second: its host each time, its devices every fifth."""
    devices = tuple(
        replace(
            DEVICE, device_uuid=f"d{i}", sampled_s=float(second), temperature_celsius=second + i
        )
        for i in range(3)
    )
    return NodeReport(
        sequence=second,
        sent_mono_s=float(second),
        devices=devices if second % 5 == 0 else (),
        host=replace(HOST, sampled_s=float(second), load_1min=float(second)),
        health=AgentHealth(nvml="ok", records_read=second),
    )


def unread_of(report: NodeReport) -> LazyNodeData:
    unread = reports.report_from_parts(parts_of(report)).unread
    assert unread is not None
    return unread


def test_what_was_sent_is_read_later() -> None:
    report = at(5)
    unread = unread_of(report)
    assert unread.devices is not None and unread.host is not None
    assert (unread.devices.read(), unread.host.read()) == (report.devices, report.host)
    assert (unread.devices.sampled_s, unread.host.sampled_s) == (5.0, 5.0)
    assert unread.health() == report.health


def test_what_was_not_sent_is_not_there() -> None:
    unread = unread_of(NodeReport(sequence=1, sent_mono_s=1.0))
    assert (unread.devices, unread.host, unread.health().records_read) == (None, None, 0)


def test_a_device_that_hangs_does_not_hold_up_what_the_others_tell() -> None:
    node = NodeState(name="n", agent_incarnation="x")
    for second in range(0, 60, 5):
        report = at(second)
        hangs = replace(report.devices[0], sampled_s=0.0)
        report = replace(report, devices=(hangs, *report.devices[1:]))
        node = store_samples(
            node, replace(report, devices=(), host=None, unread=unread_of(report)), 0.0
        )
    devices, _ = windows(node)
    assert [len(devices[f"d{i}"]) for i in range(3)] == [1, 12, 12]


def test_windows_of_unread_samples_are_those_of_samples_read_at_once() -> None:
    read = late = NodeState(name="n", agent_incarnation="x")
    for second in range(200):
        report = at(second)
        read = store_samples(read, report, float(second))
        late = store_samples(late, reports.report_from_parts(parts_of(report)), float(second))
        assert health_of(late) == read.health
        if second % 17 == 0:
            assert windows(late) == windows(read)
    assert windows(late) == windows(read)
    assert late.devices == {} and len(late.unread_devices) <= 12


def test_a_clock_that_begins_anew_leaves_nothing_of_the_old_one() -> None:
    node = NodeState(name="n", agent_incarnation="x")
    for second in (500, 506, 512, 3, 4):
        node = store_samples(node, reports.report_from_parts(parts_of(at(second))), 0.0)
    _, host = windows(node)
    assert [sample.sampled_s for sample in host] == [3.0, 4.0]


def test_devices_without_number_are_refused() -> None:
    parts = telemetry_pb2.NodeReportParts(devices=[b""] * (reports.MAX_PARTS["devices"] + 1))
    with pytest.raises(ValueError, match="more than 1024 devices"):
        reports.report_from_parts(parts)
