"""Which readings of devices are told: all each five seconds, and at once what is something else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.agent import daemon
from pacekeeper.agent.uplink.batching import MAX_SAMPLE_AGE_S, SampleFilter
from pacekeeper.core.telemetry.samples import DeviceSample
from support.agents import agent_of
from support.symptoms import DEVICE, HEALTH

OTHER = replace(DEVICE, device_uuid="other")


def at(sample: DeviceSample, sampled_s: float, **changed: Any) -> DeviceSample:
    return replace(sample, sampled_s=sampled_s, **changed)


def test_a_reading_that_repeats_what_is_known_is_not_told() -> None:
    news = SampleFilter()
    first = (at(DEVICE, 10.0), at(OTHER, 10.0))
    assert news.select(first) == first
    assert news.select(first) == ()
    assert news.select((at(DEVICE, 11.0, temperature_celsius=61.0), at(OTHER, 11.0))) == ()
    later = (at(DEVICE, 10.0 + MAX_SAMPLE_AGE_S), at(OTHER, 10.0 + MAX_SAMPLE_AGE_S))
    assert news.select(later) == later


NEW: list[dict[str, Any]] = [
    {"clock_event_reasons": 0x40},
    {"is_lost": True},
    {"sm_clock_mhz": 1700.0},
    {"sm_clock_mhz": 2100.0},
    {"health": replace(HEALTH, num_xids=2, xids=(31, 79))},
]


@pytest.mark.parametrize("changed", NEW)
def test_what_one_says_anew_is_told_of_all_at_once(changed: dict[str, Any]) -> None:
    news = SampleFilter()
    news.select((at(DEVICE, 10.0), at(OTHER, 10.0)))
    second = (at(DEVICE, 11.0), at(OTHER, 11.0, **changed))
    assert news.select(second) == second, "a report has all devices or none"
    assert news.select((at(DEVICE, 12.0), at(OTHER, 12.0, **changed))) == ()


@pytest.mark.parametrize(
    ("changed", "is_urgent"),
    [
        ({"is_lost": True}, True),
        ({"clock_event_reasons": 0x40}, True),
        ({"clock_event_reasons": 0x4}, False),  # a power cap comes and goes
        ({"sm_clock_mhz": 1700.0}, False),
        ({"health": replace(HEALTH, num_xids=2, xids=(31, 79))}, True),
        ({}, False),
    ],
)
def test_xids_throttling_and_loss_are_urgent(changed: dict[str, Any], is_urgent: bool) -> None:
    news = SampleFilter()
    news.select((at(DEVICE, 10.0, clock_event_reasons=0),))
    assert news.is_urgent((at(DEVICE, 11.0, **changed),)) == is_urgent


def test_a_device_that_is_new_is_told_at_once() -> None:
    news = SampleFilter()
    news.select((at(DEVICE, 10.0),))
    both = (at(DEVICE, 11.0), at(OTHER, 11.0))
    assert news.select(both) == both


def test_where_no_device_answers_there_is_nothing_to_tell() -> None:
    assert SampleFilter().select(()) == ()


def test_reports_of_one_look_tell_the_devices_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, _ = agent_of(tmp_path)
    agent.sampler._latest = ((DEVICE,), "ok")
    agent.uplink.is_connected = True
    monkeypatch.setattr(daemon, "split_batches", lambda readings: iter((tuple(readings), ())))
    agent._poll()
    reports = [agent.spool.next_unsent(), agent.spool.next_unsent()]
    assert [len(report.devices) for report in reports if report is not None] == [1, 0]


def test_an_agent_tells_its_devices_once_and_how_many_they_are_always(tmp_path: Path) -> None:
    agent, _ = agent_of(tmp_path)
    lost = replace(OTHER, is_lost=True)
    agent.sampler._latest = ((DEVICE, lost), "device 1 is lost")
    agent.uplink.is_connected = True
    reports = []
    for _ in range(2):
        agent.pacer.take(-10.0)  # its last report is long ago
        agent._poll()
        reports.append(agent.spool.next_unsent())
    assert [len(report.devices) for report in reports if report is not None] == [2, 0]
    assert [report.health.num_devices for report in reports if report is not None] == [1, 1]
    assert len(agent.uplink.resync_report(0).devices) == 2, "a controller may have forgotten"
