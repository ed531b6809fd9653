"""The only file that imports NVML. What a device does not tell is None, never a guess.

`read` asks the driver (calls that may fail one by one), `parse` makes the sample. What a device
refuses for good is not asked again until the driver is opened anew. A sick driver may hang: who
calls does so in a thread that nobody waits for (`sampler.py`). A lost GPU is reported and not asked
again, for a stale handle can crash the driver's library (XuehaiPan/nvitop issue 139).
"""

import ctypes
import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from pacekeeper.agent.nvml import fields
from pacekeeper.agent.nvml.device import Device, DeviceLostError, Instance, Query, query, text
from pacekeeper.agent.nvml.gpm import Activity
from pacekeeper.agent.nvml.xid_events import XidHistory, XidListener
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample

MAX_LINKS = 36  # of a device, by NVML's header


def list_instances(pynvml: Any, device: Device, mode: Any) -> tuple[Instance, ...]:
    """The MIG instances of a device whose MIG `mode` is (current, pending); without MIG none."""
    if mode is None or not mode[0]:
        return ()
    most = query(pynvml, device, "instances", lambda n, h: n.nvmlDeviceGetMaxMigDeviceCount(h))
    found = []
    for slot in range(most or 0):
        handle = query(pynvml, device, "instance", partial(_instance, slot=slot))
        if handle is None:
            continue  # no instance has this number
        part = Device(index=device.index, handle=handle)
        uuid = query(pynvml, part, "uuid", lambda n, h: n.nvmlDeviceGetUUID(h))
        name = query(pynvml, part, "name", lambda n, h: n.nvmlDeviceGetName(h))
        if uuid is not None:
            found.append(Instance(handle=handle, uuid=text(uuid), name=text(name)))
    return tuple(found)


def instance_samples(pynvml: Any, device: Device, whole: DeviceSample) -> tuple[DeviceSample, ...]:
    """The device itself or, in MIG mode, each of its instances.

    An instance has memory of its own; the rest is read of the device it is a part of. NVML tells
    neither utilisation nor processes of instances, and those of the whole are not its.
    """
    if not device.instances:
        return (whole,)
    found = []
    for instance in device.instances:
        part = Device(index=device.index, handle=instance.handle, refused=device.refused)
        memory = query(pynvml, part, "instance memory", lambda n, h: n.nvmlDeviceGetMemoryInfo(h))
        sample = replace(
            whole,
            device_uuid=instance.uuid,
            name=instance.name,
            parent_uuid=whole.device_uuid,
            utilisation_ratio=None,
            processes=None,
            memory_used_bytes=None if memory is None else int(memory.used),
        )
        found.append(sample)
    return tuple(found)


def count_links(pynvml: Any, device: Device) -> int:
    """How many NVLinks the device has: asked one by one, for no device has the header's maximum."""
    for link in range(MAX_LINKS):
        if query(pynvml, device, f"link {link}", partial(_link_state, link=link)) is None:
            return link
    return MAX_LINKS


def _instance(pynvml: Any, handle: Any, slot: int) -> Any:
    return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)


def _link_state(pynvml: Any, handle: Any, link: int) -> Any:
    return pynvml.nvmlDeviceGetNvLinkState(handle, link)


FIELDS_INTERVAL_S = 5.0  # between two readings of a device's counters, all in one call
SLOW_INTERVAL_S = (
    30.0  # between two readings of what is costly to ask (process lists take milliseconds)
)
NO_XIDS: Mapping[int, XidHistory] = MappingProxyType({})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlUnavailable:
    """There is no NVML here, and why: reported as such."""

    reason: str


