"""The only file that imports NVML. What a device does not tell is None, never a guess.

`read` asks the driver (calls that may fail one by one), `parse` makes the sample. A sick driver may
hang: `Sampler` asks in a thread that nobody waits for. A lost GPU is reported and not asked again,
for a stale handle can crash the driver's library (XuehaiPan/nvitop issue 139).
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pacekeeper.core.topology import DeviceSample

SLOW_S = 30.0  # between two readings of what is costly to ask (process lists take milliseconds)
HUNG_S = 10.0  # an answer that takes longer counts as none
REOPEN_S = 60.0  # between two attempts where there is no driver, or a device is lost
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNvml:
    """There is no NVML here, and why: reported as such."""

    reason: str


class LostError(Exception):
    """The device fell off its bus, or its driver is gone."""


@dataclass(slots=True, kw_only=True)
class Device:
    """One GPU: its handle, questions it refused for good, and its last slow answers."""

    index: int
    handle: Any
    is_lost: bool = False
    refused: set[str] = field(default_factory=set)
    slow: dict[str, Any] = field(default_factory=dict)
    slow_read_s: float | None = None


_Question = Callable[[Any, Any], Any]

_FAST: dict[str, _Question] = {
    "uuid": lambda n, h: n.nvmlDeviceGetUUID(h),
    "sm_clock": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
    "memory_clock": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),
    "temperature": lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "power_mw": lambda n, h: n.nvmlDeviceGetPowerUsage(h),
    "utilisation": lambda n, h: n.nvmlDeviceGetUtilizationRates(h),
    "memory": lambda n, h: n.nvmlDeviceGetMemoryInfo(h),
    "reasons": lambda n, h: n.nvmlDeviceGetCurrentClocksEventReasons(h),
    # The name before driver 535; asked only where the new one is not known.
    "old_reasons": lambda n, h: n.nvmlDeviceGetCurrentClocksThrottleReasons(h),
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h),
}
_SLOW: dict[str, _Question] = {
    "name": lambda n, h: n.nvmlDeviceGetName(h),
    "sm_clock_max": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM),
    "power_limit_mw": lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h),
    "pcie_replays": lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h),
    "ecc": lambda n, h: n.nvmlDeviceGetTotalEccErrors(
        h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
    ),
    "processes": lambda n, h: n.nvmlDeviceGetComputeRunningProcesses(h),
}


@dataclass(slots=True, kw_only=True)
class Nvml:
    """An open NVML. `lost` says which devices do not answer any more."""

    pynvml: Any
    devices: tuple[Device, ...]
    lost: tuple[str, ...] = ()

    def sample(self, now_s: float) -> tuple[DeviceSample, ...]:
        """One reading of every device that answers."""
        samples, lost = [], []
        for device in self.devices:
            try:
                if device.is_lost:
                    raise LostError
                samples.append(parse(device.index, read(self.pynvml, device, now_s), now_s))
            except LostError:
                device.is_lost = True
                lost.append(f"device {device.index} is lost")
        self.lost = tuple(lost)
        return tuple(samples)

    def close(self) -> None:
        """Shut NVML down; harmless where it is gone."""
        try:
            self.pynvml.nvmlShutdown()
        except self.pynvml.NVMLError as error:
            _log.info("nvml shutdown: %s", error)


def open_nvml() -> Nvml | NoNvml:
    """NVML with all its devices, or the reason why there is none. A sick one hides no other."""
    try:
        import pynvml
    except ImportError as error:
        return NoNvml(reason=f"nvidia-ml-py is not installed: {error}")
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return NoNvml(reason=f"no NVML: {error}")
    devices = []
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            devices.append(Device(index=index, handle=handle))
        except pynvml.NVMLError as error:
            _log.warning("nvml device=%d: %s", index, error)
            devices.append(Device(index=index, handle=None, is_lost=True))
    return Nvml(pynvml=pynvml, devices=tuple(devices))


def read(pynvml: Any, device: Device, now_s: float) -> dict[str, Any]:
    """Raw answers by name; None where the device does not tell. Raises LostError."""
    raw = {name: _ask(pynvml, device, name, _FAST[name]) for name in _FAST if name != "old_reasons"}
    if raw["uuid"] is None:
        raise LostError("a device without a name")
    if raw["reasons"] is None:
        raw["reasons"] = _ask(pynvml, device, "old_reasons", _FAST["old_reasons"])
    if device.slow_read_s is None or now_s - device.slow_read_s >= SLOW_S:
        device.slow = {name: _ask(pynvml, device, name, _SLOW[name]) for name in _SLOW}
        device.slow_read_s = now_s
    return raw | device.slow


def parse(index: int, raw: dict[str, Any], now_s: float) -> DeviceSample:
    """The sample in NVML's answers: MHz, degrees Celsius, milliwatts to watts, percent to ratio.

    Power is an average over one second on Ampere and later, except GA100 (NVML reference).
    """
    utilisation, memory, processes = raw["utilisation"], raw["memory"], raw["processes"]
    return DeviceSample(
        device_index=index,
        device_uuid=_text(raw["uuid"]),
        sampled_s=now_s,
        name=_text(raw["name"]) if raw["name"] is not None else "",
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
    )


def _ask(pynvml: Any, device: Device, name: str, question: _Question) -> Any:
    """The answer, or None. What this device or driver does not know is not asked again."""
    if name in device.refused:
        return None
    try:
        return question(pynvml, device.handle)
    except pynvml.NVMLError as error:
        code = getattr(error, "value", None)
        if code in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNINITIALIZED):
            raise LostError(str(error)) from None
        if code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            device.refused.add(name)
        return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class Sampler:
    """Reads all devices on a period, in a daemon thread: no hung driver stops the agent or its end.

    `latest(now_s)` never waits.
    """

    def __init__(self, interval_s: float, opener: Callable[[], Nvml | NoNvml] = open_nvml) -> None:
        self._interval_s = interval_s
        self._open = opener
        self._stop = threading.Event()
        self._asked_s: float | None = None  # when the question under way was asked
        self._latest: tuple[tuple[DeviceSample, ...], str] = ((), "not asked yet")

    def start(self) -> None:
        """Begin to sample."""
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to end; it is not waited for."""
        self._stop.set()

    def latest(self, now_s: float) -> tuple[tuple[DeviceSample, ...], str]:
        """The newest samples, and "ok" or why there are none (or not of all devices)."""
        asked_s = self._asked_s
        if asked_s is not None and now_s - asked_s > HUNG_S:
            return (), f"NVML hangs: no answer for more than {HUNG_S:g} s"
        return self._latest

    def _run(self) -> None:
        nvml: Nvml | None = None
        opened_s = 0.0
        while not self._stop.is_set():
            now_s = self._asked_s = time.monotonic()
            if nvml is not None and nvml.lost and now_s - opened_s > REOPEN_S:
                nvml.close()
                nvml = None
            if nvml is None:
                found = self._open()
                opened_s = now_s
                if isinstance(found, NoNvml):
                    self._publish((), found.reason)
                    self._stop.wait(REOPEN_S)
                    continue
                nvml = found
            samples = nvml.sample(now_s)
            self._publish(samples, "; ".join(nvml.lost) or "ok")
            self._stop.wait(self._interval_s)
        if nvml is not None:
            nvml.close()

    def _publish(self, samples: tuple[DeviceSample, ...], state: str) -> None:
        self._asked_s = None
        if state != self._latest[1]:
            _log.info("nvml=%r devices=%d", state, len(samples))
        self._latest = (samples, state)
