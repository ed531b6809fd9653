"""The only file that imports NVML. What a device does not tell is None, never a guess.

`read` asks the driver (a few calls that may fail one by one), `parse` makes the sample. Sampling
may hang with a sick driver, so the caller does it in a thread of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pacekeeper.core.topology import DeviceSample


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNvml:
    """There is no NVML here, and why: reported as such."""

    reason: str


@dataclass(slots=True, kw_only=True)
class Nvml:
    """An open NVML. `lost` names devices that do not answer any more."""

    pynvml: Any
    handles: tuple[Any, ...]
    lost: list[str] = field(default_factory=list)

    def sample(self, now_s: float) -> tuple[DeviceSample, ...]:
        """One reading of every device that answers."""
        samples = []
        self.lost = []
        for index, handle in enumerate(self.handles):
            raw = read(self.pynvml, handle)
            if raw.get("uuid") is None:
                self.lost.append(f"device {index} does not answer")
            else:
                samples.append(parse(index, raw, now_s))
        return tuple(samples)

    def close(self) -> None:
        """Shut NVML down; harmless where it is gone."""
        _ask(self.pynvml, self.pynvml.nvmlShutdown)


def open_nvml() -> Nvml | NoNvml:
    """NVML with all its devices, or the reason why there is none."""
    try:
        import pynvml
    except ImportError as error:
        return NoNvml(reason=f"nvidia-ml-py is not installed: {error}")
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        handles = tuple(pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count))
    except pynvml.NVMLError as error:
        return NoNvml(reason=f"no NVML: {error}")
    return Nvml(pynvml=pynvml, handles=handles)


def read(pynvml: Any, handle: Any) -> dict[str, Any]:
    """Raw answers by name; None where the driver refuses that question."""
    ask: Callable[..., Any] = lambda call, *a: _ask(pynvml, call, handle, *a)  # noqa: E731
    n = pynvml
    return {
        "uuid": ask(n.nvmlDeviceGetUUID),
        "name": ask(n.nvmlDeviceGetName),
        "sm_clock": ask(n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_SM),
        "sm_clock_max": ask(n.nvmlDeviceGetMaxClockInfo, n.NVML_CLOCK_SM),
        "memory_clock": ask(n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_MEM),
        "temperature": ask(n.nvmlDeviceGetTemperature, n.NVML_TEMPERATURE_GPU),
        "power_mw": ask(n.nvmlDeviceGetPowerUsage),
        "power_limit_mw": ask(n.nvmlDeviceGetEnforcedPowerLimit),
        "utilisation": ask(n.nvmlDeviceGetUtilizationRates),
        "memory": ask(n.nvmlDeviceGetMemoryInfo),
        "reasons": ask(n.nvmlDeviceGetCurrentClocksThrottleReasons),
        "pcie_generation": ask(n.nvmlDeviceGetCurrPcieLinkGeneration),
        "pcie_width": ask(n.nvmlDeviceGetCurrPcieLinkWidth),
        "pcie_replays": ask(n.nvmlDeviceGetPcieReplayCounter),
        "ecc": ask(
            n.nvmlDeviceGetTotalEccErrors,
            n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            n.NVML_VOLATILE_ECC,
        ),
        "processes": ask(n.nvmlDeviceGetComputeRunningProcesses),
    }


def parse(index: int, raw: dict[str, Any], now_s: float) -> DeviceSample:
    """The sample in NVML's answers: MHz, degrees Celsius, milliwatts to watts, percent to ratio."""
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


def _ask(pynvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
