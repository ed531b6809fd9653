"""A healthy device, host and thread under load, and the same with something changed."""

from dataclasses import replace
from typing import Any

from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample, HostSample
from pacekeeper.predictor.causes.evidence import DeviceWindow, HostWindow, Symptoms, ThreadTime

ONSET_S = 100.0
RANK_PID = 7
HEALTH = DeviceHealth(
    sm_clock_set_mhz=1980.0,
    power_limit_default_watts=700.0,
    pcie_generation_max=5,
    pcie_width_max=16,
    pcie_recoveries=1,
    pcie_errors=2,
    pcie_fatal_errors=0,
    nvlinks=18,
    nvlinks_up=18,
    nvlink_bytes_per_s=478e9,
    nvlink_replays=4,
    nvlink_recoveries=0,
    nvlink_errors=5,
    ecc_corrected=6,
    is_remap_pending=False,
    has_remap_failed=False,
    recovery_action=0,
    num_xids=1,
    xids=(31,),
)
DEVICE = DeviceSample(
    device_index=0,
    device_uuid="d",
    sampled_s=101.0,
    name="H200",
    sm_clock_mhz=1900.0,
    sm_clock_max_mhz=1980.0,
    temperature_celsius=60.0,
    power_watts=600.0,
    power_limit_watts=700.0,
    utilisation_ratio=1.0,
    clock_event_reasons=0,
    pcie_generation=5,
    pcie_width=16,
    pcie_replays=3,
    ecc_uncorrected=0,
    processes=(RANK_PID,),
    answer_s=0.001,
    memory_temperature_celsius=70.0,
    margin_celsius=25.0,
    power_cap_held_s=50.0,
    hw_thermal_held_s=0.0,
    sw_thermal_held_s=0.0,
    power_brake_held_s=0.0,
    board_limit_held_s=0.0,
    sync_boost_held_s=0.0,
    reliability_held_s=7.0,
    sm_active_ratio=0.8,
    health=HEALTH,
)
HOST = HostSample(
    sampled_s=101.0,
    num_cores=64,
    load_1min=20.0,
    cpu_some_ratio=0.01,
    io_full_ratio=0.0,
    memory_full_ratio=0.0,
    memory_bytes=1000,
    memory_available_bytes=600,
    swap_in_bytes_per_s=0.0,
    network_errors=3,
    tcp_resent_ratio=0.0,
    fabric_ports=8,
    fabric_ports_up=8,
    fabric_errors=2,
)
THREAD = ThreadTime(compute_s=1.0, run_queue_s=0.01, stall_s=0.01)


def device(health: dict[str, Any] | None = None, **changed: Any) -> DeviceWindow:
    """A healthy sample before the onset, and one since it with something changed."""
    changed["health"] = replace(HEALTH, **(health or {}))
    before = replace(DEVICE, sampled_s=90.0, name=changed.get("name", DEVICE.name))
    samples = (before, replace(DEVICE, **changed))
    return DeviceWindow(onset_s=ONSET_S, samples=samples, pids=frozenset({RANK_PID}))


def host(**changed: Any) -> HostWindow:
    """A healthy sample before the onset, and one since it with something changed."""
    samples = (replace(HOST, sampled_s=90.0), replace(HOST, **changed))
    return HostWindow(onset_s=ONSET_S, samples=samples)


def thread(**changed: Any) -> ThreadTime:
    return replace(THREAD, **changed)


HEALTHY = Symptoms(
    slowdown=1.5,
    device=device(),
    peers=(device(), device(), device()),
    host=host(),
    peer_hosts=(host(), host()),
    thread=thread(),
    peer_threads=(thread(), thread()),
)
ALONE = Symptoms(slowdown=1.5, device=device(), host=host(), thread=thread())
