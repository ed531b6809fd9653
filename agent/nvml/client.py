"""Queries NVML; the only module that imports it. A value that a device lacks is None.

`read` queries the driver (each query may fail by itself), `parse` makes the sample. A query that
the device does not support is not repeated until NVML is opened again. Queries may hang, so only
the thread of `sampler.py` calls this module. A lost GPU is reported and not queried again: a stale
handle can crash the driver's library (XuehaiPan/nvitop issue 139).
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
    """The MIG instances of a device; empty without MIG. `mode`: (current, pending) or None."""
    if mode is None or not mode[0]:
        return ()
    most = query(pynvml, device, "instances", lambda n, h: n.nvmlDeviceGetMaxMigDeviceCount(h))
    found = []
    for slot in range(most or 0):
        handle = query(pynvml, device, "instance", partial(_instance, slot=slot))
        if handle is None:
            continue  # no instance in this slot
        part = Device(index=device.index, handle=handle)
        uuid = query(pynvml, part, "uuid", lambda n, h: n.nvmlDeviceGetUUID(h))
        name = query(pynvml, part, "name", lambda n, h: n.nvmlDeviceGetName(h))
        if uuid is not None:
            found.append(Instance(handle=handle, uuid=text(uuid), name=text(name)))
    return tuple(found)


def instance_samples(pynvml: Any, device: Device, whole: DeviceSample) -> tuple[DeviceSample, ...]:
    """The device itself or, in MIG mode, each of its instances.

    Memory is that of the instance, all other values are those of its GPU. NVML reports neither
    utilisation nor processes of an instance, so both are None.
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
    """Number of NVLinks: the links are queried in turn until one is refused."""
    for link in range(MAX_LINKS):
        if query(pynvml, device, f"link {link}", partial(_link_state, link=link)) is None:
            return link
    return MAX_LINKS


def _instance(pynvml: Any, handle: Any, slot: int) -> Any:
    return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)


def _link_state(pynvml: Any, handle: Any, link: int) -> Any:
    return pynvml.nvmlDeviceGetNvLinkState(handle, link)


FIELDS_INTERVAL_S = 5.0  # between two reads of a device's field values, all in one call
SLOW_INTERVAL_S = 30.0  # between two rounds of expensive queries (process lists take milliseconds)
NO_XIDS: Mapping[int, XidHistory] = MappingProxyType({})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlUnavailable:
    """NVML cannot be used; `reason` is reported to the controller."""

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
    # The name before driver 535; queried only if the new one is unknown.
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
    """An open NVML. `lost` describes the devices that no longer answer."""

    pynvml: Any
    devices: tuple[Device, ...]
    lost: tuple[str, ...] = ()
    watch: XidListener | None = None

    def sample(self, now_s: float) -> tuple[DeviceSample, ...]:
        """Sample every device and MIG instance; a lost device gives a sample with `is_lost`.

        Raises:
            DriverGoneError: The driver was unloaded or replaced.
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
        """Shut NVML down; safe if the driver is gone.

        NVML stays open if the thread that waits for Xids hangs in a call of it.
        """
        if self.watch is not None and not self.watch.close():
            _log.warning(
                "nvml is not shut down: the thread that waits for Xids hangs in the driver"
            )
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


def open_nvml(known: Mapping[int, XidHistory] = NO_XIDS) -> Nvml | NvmlUnavailable:
    """Open NVML with all its devices; a device that fails does not hide the others.

    Args:
        known: Xids by device index from before NVML was reopened.

    Returns:
        The open NVML, or the reason why it cannot be used.
    """
    # nvidia-ml-py provides `pynvml`; the deprecated package of that name warns when installed too.
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
    watch = XidListener.begin(pynvml, handles, known=known)
    return Nvml(pynvml=pynvml, devices=tuple(devices), watch=watch)


def read(pynvml: Any, device: Device, now_s: float, num_devices: int = 1) -> dict[str, Any]:
    """Raw answers of a device by query name; None for what it does not provide.

    The first round of expensive queries is spread over the period by device index: such calls hold
    the driver's lock, which kernel launches need as well.

    Raises:
        DeviceLostError: The device fell off the bus or must be reset.
        DriverGoneError: The driver was unloaded or replaced.
    """
    raw = {
        name: query(pynvml, device, name, _FAST[name]) for name in _FAST if name != "old_reasons"
    }
    if raw["uuid"] is None:
        raise DeviceLostError("the device reports no UUID")
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
    """The sample of raw NVML answers, with milliwatts as watts and percent as ratio.

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
    """Read all field values of a device in one call, and its activity since the last call."""
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
        shares = query(pynvml, device, "activity since", lambda n, _: since_last(n))
        device.counters |= shares or {}


def _health_fields(device: Device) -> dict[str, Any]:
    """Fields of a DeviceHealth from the device's last answers."""
    found = {
        name: device.slow[question]
        for question, name in _HEALTH_OF_SLOW.items()
        if device.slow.get(question) is not None
    }
    spare_rows = device.slow.get("spare_rows")
    if spare_rows is not None:
        found["remap_banks_full"] = int(spare_rows.none)
    return found | device.health


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