_FAST: dict[str, Query] = {
    "uuid": lambda n, h: n.nvmlDeviceGetUUID(h),
    "sm_clock": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
    "memory_clock": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),
    "temperature": lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "power_mw": lambda n, h: n.nvmlDeviceGetPowerUsage(h),
    "energy_mj": lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h),
    "utilisation": lambda n, h: n.nvmlDeviceGetUtilizationRates(h),
    "memory": lambda n, h: n.nvmlDeviceGetMemoryInfo(h),
    "reasons": lambda n, h: n.nvmlDeviceGetCurrentClocksEventReasons(h),
    # The name before driver 535; asked only where the new one is not known.
    "old_reasons": lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h),
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h),
}
_SLOW: dict[str, Query] = {
    "name": lambda n, h: n.nvmlDeviceGetName(h),
    "sm_clock_max": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM),
    "memory_clock_max": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_MEM),
    "sm_clock_set": lambda n, h: n.nvmlDeviceGetApplicationsClock(h, n.NVML_CLOCK_SM),
    "power_limit_mw": lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h),
    "pcie_generation_max": lambda n, h: n.nvmlDeviceGetMaxPcieLinkGeneration(h),
    "pcie_width_max": lambda n, h: n.nvmlDeviceGetMaxPcieLinkWidth(h),
    "pcie_replays": lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h),
    "ecc": lambda n, h: n.nvmlDeviceGetTotalEccErrors(
        h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
    ),
    "processes": lambda n, h: n.nvmlDeviceGetComputeRunningProcesses(h),
    "spare_rows": lambda n, h: n.nvmlDeviceGetRowRemapperHistogram(h),
    "mig_mode": lambda n, h: n.nvmlDeviceGetMigMode(h),
}
_HEALTH_OF_SLOW = {
    "memory_clock_max": "memory_clock_max_mhz",
    "sm_clock_set": "sm_clock_set_mhz",
    "pcie_generation_max": "pcie_generation_max",
    "pcie_width_max": "pcie_width_max",
}


@dataclass(slots=True, kw_only=True)
class Nvml:
    """An open NVML. `lost` says which devices do not answer any more."""

    pynvml: Any
    devices: tuple[Device, ...]
    lost: tuple[str, ...] = ()
    watch: XidListener | None = None

    def sample(self, now_s: float) -> tuple[DeviceSample, ...]:
        """One reading of every device and MIG instance. Raises GoneError where the driver is gone.

        A lost device that answered before is told of as lost.
        """
        samples: list[DeviceSample] = []
        lost = []
        for device in self.devices:
            try:
                if device.is_lost:
                    raise DeviceLostError
                samples += self._sample(device, now_s)
            except DeviceLostError:
                device.is_lost = True
                lost.append(f"device {device.index} is lost")
                if device.uuid:
                    samples.append(_lost_sample(device, now_s, self._xids(device)))
        self.lost = tuple(lost)
        return tuple(samples)

    def close(self) -> None:
        """Shut NVML down; harmless where it is gone.

        Where the thread that waits for Xids hangs in the driver, the driver is left open: it would
        be shut down under that thread's feet.
        """
        if self.watch is not None and not self.watch.close():
            _log.warning("nvml: a call hangs; the driver is left open")
            return
        try:
            self.pynvml.nvmlShutdown()
        except self.pynvml.NVMLError as error:
            _log.info("nvml shutdown: %s", error)

    def _sample(self, device: Device, now_s: float) -> tuple[DeviceSample, ...]:
        began_s = time.monotonic()
        raw = read(self.pynvml, device, now_s, num_devices=len(self.devices))
        answer_s = time.monotonic() - began_s
        whole = parse(device.index, raw, now_s, xids=self._xids(device))
        return instance_samples(self.pynvml, device, replace(whole, answer_s=answer_s))

    def _xids(self, device: Device) -> XidHistory | None:
        return None if self.watch is None else self.watch.of(device.index)


def open_nvml(heard: Mapping[int, XidHistory] = NO_XIDS) -> Nvml | NvmlUnavailable:
    """NVML with all its devices, or the reason why there is none. A sick one hides no other.

    `heard`: Xids from before it was opened anew.
    """
    # A package of that name, which others bring along, says so of itself; ours is beside it.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    try:
        import pynvml
    except ImportError as error:
        return NvmlUnavailable(reason=f"nvidia-ml-py is not installed: {error}")
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return NvmlUnavailable(reason=f"no NVML: {error}")
    devices = []
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            devices.append(Device(index=index, handle=handle))
        except pynvml.NVMLError as error:
            _log.warning("nvml device=%d: %s", index, error)
            devices.append(Device(index=index, handle=None, is_lost=True))
    handles = {device.index: device.handle for device in devices if not device.is_lost}
    watch = XidListener.begin(pynvml, handles, known=heard)
    return Nvml(pynvml=pynvml, devices=tuple(devices), watch=watch)


