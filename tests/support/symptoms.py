"""A healthy device, host and thread under load, and the same with something changed."""

from dataclasses import replace
from typing import Any

from pacekeeper.core.topology import DeviceSample, HostSample
from pacekeeper.predictor.symptoms import DeviceWindow, HostWindow, Symptoms, ThreadTime

ONSET_S = 100.0
RANK_PID = 7
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
)
THREAD = ThreadTime(compute_s=1.0, run_queue_s=0.01, stall_s=0.01)


def device(**changed: Any) -> DeviceWindow:
    """A healthy sample before the onset, and one since it with something changed."""
    before = replace(DEVICE, sampled_s=90.0, name=changed.get("name", DEVICE.name))
    samples = (before, replace(DEVICE, **changed))
    return DeviceWindow(onset_s=ONSET_S, samples=samples, pids=frozenset({RANK_PID}))


def host(**changed: Any) -> HostWindow:
    return HostWindow(onset_s=ONSET_S, samples=(replace(HOST, **changed),))


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
