"""What Prometheus is told of devices and of the node's clock, made when it asks. Base units.

What a device does not tell, or no more, has no series; a lost one has the series that says so.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pacekeeper.core.topology import DeviceSample, HostSample

_LABELS = ("device_uuid", "device_index")
# Series -> (its help, the field of the sample or of its health, its unit in base units).
_GAUGES: Mapping[str, tuple[str, str, float]] = {
    "temperature_celsius": ("Temperature of the GPU.", "temperature_celsius", 1.0),
    "memory_temperature_celsius": (
        "Temperature of the GPU's memory.",
        "memory_temperature_celsius",
        1.0,
    ),
    "margin_celsius": ("Degrees until the GPU slows down.", "margin_celsius", 1.0),
    "power_watts": ("Power drawn by the GPU's board.", "power_watts", 1.0),
    "sm_clock_hertz": ("Clock of the GPU's multiprocessors.", "sm_clock_mhz", 1e6),
    "utilisation_ratio": ("Share of time a kernel was running.", "utilisation_ratio", 1.0),
    "sm_active_ratio": ("Share of multiprocessors and time that worked.", "sm_active_ratio", 1.0),
    "answer_seconds": ("How long the driver took for one reading.", "answer_s", 1.0),
    "nvlinks": ("NVLinks of the GPU.", "nvlinks", 1.0),
    "nvlinks_up": ("NVLinks that are up.", "nvlinks_up", 1.0),
    "remap_pending": ("1 while damaged rows wait for a reset.", "is_remap_pending", 1.0),
    "recovery_action": ("What NVML asks for: 0 is nothing.", "recovery_action", 1.0),
}
_COUNTERS: Mapping[str, tuple[str, str, float]] = {
    "energy_joules": ("Energy since the driver was loaded.", "energy_joules", 1.0),
    "pcie_replays": ("PCIe packets sent again.", "pcie_replays", 1.0),
    "pcie_errors": ("PCIe errors that the link corrected.", "pcie_errors", 1.0),
    "nvlink_errors": ("Damaged or lost NVLink packets.", "nvlink_errors", 1.0),
    "nvlink_recoveries": ("NVLinks that had to be trained anew.", "nvlink_recoveries", 1.0),
    "ecc_uncorrected": (
        "Uncorrected memory errors.",
        "ecc_uncorrected",
        1.0,
    ),
    "ecc_corrected": ("Corrected memory errors.", "ecc_corrected", 1.0),
    "rows_remapped": ("Memory rows replaced over the GPU's life.", "rows_remapped", 1.0),
    "xids": ("Xids that the driver reported while it was listened to.", "num_xids", 1.0),
}
_HELD = ("power_cap", "board_limit", "reliability", "sync_boost", "sw_thermal", "hw_thermal")
_CLOCK: Mapping[str, tuple[str, str]] = {
    "clock_offset_seconds": ("What the kernel still has to correct.", "clock_offset_s"),
    "clock_error_seconds": ("The kernel's bound of the wall clock's error.", "clock_error_s"),
    "clock_synchronised": ("1 while the wall clock is synchronised.", "is_clock_synchronised"),
}


class DeviceSeries(Collector):
    """The newest samples, as series."""

    def __init__(self) -> None:
        self.devices: tuple[DeviceSample, ...] = ()
        self.host: HostSample | None = None

    def collect(self) -> Iterator[Metric]:
        lost = GaugeMetricFamily("pacekeeper_device_lost", "1: it answers no more.", None, _LABELS)
        for sample in self.devices:
            lost.add_metric(_names(sample), float(sample.is_lost))
        yield lost
        for name, (text, field, unit) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"pacekeeper_device_{name}", text, None, _LABELS)
            for sample in self.devices:
                if (value := _value(sample, field)) is not None:
                    gauge.add_metric(_names(sample), value * unit)
            yield gauge
        for name, (text, field, unit) in _COUNTERS.items():
            counter = CounterMetricFamily(f"pacekeeper_device_{name}", text, None, _LABELS)
            for sample in self.devices:
                if (value := _value(sample, field)) is not None:
                    counter.add_metric(_names(sample), value * unit)
            yield counter
        yield self._held()
        for name, (text, field) in _CLOCK.items():
            value = getattr(self.host, field, None)
            if value is not None:
                yield GaugeMetricFamily(f"pacekeeper_agent_{name}", text, float(value))

    def _held(self) -> Metric:
        family = CounterMetricFamily(
            "pacekeeper_device_clocks_held_seconds",
            "Time in which clocks were held down, by reason.",
            None,
            (*_LABELS, "reason"),
        )
        for sample in self.devices:
            for reason in (*_HELD, "power_brake"):
                value = getattr(sample, f"{reason}_held_s")
                if value is not None:
                    family.add_metric((*_names(sample), reason), value)
        return family


def _names(sample: DeviceSample) -> tuple[str, str]:
    return sample.device_uuid, str(sample.device_index)


def _value(sample: DeviceSample, field: str) -> float | None:
    value = getattr(sample, field, None)
    if value is None:
        value = getattr(sample.health, field, None)
    return None if value is None else float(value)