def read(pynvml: Any, device: Device, now_s: float, num_devices: int = 1) -> dict[str, Any]:
    """Raw answers by name; None where the device does not tell. Raises LostError, GoneError.

    What is read seldom is read of one device after the other: such calls hold the driver's lock,
    and eight in a row would be felt by who launches kernels.
    """
    raw = {
        name: query(pynvml, device, name, _FAST[name]) for name in _FAST if name != "old_reasons"
    }
    if raw["uuid"] is None:
        raise DeviceLostError("a device without a name")
    device.uuid = text(raw["uuid"])
    if raw["reasons"] is None:
        raw["reasons"] = query(pynvml, device, "old_reasons", _FAST["old_reasons"])
    turn = 1.0 + device.index / num_devices  # of the first period only
    if device.slow_due_s is None or now_s >= device.slow_due_s:
        device.slow_due_s = now_s + SLOW_INTERVAL_S * (turn if device.slow_due_s is None else 1.0)
        device.slow = {name: query(pynvml, device, name, _SLOW[name]) for name in _SLOW}
        device.instances = list_instances(pynvml, device, device.slow["mig_mode"])
        device.num_links = device.num_links or count_links(pynvml, device)
    if device.fields_due_s is None or now_s >= device.fields_due_s:
        device.fields_due_s = now_s + FIELDS_INTERVAL_S * (
            turn if device.fields_due_s is None else 1.0
        )
        _read_fields(pynvml, device)
    return raw | device.slow | {"counters": device.counters, "health": _health_fields(device)}


def parse(
    index: int, raw: Mapping[str, Any], now_s: float, *, xids: XidHistory | None = None
) -> DeviceSample:
    """The sample in NVML's answers: MHz, degrees Celsius, milliwatts to watts, percent to ratio.

    Power is an average over one second on Ampere and later, except GA100 (NVML reference).
    """
    utilisation, memory, processes = raw["utilisation"], raw["memory"], raw["processes"]
    return DeviceSample(
        device_index=index,
        device_uuid=text(raw["uuid"]),
        sampled_s=now_s,
        name=text(raw["name"]),
        sm_clock_mhz=raw["sm_clock"],
        sm_clock_max_mhz=raw["sm_clock_max"],
        memory_clock_mhz=raw["memory_clock"],
        temperature_celsius=raw["temperature"],
        power_watts=_scaled(raw["power_mw"], 1e-3),
        power_limit_watts=_scaled(raw["power_limit_mw"], 1e-3),
        utilisation_ratio=None if utilisation is None else utilisation.gpu / 100.0,
        memory_used_bytes=None if memory is None else int(memory.used),
        clock_event_reasons=raw["reasons"],
        pcie_generation=raw["pcie_generation"],
        pcie_width=raw["pcie_width"],
        pcie_replays=raw["pcie_replays"],
        ecc_uncorrected=raw["ecc"],
        processes=None if processes is None else tuple(int(p.pid) for p in processes),
        energy_joules=_scaled(raw["energy_mj"], 1e-3),
        health=DeviceHealth(**raw["health"], **_xid_fields(xids)),
        **raw["counters"],
    )


def _read_fields(pynvml: Any, device: Device) -> None:
    """All counters of a device in one call, and its activity since the last one."""
    keys = fields.keys(device.num_links)
    wanted = [key for key in keys if key not in device.refused_fields]
    entries = query(pynvml, device, "fields", lambda n, h: n.nvmlDeviceGetFieldValues(h, wanted))
    device.counters, device.health = {}, {}
    if entries is not None:
        answers, refused = fields.decode(ctypes.string_at(entries, ctypes.sizeof(entries)))
        device.refused_fields |= refused
        device.counters |= fields.sample_fields(answers)
        device.health |= fields.health_fields(answers)
    margin = query(pynvml, device, "margin", lambda n, h: n.nvmlDeviceGetMarginTemperature(h))
    if margin is not None:
        device.counters["margin_celsius"] = margin
    if device.activity is None:
        device.activity = query(pynvml, device, "activity", Activity.begin)
    if device.activity is not None:
        since_last = device.activity.since_last
        told = query(pynvml, device, "activity since", lambda n, _: since_last(n))
        device.counters |= told or {}


def _health_fields(device: Device) -> dict[str, Any]:
    """The fields of a device's health, from its last answers."""
    told = {
        name: device.slow[question]
        for question, name in _HEALTH_OF_SLOW.items()
        if device.slow.get(question) is not None
    }
    spare_rows = device.slow.get("spare_rows")
    if spare_rows is not None:
        told["remap_banks_full"] = int(spare_rows.none)
    return told | device.health


def _lost_sample(device: Device, now_s: float, xids: XidHistory | None) -> DeviceSample:
    return DeviceSample(
        device_index=device.index,
        device_uuid=device.uuid,
        sampled_s=now_s,
        name=text(device.slow.get("name")),
        is_lost=True,
        health=DeviceHealth(**_xid_fields(xids)),
    )


def _xid_fields(xids: XidHistory | None) -> dict[str, Any]:
    return {} if xids is None else {"num_xids": xids.count, "xids": xids.newest}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
