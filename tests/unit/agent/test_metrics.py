"""What Prometheus sees of an agent: base units, and no series for what nobody told."""

import socket
import urllib.request

import pytest

from pacekeeper.agent.metrics import AgentMetrics
from pacekeeper.core.errors import HostError
from pacekeeper.core.telemetry.node_report import AgentHealth
from pacekeeper.core.telemetry.samples import DeviceSample

NAMED = 'UUID="GPU-1",device_index="0"'
SAMPLE = DeviceSample(
    device_index=0,
    device_uuid="GPU-1",
    sampled_s=0.0,
    sm_clock_mhz=1500.0,
    temperature_celsius=61.0,
    power_watts=350.0,
    utilisation_ratio=0.8,
)


def scrape(metrics: AgentMetrics) -> dict[str, float]:
    lines = metrics.page().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_devices_are_shown_in_base_units() -> None:
    metrics = AgentMetrics()
    metrics.devices = (SAMPLE,)
    metrics.update(AgentHealth(num_devices=1))
    seen = scrape(metrics)
    assert seen[f"pacekeeper_device_sm_clock_hertz{{{NAMED}}}"] == 1.5e9
    assert seen[f"pacekeeper_device_temperature_celsius{{{NAMED}}}"] == 61.0
    assert seen[f"pacekeeper_device_power_watts{{{NAMED}}}"] == 350.0
    assert seen[f"pacekeeper_device_utilisation_ratio{{{NAMED}}}"] == 0.8
    assert seen["pacekeeper_agent_devices"] == 1.0


def test_a_device_that_tells_no_more_has_no_series_any_more() -> None:
    metrics = AgentMetrics()
    metrics.devices = (SAMPLE,)
    assert len([name for name in scrape(metrics) if "GPU-1" in name]) > 2
    silent = DeviceSample(device_index=0, device_uuid="GPU-1", sampled_s=1.0, power_watts=300.0)
    metrics.devices = (silent,)
    assert [name for name in scrape(metrics) if "GPU-1" in name] == [
        f'pacekeeper_device_info{{{NAMED},name="",parent_UUID=""}}',
        f"pacekeeper_device_lost{{{NAMED}}}",
        f"pacekeeper_device_power_watts{{{NAMED}}}",
    ]
    metrics.devices = ()
    assert not [name for name in scrape(metrics) if "GPU-1" in name]


def test_counters_follow_the_agents_own() -> None:
    metrics = AgentMetrics()
    for read in (3, 3, 10):
        health = AgentHealth(records_read=read, records_lost=2, unreadable=("a", "b"))
        metrics.update(health, rings=4, connected=True)
    seen = scrape(metrics)
    assert seen["pacekeeper_agent_records_read_total"] == 10.0
    assert seen["pacekeeper_agent_records_lost_total"] == 2.0
    assert seen["pacekeeper_agent_unreadable"] == 2.0
    assert (seen["pacekeeper_agent_rings"], seen["pacekeeper_agent_connected"]) == (4.0, 1.0)


def test_an_address_that_can_not_be_had_says_what_to_do() -> None:
    with pytest.raises(HostError, match="give --metrics-listen an address of this machine"):
        AgentMetrics().serve("a.invalid:1")


def test_a_port_in_use_says_so_and_a_free_one_answers() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(HostError, match="in use"):
            AgentMetrics().serve(f"127.0.0.1:{other.getsockname()[1]}")
    server = AgentMetrics().serve("127.0.0.1:0")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            assert b"pacekeeper_agent_connected 0.0" in answer.read()
    finally:
        server.close()
